#include "server/transport/wire_status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

// The last index in a path: "17" of "sequences[3].token_ids[17]"; empty where there is none.
std::string LastIndex(const std::string& field) {
  const size_t open = field.rfind('[');
  const size_t close = field.rfind(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return "";
  return field.substr(open + 1, close - open - 1);
}

google::rpc::ErrorInfo ErrorInfoOf(const RefusalDetail& detail) {
  const Offender& first = detail.offenders.front();
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(ReasonName(first.reason)));
  info.set_domain("engram");
  auto& metadata = *info.mutable_metadata();
  metadata["field"] = first.field;
  metadata["index"] = LastIndex(first.field);
  metadata["value"] = first.value;
  metadata["bound"] = first.bound;
  metadata["offenders"] = absl::StrCat(detail.total);
  return info;
}

google::rpc::BadRequest BadRequestOf(const RefusalDetail& detail) {
  google::rpc::BadRequest bad;
  for (const Offender& offender : detail.offenders) {
    google::rpc::BadRequest::FieldViolation violation;
    violation.set_field(offender.field);
    // Short: 64 of these travel in a trailer. A reason other than the first one's is named.
    std::string& text = *violation.mutable_description();
    if (offender.reason != detail.offenders.front().reason) absl::StrAppend(&text, ReasonName(offender.reason), " ");
    absl::StrAppend(&text, "got ", offender.value, ", expected ", offender.bound);
    if (bad.ByteSizeLong() + violation.ByteSizeLong() > kMaxDetailBytes) break;
    *bad.add_field_violations() = std::move(violation);
  }
  return bad;
}

}  // namespace

google::rpc::Status ToStatusMessage(const absl::Status& status) {
  google::rpc::Status wire;
  wire.set_code(static_cast<int>(status.code()));  // the same numbers by definition
  wire.set_message(std::string(status.message()));
  const RefusalDetail detail = DetailOf(status);
  if (detail.offenders.empty()) return wire;
  wire.add_details()->PackFrom(ErrorInfoOf(detail));
  wire.add_details()->PackFrom(BadRequestOf(detail));
  if (WorthRetry(detail.offenders.front().reason)) {
    google::rpc::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(kRetryDelay)));
    wire.add_details()->PackFrom(retry);
  }
  return wire;
}

grpc::Status ToWireStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status wire = ToStatusMessage(status);
  const auto code = static_cast<grpc::StatusCode>(wire.code());
  if (wire.details().empty()) return {code, wire.message()};
  return {code, wire.message(), wire.SerializeAsString()};
}

void AddPushback(const absl::Status& status, grpc::ServerContextBase& context) {
  const RefusalDetail detail = DetailOf(status);
  if (detail.offenders.empty()) return;
  const Reason reason = detail.offenders.front().reason;
  if (NeverRetry(reason)) context.AddTrailingMetadata("grpc-retry-pushback-ms", "-1");
  if (WorthRetry(reason)) {
    context.AddTrailingMetadata("grpc-retry-pushback-ms", absl::StrCat(absl::ToInt64Milliseconds(kRetryDelay)));
  }
}

}  // namespace engram
