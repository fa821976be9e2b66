// The compressed ids of the last positions of one sequence.
//
// Positions [base, length) are known, at most `window` of them. Storage is one ring that grows by an eighth, never past
// the window, and shrinks when less than half of it is in use: about 4 bytes a position, whatever came before.
// Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"

namespace engram {

class History {
 public:
  // Knows nothing; the first id appended is that of position `base`.
  explicit History(int64_t base = 0) : base_(base) {}

  int64_t base() const { return base_; }
  int64_t length() const { return base_ + size_; }
  int64_t size() const { return size_; }
  // Heap bytes held.
  int64_t bytes() const { return capacity() * static_cast<int64_t>(sizeof(int32_t)); }

  // The id of `pos`, which is known.
  int32_t at(int64_t pos) const {
    const int64_t slot = head_ + (pos - base_);
    return ring_[static_cast<size_t>(slot < capacity() ? slot : slot - capacity())];
  }

  // A copy that ends at `length`, base <= length <= length().
  History Prefix(int64_t length) const;

  // Forgets the positions from `length` on, base <= length <= length().
  void Truncate(int64_t length);

  // Appends at length(); the oldest positions beyond `window` (>= 1) are dropped, and base moves up.
  void Append(absl::Span<const int32_t> ids, int64_t window);

  // The first known position whose id changes or which is lost when this history is truncated at `start` and `ids` are
  // appended there; none when all that is known stays. What the window drops is not lost in this sense.
  std::optional<int64_t> FirstChange(int64_t start, absl::Span<const int32_t> ids) const;

  // The same where `past` takes the place of all that is known and `ids` follow it. Positions that `past` or `ids` tell
  // of below base() count as changed: there is nothing left to compare them with.
  std::optional<int64_t> FirstChange(const History& past, absl::Span<const int32_t> ids) const;

 private:
  int64_t capacity() const { return static_cast<int64_t>(ring_.size()); }
  // Moves what is known into a ring of its own size plus slack.
  void Resize(int64_t capacity);

  int64_t base_;
  int64_t head_ = 0;  // slot of base_
  int64_t size_ = 0;
  std::vector<int32_t> ring_;  // [capacity]
};

}  // namespace engram
