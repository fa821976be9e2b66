#include "server/engine/staging.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"

namespace engram {
namespace {

constexpr int64_t kAlignment = 64;  // a cache line, and any vector register
constexpr int64_t kLeastBytes = 4096;

// Sizes of one class are rounded up to the same: four classes to each doubling, so at most a quarter is wasted.
int64_t ClassBytes(int64_t bytes) {
  if (bytes <= kLeastBytes) return kLeastBytes;
  const int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes - 1))) / 4;
  return (bytes + step - 1) / step * step;
}

}  // namespace

class StagingPool::Blocks : public std::enable_shared_from_this<StagingPool::Blocks> {
 public:
  Blocks(int64_t keep_bytes, StagingSource source) : keep_bytes_(keep_bytes), source_(std::move(source)) {}
  ~Blocks() {
    for (auto& [bytes, blocks] : idle_) {
      for (uint8_t* block : blocks) source_.free(block, bytes);
    }
  }

  StagingMemory Take(int64_t wanted) {
    const int64_t bytes = ClassBytes(wanted);
    uint8_t* block = TakeIdle(bytes);
    if (block == nullptr) {
      block = source_.allocate(bytes);
      if (block == nullptr) {
        const std::lock_guard<std::mutex> lock(mutex_);
        stats_.in_use_bytes -= bytes;
        return nullptr;
      }
    }
    return {block, [self = shared_from_this(), bytes](uint8_t* done) { self->GiveBack(done, bytes); }};
  }

  StagingStats stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

 private:
  // Null: none of that class. The block counts as in use either way.
  uint8_t* TakeIdle(int64_t bytes) {
    std::vector<std::pair<uint8_t*, int64_t>> unneeded;
    uint8_t* block = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stats_.in_use_bytes += bytes;
      const auto found = idle_.find(bytes);
      if (found != idle_.end()) {
        block = found->second.back();
        found->second.pop_back();
        if (found->second.empty()) idle_.erase(found);
        stats_.idle_bytes -= bytes;
      }
      // A load of other sizes makes room for itself.
      while (stats_.in_use_bytes + stats_.idle_bytes > keep_bytes_ && !idle_.empty()) {
        const auto largest = std::prev(idle_.end());
        unneeded.emplace_back(largest->second.back(), largest->first);
        stats_.idle_bytes -= largest->first;
        largest->second.pop_back();
        if (largest->second.empty()) idle_.erase(largest);
      }
    }
    for (const auto& [one, its_bytes] : unneeded) source_.free(one, its_bytes);
    return block;
  }

  void GiveBack(uint8_t* block, int64_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stats_.in_use_bytes -= bytes;
      if (stats_.in_use_bytes + stats_.idle_bytes + bytes <= keep_bytes_) {
        idle_[bytes].push_back(block);
        stats_.idle_bytes += bytes;
        return;
      }
    }
    source_.free(block, bytes);
  }

  const int64_t keep_bytes_;
  const StagingSource source_;
  mutable std::mutex mutex_;  // as in SessionTable
  // By class; the last one given back is the first one taken, while it is still in the caches. No entry is empty.
  std::map<int64_t, std::vector<uint8_t*>> idle_ ABSL_GUARDED_BY(mutex_);
  StagingStats stats_ ABSL_GUARDED_BY(mutex_);
};

StagingSource StagingSource::Ordinary() {
  // Sizes of all classes are multiples of the alignment, as aligned_alloc wants them.
  return {.allocate =
              [](int64_t bytes) {
                return static_cast<uint8_t*>(std::aligned_alloc(kAlignment, static_cast<size_t>(bytes)));
              },
          .free = [](uint8_t* block, int64_t) { std::free(block); }};
}

StagingPool::StagingPool(int64_t keep_bytes, StagingSource source)
    : blocks_(std::make_shared<Blocks>(keep_bytes, std::move(source))) {}

StagingMemory StagingPool::Take(int64_t bytes) { return blocks_->Take(bytes); }

StagingStats StagingPool::stats() const { return blocks_->stats(); }

}  // namespace engram
