// What a CUDA device lends and must get back: memory, pinned host memory, streams, events. Each gives itself back when
// dropped, on any thread, and keeps its device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/cuda_module.h"

namespace engram {

struct CudaMemoryEnd {
  std::shared_ptr<const CudaDevice> device;
  bool pinned = false;
  void operator()(uint8_t* data) const;
};

// A block of the device's memory, or of host memory that the device reaches at the same address. Move-only.
class CudaMemory {
 public:
  CudaMemory() = default;
  // `what` names the use in the error: "the tables". 0 bytes: none, and data() is null.
  static absl::StatusOr<CudaMemory> OnDevice(std::shared_ptr<const CudaDevice> device, int64_t bytes,
                                             const std::string& what);
  static absl::StatusOr<CudaMemory> Pinned(std::shared_ptr<const CudaDevice> device, int64_t bytes,
                                           const std::string& what);

  uint8_t* data() const { return data_.get(); }  // aligned to 256 on the device, to 64 on the host
  int64_t bytes() const { return bytes_; }

 private:
  static absl::StatusOr<CudaMemory> Make(std::shared_ptr<const CudaDevice> device, bool pinned, int64_t bytes,
                                         const std::string& what);

  std::unique_ptr<uint8_t, CudaMemoryEnd> data_;
  int64_t bytes_ = 0;
};

struct CudaStreamEnd {
  std::shared_ptr<const CudaDevice> device;
  void operator()(CUstream_st* stream) const;
};
using CudaStream = std::unique_ptr<CUstream_st, CudaStreamEnd>;
absl::StatusOr<CudaStream> MakeCudaStream(std::shared_ptr<const CudaDevice> device);

struct CudaEventEnd {
  std::shared_ptr<const CudaDevice> device;
  void operator()(CUevent_st* event) const;
};
using CudaEvent = std::unique_ptr<CUevent_st, CudaEventEnd>;
// One that tells the time when it was passed.
absl::StatusOr<CudaEvent> MakeCudaEvent(std::shared_ptr<const CudaDevice> device);

struct CudaGraphEnd {
  std::shared_ptr<const CudaDevice> device;
  void operator()(CUgraphExec_st* graph) const;
};
using CudaGraph = std::unique_ptr<CUgraphExec_st, CudaGraphEnd>;

}  // namespace engram
