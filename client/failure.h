// Kinds of failure of a call that was sent: what a repetition may mend, what the call itself is to blame for.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace engram::client {

// UNAVAILABLE, or RESOURCE_EXHAUSTED with a RetryInfo: the same call may succeed later or elsewhere.
bool IsPassing(const absl::Status& status);

// The call, the client's rights or the model are wrong: INVALID_ARGUMENT, FAILED_PRECONDITION, OUT_OF_RANGE, NOT_FOUND,
// RESOURCE_EXHAUSTED for good, UNAUTHENTICATED, PERMISSION_DENIED, UNIMPLEMENTED; or a server is, and should not be
// passed over in silence: INTERNAL, DATA_LOSS. Never skipped.
bool IsRefusal(const absl::Status& status);

// What RetryInfo asks for; zero where there is none, at most a minute is believed.
absl::Duration RetryDelay(const absl::Status& status);

}  // namespace engram::client
