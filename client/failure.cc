#include "client/failure.h"

#include <algorithm>
#include <string>

#include "absl/strings/cord.h"
#include "client/error_details.h"
#include "google/rpc/error_details.pb.h"

namespace engram::client {

bool IsPassing(const absl::Status& status) {
  if (absl::IsUnavailable(status)) return true;
  return absl::IsResourceExhausted(status) && status.GetPayload(kRetryInfoUrl).has_value();
}

bool IsRefusal(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kDataLoss:
      return true;
    case absl::StatusCode::kResourceExhausted:
      return !IsPassing(status);
    default:
      return false;
  }
}

absl::Duration RetryDelay(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryInfoUrl);
  google::rpc::RetryInfo info;
  if (!payload.has_value() || !info.ParseFromString(std::string(*payload))) return absl::ZeroDuration();
  const absl::Duration delay =
      absl::Seconds(info.retry_delay().seconds()) + absl::Nanoseconds(info.retry_delay().nanos());
  return std::clamp(delay, absl::ZeroDuration(), absl::Minutes(1));
}

}  // namespace engram::client
