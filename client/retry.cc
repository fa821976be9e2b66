#include "client/retry.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "client/error_details.h"
#include "google/rpc/error_details.pb.h"

namespace engram::client {
namespace {

// What google.rpc.RetryInfo asks for; none where there is none, or it is nonsense.
absl::optional<absl::Duration> RetryInfoDelay(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kRetryInfoUrl);
  google::rpc::RetryInfo info;
  if (!payload.has_value() || !info.ParseFromString(std::string(*payload))) return absl::nullopt;
  const absl::Duration delay =
      absl::Seconds(info.retry_delay().seconds()) + absl::Nanoseconds(info.retry_delay().nanos());
  return std::max(delay, absl::ZeroDuration());
}

}  // namespace

absl::optional<absl::Duration> DelayBeforeRetry(const RetryOptions& options, int made, const absl::Status& status,
                                                absl::string_view pushback, double random) {
  if (made >= options.attempts) return absl::nullopt;
  absl::optional<absl::Duration> asked = RetryInfoDelay(status);
  if (int64_t milliseconds = 0; absl::SimpleAtoi(pushback, &milliseconds)) {
    if (milliseconds < 0) return absl::nullopt;
    asked = std::max(asked.value_or(absl::ZeroDuration()), absl::Milliseconds(milliseconds));
  }
  if (!absl::IsUnavailable(status) && !(absl::IsResourceExhausted(status) && asked.has_value())) return absl::nullopt;
  // 2^30 initial backoffs pass any maximum that makes sense.
  const int64_t doubled = int64_t{1} << std::min(made - 1, 30);
  const absl::Duration backoff = std::min(options.initial_backoff * doubled, options.max_backoff);
  return std::max(backoff * random, asked.value_or(absl::ZeroDuration()));
}

}  // namespace engram::client
