#include "server/engine/device_regions.h"

#include <iterator>
#include <mutex>
#include <string>
#include <utility>

#include "server/engine/cuda_memory_plan.h"
#include "server/engine/cuda_resources.h"
#include "server/model/status_macros.h"

namespace engram {

DeviceRegionSource DeviceRegions::source() {
  return [self = shared_from_this()](int64_t bytes) { return self->Make(bytes); };
}

bool DeviceRegions::Holds(const void* memory, int64_t bytes) const {
  const auto* begin = static_cast<const uint8_t*>(memory);
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto after = regions_.upper_bound(begin);
  if (after == regions_.begin()) return false;
  const auto& [region, length] = *std::prev(after);
  return begin - region <= length - bytes;
}

absl::StatusOr<DeviceRegion> DeviceRegions::Make(int64_t bytes) {
  const kernels::cuda::Module& module = device_->module();
  ASSIGN_OR_RETURN(CudaMemory memory, CudaMemory::OnDevice(device_, WholeDeviceBlocks(bytes), "a region"));
  // A stream of its own: this may be any thread, and nothing but its own work is waited for.
  ASSIGN_OR_RETURN(const CudaStream stream, MakeCudaStream(device_));
  RETURN_IF_ERROR(device_->ToStatus(module.fill(memory.data(), 0, memory.bytes(), stream.get()), "fill"));
  RETURN_IF_ERROR(device_->ToStatus(module.wait_stream(stream.get()), "wait_stream"));
  uint8_t handle[kernels::cuda::kIpcHandleBytes] = {};
  RETURN_IF_ERROR(device_->ToStatus(module.export_memory(memory.data(), handle), "export_memory"));

  uint8_t* const begin = memory.data();
  {
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    regions_.emplace(begin, memory.bytes());
  }
  // Forgotten before it is freed: the next allocation may have its address.
  auto kept = std::make_shared<CudaMemory>(std::move(memory));
  StagingMemory shared(begin, [self = shared_from_this(), kept = std::move(kept)](uint8_t* data) mutable {
    self->Forget(data);
    kept.reset();
  });
  return DeviceRegion{std::move(shared), std::string(reinterpret_cast<const char*>(handle), sizeof handle)};
}

void DeviceRegions::Forget(const uint8_t* begin) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  regions_.erase(begin);
}

}  // namespace engram
