// One unary RPC of bytes, to whichever replica is best, with retries, hedging and a deadline.
#pragma once

#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/replica_set.h"
#include "client/retry.h"
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
  std::vector<std::string> avoid = {};  // rather not these, the last one least
};

struct RawReply {
  // The server's, with its details (error_details.h); or UNAVAILABLE or DEADLINE_EXCEEDED that names the replica;
  // CANCELLED when the set ended.
  absl::Status status;
  grpc::ByteBuffer body;  // where OK
  std::string replica;    // that gave `status`; empty where nobody was asked
  int attempts = 0;       // how often the request went out
};

// Starts the call; never blocks. `done` is called once, on a thread of the set, or before this returns, or in
// the set's destructor; under no lock. It must not block (Completions) and must not destroy the set.
// A call by `replica` is repeated there as long as that one serves, and is UNAVAILABLE at once when it does not.
void StartRawCall(ReplicaSet& replicas, const RetryOptions& options, RawCall call,
                  absl::AnyInvocable<void(RawReply)> done);

}  // namespace engram::client
