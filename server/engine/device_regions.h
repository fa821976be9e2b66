// Memory of a device that its workers share: steps read highways there and write them in place.
//
// A handle opens the whole allocation that memory is of, and the driver may put allocations of less than 2 MiB side by
// side into one. So each region is an allocation of its own, in whole blocks of that, and all zeros when it is given:
// nothing of the model's, of another worker's or of a step's can be seen by it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "server/engine/backend.h"
#include "server/engine/cuda_module.h"

namespace engram {

// Thread-safe.
class DeviceRegions : public std::enable_shared_from_this<DeviceRegions> {
 public:
  explicit DeviceRegions(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {}

  // What it makes is known here until it is freed. Keeps this.
  DeviceRegionSource source();

  // Is all of it in one region that was made here? A call that names it keeps it, so it stays one until its step ends.
  bool Holds(const void* memory, int64_t bytes) const;

 private:
  absl::StatusOr<DeviceRegion> Make(int64_t bytes);
  void Forget(const uint8_t* begin);

  const std::shared_ptr<const CudaDevice> device_;
  mutable std::shared_mutex mutex_;
  std::map<const uint8_t*, int64_t> regions_ ABSL_GUARDED_BY(mutex_);  // bytes by begin
};

}  // namespace engram
