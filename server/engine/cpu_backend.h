// The step in host memory, on the threads of one pool.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "server/engine/backend.h"
#include "server/model/anonymous_memory.h"
#include "server/model/engram_model.h"

namespace engram {

StepShape ShapeOf(const EngramModel& model);

struct CpuBackendOptions {
  int threads = 1;
  int64_t max_batch_tokens = 1024;  // no step has more
  int64_t keep_prepared_bytes = 0;  // of prepared kv that is used again, as in StagingPool
};

class CpuBackend final : public Backend {
 public:
  // Packs wkv for the kernels and allocates what a largest step needs: per token the row ids, the bf16 rows twice and
  // kv of one layer. RESOURCE_EXHAUSTED names the layer whose packed weights there is no memory for.
  static absl::StatusOr<std::unique_ptr<CpuBackend>> Create(std::shared_ptr<const EngramModel> model,
                                                            const kernels::Kernels& kernels, CpuBackendOptions options);

  // Computes the step: what Start() does, which calls `done` before it returns.
  absl::StatusOr<StepTimes> Run(const Step& step, const LayerDone& layer_done);
  void Start(const Step& step, LayerDone layer_done, StepDone done) override { done(Run(step, layer_done)); }
  StagingMemory TakePreparedKv(int64_t bytes) override { return prepared_.Take(bytes); }
  StagingStats prepared_stats() const override { return prepared_.stats(); }
  bool IsLight(const Call& call) const override;
  std::string name() const override { return "cpu"; }
  std::string numerics_id() const override;

 private:
  CpuBackend(std::shared_ptr<const EngramModel> model, const kernels::Kernels& kernels, CpuBackendOptions options);

  absl::Status PackWeights();

  // Row ids of a slice's first token, and how far apart those of its tokens stand.
  struct IdRange {
    const int64_t* ids = nullptr;
    int64_t stride = 0;
  };

  absl::Status CheckSize(const Step& step) const;
  void Hash(const Step& step);
  IdRange IdsOf(const StepSlice& slice, int layer) const;
  void AskForFirstRows(const Step& step) const;
  void AskForRows(int layer, const IdRange& range, int64_t first, int64_t tokens, int columns) const;
  // Calls read(first, count) for runs of tokens that cover [0, tokens), the rows of the next run asked of the disk
  // before one is read; for all of them at once where tables are in memory.
  void ReadInRuns(int layer, const IdRange& range, int64_t tokens, int columns,
                  const std::function<void(int64_t first, int64_t count)>& read) const;
  int64_t GatherForKv(const StepLayer& work, const EngramLayer& layer);
  void Write(const StepSlice& slice, const EngramLayer& layer, int layer_index, const kernels::Bf16* kv);
  void CopyKv(const StepSlice& slice, const kernels::Bf16* kv) const;
  void CopyValue(const StepSlice& slice, const kernels::Bf16* kv) const;

  const std::shared_ptr<const EngramModel> model_;
  const kernels::Kernels& kernels_;
  const CpuBackendOptions options_;
  const StepShape shape_;
  kernels::Workers workers_;
  StagingPool prepared_;
  std::vector<std::unique_ptr<AnonymousMemory>> packed_;
  std::vector<kernels::ProjectionWeights> wkv_;  // of each layer, as the kernels have packed it
  std::vector<int64_t> ids_;                     // [tokens][layers][columns]
  std::vector<kernels::Bf16> rows_, scratch_;    // [tokens of a layer, packed][inputs]
  std::vector<kernels::Bf16> kv_;                // [tokens of a layer, packed][outputs]
};

}  // namespace engram
