// The memory of prepared results on a device: one block, taken at start, cut first-fit.
//
// A ticket's life is milliseconds and there are few of them, so a list of what is free, in the order of addresses, is
// short; freed neighbours join, so nothing is lost for good.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/staging.h"

namespace engram {

// Thread-safe.
class DeviceArena : public std::enable_shared_from_this<DeviceArena> {
 public:
  explicit DeviceArena(CudaMemory memory);

  // Aligned to 256. Null where no free piece is that long. Blocks keep the arena.
  StagingMemory Take(int64_t bytes);

  int64_t in_use_bytes() const;

 private:
  void GiveBack(int64_t begin, int64_t bytes);

  const CudaMemory memory_;
  mutable std::mutex mutex_;                                 // as in SessionTable
  std::map<int64_t, int64_t> free_ ABSL_GUARDED_BY(mutex_);  // bytes by begin; no two are neighbours
  int64_t in_use_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace engram
