// The step in host memory, on the threads of one pool.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "server/engine/backend.h"
#include "server/model/engram_model.h"

namespace engram {

struct CpuBackendOptions {
  int threads = 1;
  int64_t max_batch_tokens = 1024;  // no step is larger
};

class CpuBackend final : public Backend {
 public:
  // Allocates what a largest step needs: per token the row ids, the bf16 rows and kv of one layer.
  CpuBackend(std::shared_ptr<const EngramModel> model, const kernels::Kernels& kernels, CpuBackendOptions options);

  absl::StatusOr<StepTimes> Run(const Step& step) override;
  std::string name() const override { return "cpu"; }
  std::string numerics_id() const override;

 private:
  void GatherLayer(const StepLayer& work, const EngramLayer& layer);

  const std::shared_ptr<const EngramModel> model_;
  const kernels::Kernels& kernels_;
  const CpuBackendOptions options_;
  kernels::Workers workers_;
  std::vector<int64_t> ids_;         // [tokens][layers][columns]
  std::vector<kernels::Bf16> rows_;  // [tokens of a layer, packed][inputs]
  std::vector<kernels::Bf16> kv_;    // [tokens of a layer, packed][outputs]
};

}  // namespace engram
