// One RPC of bytes: what the engine of a call asks of whatever carries it to a server.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"

namespace engram::client {

struct RawCall {
  const char* method = nullptr;  // "/engram.v1.EngramService/Apply"
  grpc::ByteBuffer request;
  absl::Time deadline = absl::InfiniteFuture();
  int64_t weight_tokens = 0;       // of the load this puts on a replica
  std::string replica;             // empty: any; else only this one
  bool hedgeable = false;          // may be sent to two replicas
  std::vector<std::string> avoid;  // replicas, where there are others
};

struct RawReply {
  absl::Status status;
  grpc::ByteBuffer body;
  std::string replica;  // that answered, or was asked last
  int attempts = 0;
};

// `done` is called exactly once, on any thread, perhaps before this returns. Thread-safe.
using Sender = std::function<void(RawCall call, absl::AnyInvocable<void(RawReply)> done)>;

}  // namespace engram::client
