#include "client/refusal.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "client/error_details.h"
#include "google/rpc/error_details.pb.h"

namespace engram::client {
namespace {

// The last index in a path: "17" of "sequences[3].token_ids[17]"; empty where there is none.
absl::string_view LastIndex(absl::string_view field) {
  const size_t open = field.rfind('[');
  const size_t close = field.rfind(']');
  if (open == absl::string_view::npos || close == absl::string_view::npos || close < open) return "";
  return field.substr(open + 1, close - open - 1);
}

}  // namespace

absl::string_view ReasonName(Reason reason) {
  switch (reason) {
    case Reason::kTokenOutOfRange:
      return "TOKEN_OUT_OF_RANGE";
    case Reason::kTokenMaskLength:
      return "TOKEN_MASK_LENGTH";
    case Reason::kHighwaySize:
      return "HIGHWAY_SIZE";
    case Reason::kLayerUnknown:
      return "LAYER_UNKNOWN";
    case Reason::kLookbackLength:
      return "LOOKBACK_LENGTH";
    case Reason::kRowOutOfRange:
      return "ROW_OUT_OF_RANGE";
    case Reason::kSlice:
      return "SLICE";
    case Reason::kDuplicateSession:
      return "DUPLICATE_SESSION";
    case Reason::kSessionLength:
      return "SESSION_LENGTH";
    case Reason::kForm:
      return "FORM";
    case Reason::kEmptyCall:
      return "EMPTY_CALL";
    case Reason::kPositionGap:
      return "POSITION_GAP";
    case Reason::kDigestMismatch:
      return "DIGEST_MISMATCH";
    case Reason::kPositionLimit:
      return "POSITION_LIMIT";
    case Reason::kTooManyTokens:
      return "TOO_MANY_TOKENS";
    case Reason::kMessageBytes:
      return "MESSAGE_BYTES";
  }
  return "";
}

absl::StatusCode ReasonCode(Reason reason) {
  switch (reason) {
    case Reason::kPositionGap:
    case Reason::kDigestMismatch:
      return absl::StatusCode::kFailedPrecondition;
    case Reason::kPositionLimit:
      return absl::StatusCode::kOutOfRange;
    case Reason::kTooManyTokens:
    case Reason::kMessageBytes:
      return absl::StatusCode::kResourceExhausted;
    default:
      return absl::StatusCode::kInvalidArgument;
  }
}

absl::Status Refuse(Reason reason, absl::string_view field, absl::string_view value, absl::string_view bound,
                    absl::string_view text) {
  absl::Status status(ReasonCode(reason), absl::StrCat(ReasonName(reason), ": ", field, ": ", text));
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(ReasonName(reason)));
  info.set_domain("engram");
  auto& metadata = *info.mutable_metadata();
  metadata["field"] = std::string(field);
  metadata["index"] = std::string(LastIndex(field));
  metadata["value"] = std::string(value);
  metadata["bound"] = std::string(bound);
  metadata["offenders"] = absl::StrCat(1);
  status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  google::rpc::BadRequest bad;
  auto& violation = *bad.add_field_violations();
  violation.set_field(std::string(field));
  violation.set_description(absl::StrCat("got ", value, ", expected ", bound));
  status.SetPayload(kBadRequestUrl, absl::Cord(bad.SerializeAsString()));
  return status;
}

}  // namespace engram::client
