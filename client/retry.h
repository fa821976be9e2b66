// Whether a failed call is worth another attempt, and when.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"

namespace engram::client {

struct RetryOptions {
  int attempts = 4;  // in all, hedges included; 1: no retry
  // A random part of initial_backoff, doubled with each attempt up to max_backoff, passes before the next one.
  absl::Duration initial_backoff = absl::Milliseconds(20);
  absl::Duration max_backoff = absl::Seconds(2);
  // Without an answer by then, a call that may be sent twice goes to a second replica too; the first answer wins.
  absl::Duration hedge_after = absl::InfiniteDuration();
};

// How long to wait before attempt `made` + 1; none: `status` is final. `made` >= 1 attempts have been made, the last of
// which ended with `status`. `pushback` is its trailer grpc-retry-pushback-ms, empty where there was none:
// milliseconds, or negative for "never". `random` is uniform in [0, 1). Pure.
//
// UNAVAILABLE is worth it, and RESOURCE_EXHAUSTED where the server says when: such a server's delay holds where it is
// longer than ours.
absl::optional<absl::Duration> DelayBeforeRetry(const RetryOptions& options, int made, const absl::Status& status,
                                                absl::string_view pushback, double random);

}  // namespace engram::client
