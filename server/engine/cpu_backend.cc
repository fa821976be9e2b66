#include "server/engine/cpu_backend.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace engram {
namespace {

// Adds to `total` what passes until it goes out of scope.
class Stopwatch {
 public:
  explicit Stopwatch(absl::Duration& total) : total_(total) {}
  ~Stopwatch() { total_ += absl::Now() - start_; }

 private:
  absl::Duration& total_;
  const absl::Time start_ = absl::Now();
};

int64_t TokensOf(const StepLayer& work) {
  int64_t tokens = 0;
  for (const StepSlice& slice : work.slices) tokens += slice.tokens;
  return tokens;
}

}  // namespace

CpuBackend::CpuBackend(std::shared_ptr<const EngramModel> model, const kernels::Kernels& kernels,
                       CpuBackendOptions options)
    : model_(std::move(model)), kernels_(kernels), options_(options), workers_(options.threads) {
  const EngramGeometry& g = model_->geometry();
  const auto tokens = static_cast<size_t>(options_.max_batch_tokens);
  ids_.resize(tokens * model_->layers().size() * static_cast<size_t>(g.columns));
  rows_.resize(tokens * static_cast<size_t>(g.inputs()));
  kv_.resize(tokens * static_cast<size_t>(g.outputs()));
}

std::string CpuBackend::numerics_id() const { return absl::StrCat("cpu/", kernels_.name); }

// Rows of the layer's tokens, packed in slice order. Neighbouring slices are gathered as one.
void CpuBackend::GatherLayer(const StepLayer& work, const EngramLayer& layer) {
  const EngramGeometry& g = model_->geometry();
  const int64_t id_stride = static_cast<int64_t>(model_->layers().size()) * g.columns;
  int64_t packed = 0;
  for (size_t i = 0; i < work.slices.size();) {
    const int64_t first = work.slices[i].first;
    int64_t tokens = 0;
    for (; i < work.slices.size() && work.slices[i].first == first + tokens; ++i) tokens += work.slices[i].tokens;
    kernels_.gather_rows(layer.table, ids_.data() + first * id_stride + int64_t{work.layer} * g.columns, id_stride,
                         tokens, g.columns, rows_.data() + packed * g.inputs(), workers_);
    packed += tokens;
  }
}

absl::StatusOr<StepTimes> CpuBackend::Run(const Step& step) {
  if (step.tokens > options_.max_batch_tokens) {
    return absl::InternalError(
        absl::StrCat("a step of ", step.tokens, " tokens, built for ", options_.max_batch_tokens));
  }
  const EngramGeometry& g = model_->geometry();
  const auto kv_bytes = static_cast<size_t>(g.outputs()) * sizeof(kernels::Bf16);
  StepTimes times;
  {
    const Stopwatch watch(times.hash);
    int64_t* ids = ids_.data();
    for (const WindowRun& run : step.runs) {
      kernels_.hash_window(model_->hash_tables(), run.window, run.tokens, ids, workers_);
      ids += run.tokens * static_cast<int64_t>(model_->layers().size()) * g.columns;
    }
  }
  for (const StepLayer& work : step.layers) {
    const EngramLayer& layer = model_->layers()[static_cast<size_t>(work.layer)];
    {
      const Stopwatch watch(times.gather);
      GatherLayer(work, layer);
    }
    {
      const Stopwatch watch(times.project);
      kernels_.project(layer.wkv, rows_.data(), TokensOf(work), kv_.data(), workers_);
    }
    const Stopwatch watch(times.gate);
    const kernels::Bf16* kv = kv_.data();
    for (const StepSlice& slice : work.slices) {
      switch (slice.form) {
        case Form::kHighway:
          kernels_.apply_gate(layer.gate,
                              {.kv = kv,
                               .token_mask = slice.token_mask,
                               .tokens = slice.tokens,
                               .type = slice.highway_type,
                               .highway = slice.highway,
                               .out = slice.out},
                              workers_);
          break;
        case Form::kKv:
          std::memcpy(slice.out, kv, static_cast<size_t>(slice.tokens) * kv_bytes);
          break;
      }
      kv += slice.tokens * g.outputs();
    }
  }
  return times;
}

}  // namespace engram
