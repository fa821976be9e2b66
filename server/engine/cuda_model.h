// A model's tables and weights where the kernels of a CUDA device read them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/module.h"
#include "server/engine/cuda_memory_plan.h"
#include "server/engine/cuda_resources.h"
#include "server/model/engram_model.h"

namespace engram {

// Immutable once made; any thread.
class CudaModel {
 public:
  struct Layer {
    const uint8_t* table = nullptr;  // device memory, or the model's own, pinned
    kernels::cuda::TiledWeights wkv;
    kernels::GateWeights gate;
    const kernels::cuda::Gemm* gemm = nullptr;
  };

  // Brings the model up, on the calling thread with `threads` readers, and logs how far it is every two seconds.
  // Tables are read from the files where the plan has them on the device; else the model is resident in memory (kRam)
  // and is pinned here. `most_rows`: of CudaLaneSizes.
  static absl::StatusOr<std::unique_ptr<CudaModel>> Upload(std::shared_ptr<const CudaDevice> device,
                                                           std::shared_ptr<const EngramModel> model,
                                                           bool tables_on_device, int64_t most_rows, int threads);
  ~CudaModel();
  CudaModel(const CudaModel&) = delete;
  CudaModel& operator=(const CudaModel&) = delete;

  const Layer& layer(int index) const { return layers_[static_cast<size_t>(index)]; }
  // What cuBLASLt chose, for numerics_id: "cublasLt-13.0.2:A|B", once where all layers have the same.
  absl::StatusOr<std::string> GemmNames() const;

 private:
  class Uploader;

  CudaModel(std::shared_ptr<const CudaDevice> device, std::shared_ptr<const EngramModel> model)
      : device_(std::move(device)), model_(std::move(model)) {}

  absl::Status PinTables();

  const std::shared_ptr<const CudaDevice> device_;
  const std::shared_ptr<const EngramModel> model_;
  std::vector<CudaMemory> memory_;
  std::vector<void*> pinned_;
  std::vector<kernels::cuda::Gemm*> gemms_;
  std::vector<Layer> layers_;
};

}  // namespace engram
