#include "server/engine/pinned_source.h"

#include <iterator>
#include <mutex>

namespace engram {

StagingSource PinnedSource::source() {
  return {[self = shared_from_this()](int64_t bytes) { return self->Allocate(bytes); },
          [self = shared_from_this()](uint8_t* block, int64_t) { self->Free(block); }};
}

bool PinnedSource::Holds(const void* memory, int64_t bytes) const {
  const auto* begin = static_cast<const uint8_t*>(memory);
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto after = blocks_.upper_bound(begin);
  if (after == blocks_.begin()) return false;
  const auto& [block, length] = *std::prev(after);
  return begin + bytes <= block + length;
}

// Pinning costs the driver a lock and the system its pages, so a pool stands before this.
uint8_t* PinnedSource::Allocate(int64_t bytes) {
  void* memory = nullptr;
  if (!device_->Use().ok() || device_->module().allocate_pinned(bytes, &memory) != 0) return nullptr;
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  blocks_.emplace(static_cast<uint8_t*>(memory), bytes);
  return static_cast<uint8_t*>(memory);
}

void PinnedSource::Free(uint8_t* block) {
  {
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    blocks_.erase(block);
  }
  if (device_->Use().ok()) static_cast<void>(device_->module().free_pinned(block));
}

}  // namespace engram
