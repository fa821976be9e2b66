// A call refused before it was sent, in the shape in which the server refuses it (docs/api.md): the same code, reason,
// field, value and bound, read with error_details.h. So a caller need not know on which side the check stood.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace engram::client {

// Those of the server's reasons that can be seen from here.
enum class Reason {
  // INVALID_ARGUMENT
  kTokenOutOfRange,
  kTokenMaskLength,
  kHighwaySize,
  kLayerUnknown,
  kLookbackLength,
  kRowOutOfRange,
  kSlice,
  kDuplicateSession,
  kSessionLength,
  kEmptyCall,
  kForm,
  // FAILED_PRECONDITION
  kPositionGap,
  kDigestMismatch,
  // OUT_OF_RANGE
  kPositionLimit,
  // RESOURCE_EXHAUSTED
  kTooManyTokens,
  kMessageBytes,
};

inline constexpr Reason kReasons[] = {
    Reason::kTokenOutOfRange, Reason::kTokenMaskLength, Reason::kHighwaySize,   Reason::kLayerUnknown,
    Reason::kLookbackLength,  Reason::kRowOutOfRange,   Reason::kSlice,         Reason::kDuplicateSession,
    Reason::kSessionLength,   Reason::kEmptyCall,       Reason::kForm,          Reason::kPositionGap,
    Reason::kDigestMismatch,  Reason::kPositionLimit,   Reason::kTooManyTokens, Reason::kMessageBytes};

absl::string_view ReasonName(Reason reason);  // "POSITION_GAP"
absl::StatusCode ReasonCode(Reason reason);

// "POSITION_GAP: sequences[3].start_pos: <text>", with ErrorInfo and BadRequest of this one offender.
absl::Status Refuse(Reason reason, absl::string_view field, absl::string_view value, absl::string_view bound,
                    absl::string_view text);

}  // namespace engram::client
