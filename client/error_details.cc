#include "client/error_details.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/types/optional.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace engram::client {
namespace {

// The payload under `url` as a Message; its default where there is none or it does not parse.
template <typename Message>
Message PayloadOf(const absl::Status& status, absl::string_view url) {
  Message message;
  const absl::optional<absl::Cord> payload = status.GetPayload(url);
  if (!payload.has_value() || !message.ParseFromString(std::string(*payload))) return Message();
  return message;
}

google::rpc::ErrorInfo EngramErrorInfo(const absl::Status& status) {
  auto info = PayloadOf<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
  return info.domain() == "engram" ? info : google::rpc::ErrorInfo();
}

}  // namespace

absl::Status StatusFromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = static_cast<int>(status.error_code());
  const bool known = code > 0 && code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  absl::Status result(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown, status.error_message());
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return result;
  for (const auto& any : details.details()) {
    // Only what is understood: a foreign server must not be able to plant payloads under other names.
    if (any.type_url() == kErrorInfoUrl || any.type_url() == kBadRequestUrl || any.type_url() == kRetryInfoUrl) {
      result.SetPayload(any.type_url(), absl::Cord(any.value()));
    }
  }
  return result;
}

std::string ErrorReason(const absl::Status& status) { return EngramErrorInfo(status).reason(); }

std::map<std::string, std::string> ErrorMetadata(const absl::Status& status) {
  const google::rpc::ErrorInfo info = EngramErrorInfo(status);
  return {info.metadata().begin(), info.metadata().end()};
}

std::vector<ErrorOffender> ErrorOffenders(const absl::Status& status) {
  std::vector<ErrorOffender> offenders;
  const auto bad_request = PayloadOf<google::rpc::BadRequest>(status, kBadRequestUrl);
  for (const auto& violation : bad_request.field_violations()) {
    offenders.push_back({violation.field(), violation.description()});
  }
  return offenders;
}

}  // namespace engram::client
