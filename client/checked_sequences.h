// The sequences of a call, checked (checked_call.h). With partial_ok a refusal stays with its sequence.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/checked_call.h"

namespace engram::client {

// Fills call.sequences and call.tokens; call.partial_ok is set.
absl::Status CheckSequences(const ModelInfo& model, absl::Span<const SequenceRun> runs, CheckedCall* call);

// The same from what was prepared: of its tokens `slice`, or all. EMPTY_CALL where nothing is prepared, SLICE.
absl::Status TakePrepared(const Prepared& prepared, const std::optional<Range>& slice, CheckedCall* call);

}  // namespace engram::client
