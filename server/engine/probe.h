// The golden-row probe: does the engine still give what the model's file and the scalar reference say?
//
// A fixed sample of rows goes through the engine as clients' lookups do, as bytes and decoded, and is compared with the
// scalar decoder on bytes read from the file, past the resident table. One step of a few tokens goes through as KV and
// as HIGHWAY, and is compared with ReferenceKernels() on rows from the file, within docs/numerics.md.
//
// What is right is read and computed once, by Make() at load: a probe in service touches no file and notices memory
// that went bad, weights included, and a mapped file that was written in place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/engine/step.h"
#include "server/model/engram_model.h"

namespace engram {

// Immutable; any thread.
class Probe {
 public:
  // Reads the sample from the file and computes the reference step, on `threads` threads (docs/operations.md says how
  // long that takes).
  static absl::StatusOr<std::unique_ptr<const Probe>> Make(std::shared_ptr<const EngramModel> model, int threads);

  // Blocks until the engine has answered: not on its thread, nor on one that must not wait. Goes in as PREFILL, beside
  // the budget, since it is a few tokens. DataLoss names the first layer and row, or token and value, that is wrong,
  // what came back and what was expected; any other error is the engine's own.
  absl::Status Run(Engine& engine) const;

  // Of the sample, over all layers.
  int64_t rows() const;

 private:
  // What is known of one layer.
  struct Layer {
    std::vector<int64_t> ids;         // [sample_tokens_][columns], -1 = a row of zeros
    std::vector<uint8_t> bytes;       // [sample_tokens_][columns][84], as the file holds them
    std::vector<kernels::Bf16> rows;  // [sample_tokens_][columns][256], as the scalar decoder makes them
    std::vector<kernels::Bf16> kv;    // of the step's live tokens
    std::vector<float> qk;            // a copy: the reference gate must not depend on resident memory
  };

  Probe(std::shared_ptr<const EngramModel> model, const StepShape& shape) : model_(std::move(model)), shape_(shape) {}

  absl::Status Sample();
  absl::Status MakeStep(int threads);
  absl::Status ReadAndDecode(size_t layer, const int64_t* ids, int64_t count, uint8_t* bytes,
                             kernels::Bf16* rows) const;

  absl::Status CheckRows(Engine& engine) const;
  absl::Status CheckStep(Engine& engine) const;
  absl::Status CompareKv(size_t layer, const std::vector<kernels::Bf16>& got) const;
  absl::Status CompareHighway(size_t layer, const std::vector<kernels::Bf16>& kv, const std::vector<float>& got) const;
  std::string Where(size_t layer) const;

  const std::shared_ptr<const EngramModel> model_;
  const StepShape shape_;
  int64_t sample_tokens_ = 0;
  std::vector<Layer> layers_;
  std::vector<int32_t> window_;  // [N-1 + tokens of the step]
  std::vector<float> highway_;   // [tokens of the step, hc, dim]
};

}  // namespace engram
