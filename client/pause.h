// A wait that the end of the client cuts short.
#pragma once

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "client/replica_set.h"

namespace engram::client {

// Calls `then` once: with true at `until`, on a thread of the set; or with false as soon as the set is ending, perhaps
// before this returns. The set's destructor waits for it, so `then` must not block and must not destroy the set.
void StartPause(ReplicaSet& replicas, absl::Time until, absl::AnyInvocable<void(bool due)> then);

}  // namespace engram::client
