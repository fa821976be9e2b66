#include "server/engine/cpu_backend.h"

#include <gnu/libc-version.h>

#include <algorithm>
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

// Rows asked of the disk together. Flash wants many requests at a time: a step of one token reads 24 to 48 rows, which
// then cost about one latency; beyond 64 in flight the rate of common devices falls again.
constexpr int64_t kRowsTogether = 48;

// Of a call that runs where it is submitted: rows to copy, 24 ns each; or gates, 5 us each. 40 us, less than a handler
// takes to copy the highway of 16 tokens, and all of it on one thread (copy_rows.cc, cpu_kernels.cc: grains).
constexpr int64_t kLightRows = 1536;
constexpr int64_t kLightTokens = 8;

// Is this slice's kv to be computed here?
bool WantsProjection(const StepSlice& slice) { return NeedsKv(slice.form) && slice.kv == nullptr; }

// What decides the bits of a gate beside the kernels is the exponential in gate_value.cc: the C library's, which has
// one variant with fused multiply-adds and one without, and takes the one this CPU has. Its versions may differ too.
#if defined(__x86_64__)
constexpr const char* kMachine = "x86-64";
const char* ExpInstructions() { return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2") ? "+fma" : ""; }
#elif defined(__aarch64__)
constexpr const char* kMachine = "aarch64";  // fused multiply-adds are part of it
const char* ExpInstructions() { return ""; }
#else
constexpr const char* kMachine = "other";
const char* ExpInstructions() { return ""; }
#endif

}  // namespace

StepShape ShapeOf(const EngramModel& model) {
  const EngramGeometry& g = model.geometry();
  return {.max_ngram = g.max_ngram,
          .layers = static_cast<int>(model.layers().size()),
          .columns = g.columns,
          .copies = g.copies,
          .dim = g.dim};
}

absl::StatusOr<std::unique_ptr<CpuBackend>> CpuBackend::Create(std::shared_ptr<const EngramModel> model,
                                                               const kernels::Kernels& kernels,
                                                               CpuBackendOptions options) {
  std::unique_ptr<CpuBackend> backend(new CpuBackend(std::move(model), kernels, options));
  if (const absl::Status status = backend->PackWeights(); !status.ok()) return status;
  return backend;
}

CpuBackend::CpuBackend(std::shared_ptr<const EngramModel> model, const kernels::Kernels& kernels,
                       CpuBackendOptions options)
    : model_(std::move(model)),
      kernels_(kernels),
      options_(options),
      shape_(ShapeOf(*model_)),
      workers_(options.threads),
      prepared_(options.keep_prepared_bytes) {
  const EngramGeometry& g = model_->geometry();
  const auto tokens = static_cast<size_t>(options_.max_batch_tokens);
  ids_.resize(tokens * model_->layers().size() * static_cast<size_t>(g.columns));
  rows_.resize(tokens * static_cast<size_t>(g.inputs()));
  scratch_.resize(rows_.size());
  kv_.resize(tokens * static_cast<size_t>(g.outputs()));
}

absl::Status CpuBackend::PackWeights() {
  for (const EngramLayer& layer : model_->layers()) {
    kernels::ProjectionWeights weights = layer.wkv;
    absl::StatusOr<std::unique_ptr<AnonymousMemory>> memory = AnonymousMemory::Allocate(
        kernels_.packed_bytes(weights), absl::StrCat("the packed wkv of layer ", layer.layer_id));
    if (!memory.ok()) return memory.status();
    kernels_.pack(weights, (*memory)->data(), workers_);
    weights.packed = (*memory)->data();
    packed_.push_back(*std::move(memory));
    wkv_.push_back(weights);
  }
  return absl::OkStatus();
}

bool CpuBackend::IsLight(const Call& call) const {
  const int64_t tokens = call.tokens * static_cast<int64_t>(call.layers.size());
  if (NeedsKv(call.form)) return call.kv_ready && tokens <= kLightTokens;
  // Mapped rows may have to come from the disk first.
  return model_->residency() == Residency::kRam && tokens * shape_.columns <= kLightRows;
}

std::string CpuBackend::numerics_id() const {
  return absl::StrCat("cpu/", kernels_.name, "/", kMachine, ExpInstructions(), "/glibc-", gnu_get_libc_version());
}

absl::Status CpuBackend::CheckSize(const Step& step) const {
  int64_t most = step.hashed_tokens;
  for (const StepLayer& work : step.layers) {
    int64_t tokens = 0;
    for (const StepSlice& slice : work.slices) tokens += slice.tokens;
    most = std::max(most, tokens);
  }
  if (most <= options_.max_batch_tokens) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("a step of ", most, " tokens, built for ", options_.max_batch_tokens));
}

void CpuBackend::Hash(const Step& step) {
  const int64_t per_token = int64_t{shape_.layers} * shape_.columns;
  int64_t* ids = ids_.data();
  for (const WindowRun& run : step.runs) {
    kernels_.hash_window(model_->hash_tables(), run.window, run.tokens, ids, workers_);
    ids += run.tokens * per_token;
  }
  for (const IdCopy& copy : step.id_copies) {
    std::memcpy(copy.to, ids_.data() + copy.first * per_token,
                static_cast<size_t>(copy.tokens * per_token) * sizeof(int64_t));
  }
}

CpuBackend::IdRange CpuBackend::IdsOf(const StepSlice& slice, int layer) const {
  if (slice.ids != nullptr) return {slice.ids, slice.id_stride};
  const int64_t stride = int64_t{shape_.layers} * shape_.columns;
  return {ids_.data() + slice.first * stride + int64_t{layer} * shape_.columns, stride};
}

void CpuBackend::AskForRows(int layer, const IdRange& range, int64_t first, int64_t tokens, int columns) const {
  for (int64_t t = first; t < first + tokens; ++t) {
    model_->WillReadRows(static_cast<size_t>(layer),
                         absl::MakeConstSpan(range.ids + t * range.stride, static_cast<size_t>(columns)));
  }
}

// The first rows of every layer, so that a small step waits for the disk once and not once a layer.
void CpuBackend::AskForFirstRows(const Step& step) const {
  if (model_->residency() != Residency::kMmap) return;
  for (const StepLayer& work : step.layers) {
    int64_t left = std::max<int64_t>(1, kRowsTogether / shape_.columns);
    for (const StepSlice& slice : work.slices) {
      if (left == 0) break;
      if (NeedsKv(slice.form) && !WantsProjection(slice)) continue;
      const int64_t tokens = std::min(left, slice.tokens);
      AskForRows(work.layer, IdsOf(slice, work.layer), 0, tokens, shape_.columns);
      left -= tokens;
    }
  }
}

void CpuBackend::ReadInRuns(int layer, const IdRange& range, int64_t tokens, int columns,
                            const std::function<void(int64_t first, int64_t count)>& read) const {
  if (model_->residency() != Residency::kMmap) return read(0, tokens);
  const int64_t run = std::max<int64_t>(1, kRowsTogether / columns);
  AskForRows(layer, range, 0, std::min(run, tokens), columns);
  for (int64_t first = 0; first < tokens; first += run) {
    const int64_t next = std::min(first + run, tokens);
    AskForRows(layer, range, next, std::min(run, tokens - next), columns);
    read(first, next - first);
  }
}

// Rows of the tokens whose kv is computed here, packed in slice order; returns their number. Slices whose ids follow
// one another are gathered as one.
int64_t CpuBackend::GatherForKv(const StepLayer& work, const EngramLayer& layer) {
  int64_t packed = 0;
  for (size_t i = 0; i < work.slices.size();) {
    if (!WantsProjection(work.slices[i])) {
      ++i;
      continue;
    }
    const IdRange range = IdsOf(work.slices[i], work.layer);
    int64_t tokens = work.slices[i].tokens;
    for (++i; i < work.slices.size() && WantsProjection(work.slices[i]); ++i) {
      const IdRange next = IdsOf(work.slices[i], work.layer);
      if (next.stride != range.stride || next.ids != range.ids + tokens * range.stride) break;
      tokens += work.slices[i].tokens;
    }
    kernels::Bf16* out = rows_.data() + packed * model_->geometry().inputs();
    ReadInRuns(work.layer, range, tokens, shape_.columns, [&](int64_t first, int64_t count) {
      kernels_.gather_rows(layer.table, range.ids + first * range.stride, range.stride, count, shape_.columns,
                           out + first * model_->geometry().inputs(), workers_);
    });
    packed += tokens;
  }
  return packed;
}

void CpuBackend::CopyKv(const StepSlice& slice, const kernels::Bf16* kv) const {
  const int64_t all = shape_.kv_values();
  if (slice.range.whole()) {
    std::memcpy(slice.out, kv, static_cast<size_t>(slice.tokens * all) * sizeof(*kv));
    return;
  }
  const size_t bytes = static_cast<size_t>(slice.range.end - slice.range.begin) * sizeof(*kv);
  for (int64_t t = 0; t < slice.tokens; ++t) {
    std::memcpy(static_cast<uint8_t*>(slice.out) + static_cast<size_t>(t) * bytes, kv + t * all + slice.range.begin,
                bytes);
  }
}

void CpuBackend::CopyValue(const StepSlice& slice, const kernels::Bf16* kv) const {
  if (slice.value == nullptr) return;
  for (int64_t t = 0; t < slice.tokens; ++t) {
    std::memcpy(slice.value + t * shape_.dim, kv + t * shape_.kv_values() + shape_.highway_values(),
                static_cast<size_t>(shape_.dim) * sizeof(*kv));
  }
}

void CpuBackend::Write(const StepSlice& slice, const EngramLayer& layer, int layer_index, const kernels::Bf16* kv) {
  switch (slice.form) {
    case Form::kHighway:
    case Form::kUpdate:
    case Form::kGate:
      kernels_.apply_gate(layer.gate,
                          {.kv = kv,
                           .token_mask = slice.token_mask,
                           .tokens = slice.tokens,
                           .type = slice.highway_type,
                           .highway = slice.highway,
                           .out = slice.out,
                           .gates = slice.gates},
                          workers_);
      CopyValue(slice, kv);
      break;
    case Form::kKv:
    case Form::kPrepare:
      CopyKv(slice, kv);
      CopyValue(slice, kv);
      break;
    case Form::kRowsNative:
    case Form::kRowsBf16: {
      const IdRange range = IdsOf(slice, layer_index);
      const int64_t begin = slice.range.begin;
      const int columns = static_cast<int>(slice.range.whole() ? shape_.columns : slice.range.end - begin);
      auto* out = static_cast<uint8_t*>(slice.out);
      const IdRange sliced = {range.ids + begin, range.stride};
      ReadInRuns(layer_index, sliced, slice.tokens, columns, [&](int64_t first, int64_t count) {
        const int64_t* ids = sliced.ids + first * sliced.stride;
        if (slice.form == Form::kRowsNative) {
          kernels::CopyRows(layer.table, ids, sliced.stride, count, columns,
                            out + first * columns * kernels::kQ2KBlockBytes, workers_);
        } else {
          auto* rows = reinterpret_cast<kernels::Bf16*>(out) + first * columns * kernels::kRowValues;
          kernels_.gather_rows(layer.table, ids, sliced.stride, count, columns, rows, workers_);
        }
      });
      break;
    }
  }
}

absl::StatusOr<StepTimes> CpuBackend::Run(const Step& step, const LayerDone& layer_done) {
  if (const absl::Status status = CheckSize(step); !status.ok()) return status;
  StepTimes times;
  {
    const Stopwatch watch(times.hash);
    Hash(step);
    AskForFirstRows(step);
  }
  for (size_t i = 0; i < step.layers.size(); ++i) {
    const StepLayer& work = step.layers[i];
    const EngramLayer& layer = model_->layers()[static_cast<size_t>(work.layer)];
    int64_t projected = 0;
    {
      const Stopwatch watch(times.gather);
      projected = GatherForKv(work, layer);
      times.rows_gathered += projected * shape_.columns;
    }
    if (projected > 0) {
      const Stopwatch watch(times.project);
      kernels_.project(wkv_[static_cast<size_t>(work.layer)], rows_.data(), projected, kv_.data(), scratch_.data(),
                       workers_);
    }
    const kernels::Bf16* next = kv_.data();
    for (const StepSlice& slice : work.slices) {
      const bool rows = !NeedsKv(slice.form);
      const Stopwatch watch(rows ? times.gather : times.gate);
      const bool computed = WantsProjection(slice);
      Write(slice, layer, work.layer, computed ? next : slice.kv);
      if (computed) next += slice.tokens * shape_.kv_values();
      if (rows) {
        times.rows_gathered +=
            slice.tokens * (slice.range.whole() ? shape_.columns : slice.range.end - slice.range.begin);
      }
    }
    layer_done(i);
  }
  return times;
}

}  // namespace engram
