// One unary RPC of bytes, to whichever replica is best, with retries, hedging and a deadline.
#pragma once

#include "absl/functional/any_invocable.h"
#include "client/replica_set.h"
#include "client/retry.h"
#include "client/sender.h"

namespace engram::client {

// Starts the call; never blocks. `done` is called once, on a thread of the set, or before this returns, or in
// the set's destructor; under no lock. It must not block (Completions) and must not destroy the set.
// A call by `replica` is repeated there as long as that one serves, and is UNAVAILABLE at once when it does not.
void StartRawCall(ReplicaSet& replicas, const RetryOptions& options, RawCall call,
                  absl::AnyInvocable<void(RawReply)> done);

}  // namespace engram::client
