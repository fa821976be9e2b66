#include "server/session/history.h"

#include <algorithm>

namespace engram {
namespace {

// Room for `size` ids and a few more: an eighth, so that appending one at a time moves each id about eight times in
// all, and at least 8 (32 bytes).
int64_t RoomFor(int64_t size, int64_t window) { return std::min(window, size + std::max<int64_t>(8, size / 8)); }

}  // namespace

History History::Prefix(int64_t length) const {
  History copy(base_);
  copy.ring_.reserve(static_cast<size_t>(length - base_));
  for (int64_t pos = base_; pos < length; ++pos) copy.ring_.push_back(at(pos));
  copy.size_ = length - base_;
  return copy;
}

void History::Truncate(int64_t length) { size_ = length - base_; }

void History::Append(absl::Span<const int32_t> ids, int64_t window) {
  const auto count = static_cast<int64_t>(ids.size());
  const int64_t kept = std::min(count, window);                           // of ids, the last ones
  const int64_t dropped = std::max<int64_t>(0, size_ - (window - kept));  // of what was known, the oldest
  const int64_t remaining = size_ - std::min(size_, dropped);
  base_ += (size_ - remaining) + (count - kept);
  head_ = capacity() == 0 ? 0 : (head_ + (size_ - remaining)) % capacity();
  size_ = remaining;

  const int64_t need = remaining + kept;
  if (need > capacity() || 2 * need + 8 < capacity()) Resize(RoomFor(need, window));
  for (const int32_t id : ids.last(static_cast<size_t>(kept))) {
    const int64_t slot = head_ + size_;
    ring_[static_cast<size_t>(slot < capacity() ? slot : slot - capacity())] = id;
    ++size_;
  }
}

void History::Resize(int64_t capacity) {
  std::vector<int32_t> ring(static_cast<size_t>(capacity));
  for (int64_t i = 0; i < size_; ++i) ring[static_cast<size_t>(i)] = at(base_ + i);
  ring_ = std::move(ring);
  head_ = 0;
}

std::optional<int64_t> History::FirstChange(int64_t start, absl::Span<const int32_t> ids) const {
  int64_t pos = start;
  for (const int32_t id : ids) {
    if (pos >= length()) return std::nullopt;
    if (at(pos) != id) return pos;
    ++pos;
  }
  if (pos < length()) return pos;
  return std::nullopt;
}

std::optional<int64_t> History::FirstChange(const History& past, absl::Span<const int32_t> ids) const {
  if (past.base() != base()) return std::min(past.base(), base());
  const int64_t both = std::min(past.length(), length());
  for (int64_t pos = base(); pos < both; ++pos) {
    if (past.at(pos) != at(pos)) return pos;
  }
  return FirstChange(past.length(), ids);
}

}  // namespace engram
