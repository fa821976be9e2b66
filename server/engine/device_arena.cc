#include "server/engine/device_arena.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/engine/cuda_memory_plan.h"

namespace engram {

DeviceArena::DeviceArena(CudaMemory memory) : memory_(std::move(memory)) {
  if (memory_.bytes() > 0) free_.emplace(0, memory_.bytes());
}

StagingMemory DeviceArena::Take(int64_t wanted) {
  if (wanted > memory_.bytes()) return nullptr;  // before it is rounded up
  const int64_t bytes = CudaAligned(std::max<int64_t>(wanted, 1));
  int64_t begin = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(free_.begin(), free_.end(), [bytes](const auto& f) { return f.second >= bytes; });
    if (found == free_.end()) return nullptr;
    begin = found->first;
    const int64_t left = found->second - bytes;
    free_.erase(found);
    if (left > 0) free_.emplace(begin + bytes, left);
    in_use_bytes_ += bytes;
  }
  return {memory_.data() + begin,
          [self = shared_from_this(), begin, bytes](uint8_t*) { self->GiveBack(begin, bytes); }};
}

int64_t DeviceArena::in_use_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return in_use_bytes_;
}

void DeviceArena::GiveBack(int64_t begin, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  in_use_bytes_ -= bytes;
  const auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + bytes) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.lower_bound(begin);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(begin, bytes);
}

}  // namespace engram
