// The client's memory of one sequence: enough to send look-back with every call, so that any replica gives the same
// answer at any time and no server needs to remember anything.
//
// Knows the ids of the positions [base, length); a masked position is remembered as dead (-1), whatever its id was.
// Where base is 0, the positions before it are dead too: the sequence starts there. Anything else unknown is an error,
// never a silent pad. About 4 bytes per position. Copying forks the sequence. Not thread-safe. Errors are refusals with
// the server's reasons (refusal.h).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace engram::client {

// A look-back entry without an id: masked, or before the sequence's start.
inline constexpr int32_t kDeadToken = -1;

class SequenceHistory {
 public:
  // A sequence that starts at position 0 and has no tokens yet. `max_ngram` is ModelInfo::max_ngram, 2..8.
  explicit SequenceHistory(int max_ngram);

  // A sequence of which only the N-1 ids before `start_pos` are known, newest first, kDeadToken = masked or before the
  // start: the hand-off from prefill to decode. What lies before position 0 must be dead.
  static absl::StatusOr<SequenceHistory> Seeded(int max_ngram, int64_t start_pos, absl::Span<const int32_t> lookback);

  // The N-1 ids before `start_pos`, newest first: what goes into Sequence.lookback_token_ids.
  // POSITION_GAP when one of them is unknown.
  absl::StatusOr<std::vector<int32_t>> Lookback(int64_t start_pos) const;

  // Whether Write() would take this. `token_mask` is empty (all live) or one byte per token, 0 = masked. `path` stands
  // before the fields an error names: "sequences[3]." where this is part of a call.
  absl::Status CheckWrite(int64_t start_pos, absl::Span<const int32_t> token_ids, absl::Span<const uint8_t> token_mask,
                          absl::string_view path = "") const;

  // Puts these tokens at start_pos and forgets whatever stood there and behind (rollback, prefix hit, retry).
  // Changes nothing unless it returns OK.
  absl::Status Write(int64_t start_pos, absl::Span<const int32_t> token_ids, absl::Span<const uint8_t> token_mask);

  int max_ngram() const { return max_ngram_; }
  int64_t base() const { return base_; }
  int64_t length() const { return base_ + static_cast<int64_t>(ids_.size()); }

 private:
  // OK when the N-1 positions before start_pos are all known or before the sequence's start.
  absl::Status CheckStart(int64_t start_pos, absl::string_view path) const;

  int max_ngram_;
  int64_t base_ = 0;
  std::vector<int32_t> ids_;  // of positions base_, base_ + 1, ...
};

}  // namespace engram::client
