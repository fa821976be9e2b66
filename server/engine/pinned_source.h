// Host memory that a device copies to and from by itself, for highways and results.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>

#include "absl/base/thread_annotations.h"
#include "server/engine/cuda_module.h"
#include "server/engine/staging.h"

namespace engram {

// Thread-safe.
class PinnedSource : public std::enable_shared_from_this<PinnedSource> {
 public:
  explicit PinnedSource(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {}

  // Of pinned memory; what it makes is known here until it is freed. Keeps this.
  StagingSource source();

  // Is all of it in one block that was made here?
  bool Holds(const void* memory, int64_t bytes) const;

 private:
  uint8_t* Allocate(int64_t bytes);
  void Free(uint8_t* block);

  const std::shared_ptr<const CudaDevice> device_;
  mutable std::shared_mutex mutex_;
  std::map<const uint8_t*, int64_t> blocks_ ABSL_GUARDED_BY(mutex_);  // bytes by begin
};

}  // namespace engram
