// One RPC of bytes: what the engine of a call asks of whatever carries it to a server.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"

namespace engram::client {

struct RawCall {
  const char* method = "";  // "/engram.v1.EngramService/Apply"; a literal
  // Sent as it is with every attempt. Its slices may be read until shortly after the call has ended (by the loser of a
  // hedge), so they must own their bytes.
  grpc::ByteBuffer request;
  absl::Time deadline = absl::InfiniteFuture();
  int64_t weight_tokens = 0;            // of the replica's load while it runs
  std::string replica = {};             // this one only; empty: any
  bool hedgeable = false;               // may run on two replicas at once
  bool repeatable = true;               // false: sent again only where it was refused, with a reason, the time before
  std::vector<std::string> avoid = {};  // rather not these, the last one least
};

struct RawReply {
  // The server's, with its details (error_details.h); or UNAVAILABLE or DEADLINE_EXCEEDED that names the replica;
  // CANCELLED when whoever carries calls has ended.
  absl::Status status;
  grpc::ByteBuffer body;  // where OK
  std::string replica;    // that gave `status`; empty where nobody was asked
  int attempts = 0;       // how often the request went out
  // Where OK: the server_epoch that `replica` had when it was asked for its model and chosen for this call. A reply
  // with it needs no EpochCheck, which may not know the replica any more.
  std::optional<uint64_t> server_epoch = {};
};

// `done` is called exactly once, on any thread, perhaps before this returns. Thread-safe.
using Sender = std::function<void(RawCall call, absl::AnyInvocable<void(RawReply)> done)>;

// Whether a reply with this server_epoch comes from the start of `replica` that was asked for its model and found good.
// One that has restarted since may compute other bits. Thread-safe.
using EpochCheck = std::function<bool(const std::string& replica, uint64_t server_epoch)>;

// Calls `then` once: with true at `until`, or with false as soon as the carrier is ending, which waits for it. On any
// thread, perhaps before this returns. Thread-safe.
using Pauser = std::function<void(absl::Time until, absl::AnyInvocable<void(bool due)> then)>;

// Whatever carries calls to servers.
struct Carrier {
  Sender send;
  EpochCheck knows_epoch;
  Pauser pause;
};

}  // namespace engram::client
