#include "server/engine/step.h"

#include <algorithm>
#include <map>
#include <utility>

namespace engram {
namespace {

// Tokens [begin, end) of a call that are to be computed, without a refused sequence between.
struct LiveRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t first_hashed = 0;  // of `begin`, among the step's hashed tokens
};

class StepBuilder {
 public:
  explicit StepBuilder(const StepShape& shape) : shape_(shape) {}

  void Add(const Piece& piece) {
    const std::vector<LiveRange> ranges = Ranges(piece);
    for (size_t i = 0; i < piece.call->layers.size(); ++i) {
      const CallLayer& wanted = piece.call->layers[i];
      StepLayer& layer = layers_[wanted.layer];
      layer.layer = wanted.layer;
      for (const LiveRange& range : ranges) layer.slices.push_back(Slice(*piece.call, i, range));
    }
    for (const LiveRange& range : ranges) KeepIds(*piece.call, range);
  }

  Step Finish() {
    for (auto& [index, layer] : layers_) step_.layers.push_back(std::move(layer));
    return std::move(step_);
  }

 private:
  // Walks the piece's sequences: adds what is to be hashed, and returns the runs of tokens to compute.
  std::vector<LiveRange> Ranges(const Piece& piece) {
    std::vector<LiveRange> ranges;
    const int before = shape_.max_ngram - 1;
    const bool hashed = !piece.call->windows.empty();
    const int32_t* window = piece.call->windows.data();  // the sequence's
    int64_t first = 0;                                   // the sequence's first token in the call
    for (const CallSequence& sequence : piece.call->sequences) {
      const int64_t begin = std::max(piece.begin, first);
      const int64_t end = std::min(piece.end, first + sequence.tokens);
      if (begin < end && !sequence.refused) {
        if (ranges.empty() || ranges.back().end != begin) ranges.push_back({begin, begin, step_.hashed_tokens});
        ranges.back().end = end;
        if (hashed) AddRun({window + (begin - first), end - begin});
      }
      first += sequence.tokens;
      if (hashed) window += before + sequence.tokens;
    }
    return ranges;
  }

  void AddRun(const WindowRun& run) {
    const int32_t* own = run.window + shape_.max_ngram - 1;
    step_.dead_tokens += std::count(own, own + run.tokens, kernels::kDead);
    step_.hashed_tokens += run.tokens;
    step_.runs.push_back(run);
  }

  StepSlice Slice(const Call& call, size_t index, const LiveRange& range) const {
    const CallLayer& wanted = call.layers[index];
    const int64_t t = range.begin;
    StepSlice slice;
    slice.tokens = range.end - range.begin;
    slice.call_tokens = call.tokens;
    slice.form = call.form;
    slice.highway_type = call.highway_type;
    slice.range = call.slice;
    slice.uncounted = call.uncounted;
    slice.first = range.first_hashed;
    if (!call.row_ids.empty()) {
      slice.id_stride = static_cast<int64_t>(call.layers.size()) * shape_.columns;
      slice.ids = call.row_ids.data() + t * slice.id_stride + static_cast<int64_t>(index) * shape_.columns;
    }
    if (call.prepared != nullptr) {
      const int64_t p = call.prepared_first + t;
      slice.id_stride = int64_t{shape_.layers} * shape_.columns;
      slice.ids = call.prepared->ids.data() + p * slice.id_stride + int64_t{wanted.layer} * shape_.columns;
      const Prepared::LayerKv* ready = call.prepared->Find(wanted.layer);
      if (ready != nullptr) slice.kv = ready->kv() + p * shape_.kv_values();
    }
    if (!call.token_mask.empty()) slice.token_mask = call.token_mask.data() + t;
    if (wanted.highway != nullptr) {
      slice.highway = static_cast<const uint8_t*>(wanted.highway) + t * HighwayBytes(shape_, call.highway_type);
    }
    if (wanted.out != nullptr) {
      slice.out = static_cast<uint8_t*>(wanted.out) + t * OutBytes(shape_, call.form, call.highway_type, call.slice);
    }
    if (wanted.gates != nullptr) slice.gates = wanted.gates + t * shape_.copies;
    if (wanted.value != nullptr) slice.value = wanted.value + t * shape_.dim;
    return slice;
  }

  void KeepIds(const Call& call, const LiveRange& range) {
    if (call.preparing == nullptr) return;
    const int64_t per_token = int64_t{shape_.layers} * shape_.columns;
    step_.id_copies.push_back(
        {range.first_hashed, range.end - range.begin, call.preparing->ids.data() + range.begin * per_token});
  }

  const StepShape& shape_;
  Step step_;
  std::map<int, StepLayer> layers_;
};

}  // namespace

int64_t HighwayBytes(const StepShape& shape, kernels::HighwayType type) {
  return shape.highway_values() * kernels::HighwayBytesPerValue(type);
}

int64_t OutBytes(const StepShape& shape, Form form, kernels::HighwayType type, const OutputSlice& slice) {
  constexpr int64_t kBf16Bytes = sizeof(kernels::Bf16);
  const auto range = [&slice](int64_t all) { return slice.whole() ? all : slice.end - slice.begin; };
  switch (form) {
    case Form::kHighway:
      return HighwayBytes(shape, type);
    case Form::kKv:
      return range(shape.kv_values()) * kBf16Bytes;
    case Form::kRowsNative:
      return range(shape.columns) * kernels::kQ2KBlockBytes;
    case Form::kRowsBf16:
      return range(shape.columns) * kernels::kRowValues * kBf16Bytes;
    case Form::kPrepare:
      return shape.kv_values() * kBf16Bytes;
    case Form::kUpdate:
    case Form::kGate:
      return 0;
  }
  return 0;
}

Step BuildStep(const std::vector<Piece>& pieces, const StepShape& shape) {
  StepBuilder builder(shape);
  for (const Piece& piece : pieces) builder.Add(piece);
  return builder.Finish();
}

}  // namespace engram
