#include "server/refusal/refusal.h"

#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace engram {
namespace {

constexpr absl::string_view kPayload = "engram/refusal";

struct ReasonRow {
  Reason reason;
  absl::string_view name;
  absl::StatusCode code;
};

constexpr std::array kReasons = {
    ReasonRow{Reason::kTokenOutOfRange, "TOKEN_OUT_OF_RANGE", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kTokenMaskLength, "TOKEN_MASK_LENGTH", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kHighwaySize, "HIGHWAY_SIZE", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kHighwayNotFinite, "HIGHWAY_NOT_FINITE", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kLayerUnknown, "LAYER_UNKNOWN", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kLookbackLength, "LOOKBACK_LENGTH", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kRowOutOfRange, "ROW_OUT_OF_RANGE", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kSlice, "SLICE", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kDuplicateSession, "DUPLICATE_SESSION", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kSessionLength, "SESSION_LENGTH", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kEmptyCall, "EMPTY_CALL", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kDtype, "DTYPE", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kForm, "FORM", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kMalformed, "MALFORMED", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kRegionSpan, "REGION_SPAN", absl::StatusCode::kInvalidArgument},
    ReasonRow{Reason::kPositionGap, "POSITION_GAP", absl::StatusCode::kFailedPrecondition},
    ReasonRow{Reason::kStaleStep, "STALE_STEP", absl::StatusCode::kFailedPrecondition},
    ReasonRow{Reason::kDigestMismatch, "DIGEST_MISMATCH", absl::StatusCode::kFailedPrecondition},
    ReasonRow{Reason::kSessionLost, "SESSION_LOST", absl::StatusCode::kNotFound},
    ReasonRow{Reason::kTicketExpired, "TICKET_EXPIRED", absl::StatusCode::kNotFound},
    ReasonRow{Reason::kRegion, "REGION", absl::StatusCode::kNotFound},
    ReasonRow{Reason::kPositionLimit, "POSITION_LIMIT", absl::StatusCode::kOutOfRange},
    ReasonRow{Reason::kQueueFull, "QUEUE_FULL", absl::StatusCode::kResourceExhausted},
    ReasonRow{Reason::kPrepareFull, "PREPARE_FULL", absl::StatusCode::kResourceExhausted},
    ReasonRow{Reason::kTooManySessions, "TOO_MANY_SESSIONS", absl::StatusCode::kResourceExhausted},
    ReasonRow{Reason::kRateLimit, "RATE_LIMIT", absl::StatusCode::kResourceExhausted},
    ReasonRow{Reason::kRegionFull, "REGION_FULL", absl::StatusCode::kResourceExhausted},
    ReasonRow{Reason::kTooManyTokens, "TOO_MANY_TOKENS", absl::StatusCode::kResourceExhausted},
    ReasonRow{Reason::kMessageBytes, "MESSAGE_BYTES", absl::StatusCode::kResourceExhausted},
    ReasonRow{Reason::kRegionsOff, "REGIONS_OFF", absl::StatusCode::kUnimplemented},
    ReasonRow{Reason::kDraining, "DRAINING", absl::StatusCode::kUnavailable},
    ReasonRow{Reason::kLoading, "LOADING", absl::StatusCode::kUnavailable},
};

const ReasonRow& Row(Reason reason) {
  for (const ReasonRow& row : kReasons) {
    if (row.reason == reason) return row;
  }
  return kReasons.front();  // unreachable while the table is whole: ReasonsTest.EveryReasonHasARow
}

// The payload is private to this file: numbers as 8 bytes, strings as a length and their bytes.
void PutNumber(std::string& out, uint64_t n) { out.append(reinterpret_cast<const char*>(&n), sizeof n); }

void PutString(std::string& out, absl::string_view s) {
  PutNumber(out, s.size());
  out.append(s.data(), s.size());
}

uint64_t TakeNumber(absl::string_view& in) {
  uint64_t n = 0;
  if (in.size() < sizeof n) return 0;
  std::memcpy(&n, in.data(), sizeof n);
  in.remove_prefix(sizeof n);
  return n;
}

std::string TakeString(absl::string_view& in) {
  const uint64_t size = TakeNumber(in);
  std::string s(in.substr(0, size));
  in.remove_prefix(s.size());
  return s;
}

}  // namespace

absl::string_view ReasonName(Reason reason) { return Row(reason).name; }
absl::StatusCode ReasonCode(Reason reason) { return Row(reason).code; }

bool NeverRetry(Reason reason) { return reason == Reason::kTooManyTokens || reason == Reason::kMessageBytes; }

bool WorthRetry(Reason reason) {
  const absl::StatusCode code = ReasonCode(reason);
  return code == absl::StatusCode::kUnavailable ||
         (code == absl::StatusCode::kResourceExhausted && !NeverRetry(reason));
}

void Refusals::Add(Offender offender) {
  ++total_;
  if (offenders_.size() < static_cast<size_t>(kMaxOffenders)) offenders_.push_back(std::move(offender));
}

absl::Status Refusals::ToStatus() const {
  if (empty()) return absl::OkStatus();
  const Offender& first = offenders_.front();
  std::string message = absl::StrCat(ReasonName(first.reason), ": ", first.field, ": ", first.text);
  if (total_ > 1) absl::StrAppend(&message, " (and ", total_ - 1, " more)");
  absl::Status status(ReasonCode(first.reason), message);
  std::string payload;
  PutNumber(payload, static_cast<uint64_t>(total_));
  PutNumber(payload, offenders_.size());
  for (const Offender& offender : offenders_) {
    PutNumber(payload, static_cast<uint64_t>(offender.reason));
    for (const std::string* s : {&offender.field, &offender.value, &offender.bound, &offender.text}) {
      PutString(payload, *s);
    }
  }
  status.SetPayload(kPayload, absl::Cord(payload));
  return status;
}

absl::Status Refuse(Offender offender) {
  Refusals refusals;
  refusals.Add(std::move(offender));
  return refusals.ToStatus();
}

absl::Status RefuseDraining() {
  return Refuse({Reason::kDraining, "server", "", "", "the server is shutting down: use another replica"});
}

RefusalDetail DetailOf(const absl::Status& status) {
  RefusalDetail detail;
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return detail;
  const std::string flat(*payload);
  absl::string_view in = flat;
  detail.total = static_cast<int64_t>(TakeNumber(in));
  const uint64_t count = TakeNumber(in);
  for (uint64_t i = 0; i < count; ++i) {
    Offender offender{static_cast<Reason>(TakeNumber(in)), "", "", "", ""};
    for (std::string* s : {&offender.field, &offender.value, &offender.bound, &offender.text}) *s = TakeString(in);
    detail.offenders.push_back(std::move(offender));
  }
  return detail;
}

}  // namespace engram
