// Why a call is refused: one reason from a closed list, and every place in the call that gave it.
//
// A refusal travels as an absl::Status whose code follows from its first reason and whose offenders ride along as a
// payload; server/transport turns that into google.rpc.ErrorInfo and BadRequest. A leaf: every layer may refuse.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace engram {

enum class Reason {
  // INVALID_ARGUMENT
  kTokenOutOfRange,
  kTokenMaskLength,
  kHighwaySize,
  kHighwayNotFinite,
  kLayerUnknown,
  kLookbackLength,
  kRowOutOfRange,
  kSlice,
  kDuplicateSession,
  kSessionLength,
  kEmptyCall,
  kDtype,
  kForm,
  kMalformed,
  kRegionSpan,
  // FAILED_PRECONDITION
  kPositionGap,
  kStaleStep,
  kDigestMismatch,
  // NOT_FOUND
  kSessionLost,
  kTicketExpired,
  kRegion,
  // OUT_OF_RANGE
  kPositionLimit,
  // RESOURCE_EXHAUSTED, worth a retry
  kQueueFull,
  kPrepareFull,
  kTooManySessions,
  kRateLimit,
  kRegionFull,
  // RESOURCE_EXHAUSTED, permanent: the same call will never pass
  kTooManyTokens,
  kMessageBytes,
  // UNIMPLEMENTED
  kRegionsOff,
  // UNAVAILABLE
  kDraining,
  kLoading,
};

// "TOKEN_OUT_OF_RANGE": the `reason` of ErrorInfo.
absl::string_view ReasonName(Reason reason);
absl::StatusCode ReasonCode(Reason reason);

// True where the same call may pass a little later: RetryInfo goes with it.
bool WorthRetry(Reason reason);
// True where the same call will never pass though its status code suggests a retry: pushback -1 goes with it.
bool NeverRetry(Reason reason);

// Offenders a refusal lists at the most.
inline constexpr int kMaxOffenders = 64;

// One place in a call that gave the reason.
struct Offender {
  Reason reason;
  std::string field;  // the whole path: "sequences[3].token_ids[17]"
  std::string value;  // what stands there
  std::string bound;  // what would be right: "[0, 512)"
  std::string text;   // one sentence that names the value and the bound
};

// Collects offenders; the first decides the status code. Not thread-safe.
class Refusals {
 public:
  void Add(Offender offender);
  bool empty() const { return total_ == 0; }

  // OK when empty. Lists the first kMaxOffenders and says how many there were.
  absl::Status ToStatus() const;

 private:
  std::vector<Offender> offenders_;
  int64_t total_ = 0;
};

// A refusal for one offender.
absl::Status Refuse(Offender offender);
// DRAINING: the one refusal that says nothing of the call.
absl::Status RefuseDraining();

// What ToStatus() put there; empty for any other status.
struct RefusalDetail {
  std::vector<Offender> offenders;
  int64_t total = 0;
};
RefusalDetail DetailOf(const absl::Status& status);

}  // namespace engram
