// Server errors as absl::Status: the code and message as sent, and google.rpc.ErrorInfo, BadRequest and RetryInfo from
// the `grpc-status-details-bin` trailer as payloads under their usual type URLs. The refusals of refusal.h look the
// same.
//
// Details come from outside: what does not parse is dropped, and the code and message still stand.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/status.h"

namespace engram::client {

inline constexpr absl::string_view kErrorInfoUrl = "type.googleapis.com/google.rpc.ErrorInfo";
inline constexpr absl::string_view kBadRequestUrl = "type.googleapis.com/google.rpc.BadRequest";
inline constexpr absl::string_view kRetryInfoUrl = "type.googleapis.com/google.rpc.RetryInfo";

absl::Status StatusFromGrpc(const grpc::Status& status);

// "POSITION_GAP": the reason of domain "engram"; empty where the status carries none.
std::string ErrorReason(const absl::Status& status);

// `field`, `index`, `value`, `bound` of the first offender, `offenders`; empty where the status carries none.
std::map<std::string, std::string> ErrorMetadata(const absl::Status& status);

struct ErrorOffender {
  std::string field;  // "sequences[3].token_ids[17]"
  std::string description;
};

// Every offender the server listed, in its order.
std::vector<ErrorOffender> ErrorOffenders(const absl::Status& status);

}  // namespace engram::client
