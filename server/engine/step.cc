#include "server/engine/step.h"

#include <algorithm>
#include <map>
#include <utility>

namespace engram {
namespace {

void AddRuns(const Piece& piece, int before, Step& step) {
  int64_t first = 0;                              // the sequence's first token in the call
  const int32_t* window = piece.windows->data();  // the sequence's window
  for (const int64_t tokens : piece.call->sequence_tokens) {
    const int64_t begin = std::max(piece.begin, first);
    const int64_t end = std::min(piece.end, first + tokens);
    if (begin < end) {
      const WindowRun run{window + (begin - first), end - begin};
      step.dead_tokens += std::count(run.window + before, run.window + before + run.tokens, kernels::kDead);
      step.runs.push_back(run);
    }
    first += tokens;
    window += before + tokens;
  }
}

}  // namespace

int64_t HighwayBytes(const StepShape& shape, kernels::HighwayType type) {
  return shape.highway_values * kernels::HighwayBytesPerValue(type);
}

int64_t OutBytes(const StepShape& shape, Form form, kernels::HighwayType type) {
  switch (form) {
    case Form::kHighway:
      return HighwayBytes(shape, type);
    case Form::kKv:
      return shape.kv_values * static_cast<int64_t>(sizeof(kernels::Bf16));
  }
  return 0;
}

Step BuildStep(const std::vector<Piece>& pieces, const StepShape& shape) {
  Step step;
  std::map<int, StepLayer> layers;
  for (const Piece& piece : pieces) {
    const Call& call = *piece.call;
    AddRuns(piece, shape.max_ngram - 1, step);
    for (const CallLayer& wanted : call.layers) {
      StepSlice slice;
      slice.first = step.tokens;
      slice.tokens = piece.end - piece.begin;
      slice.form = call.form;
      slice.highway_type = call.highway_type;
      if (wanted.highway != nullptr) {
        slice.highway =
            static_cast<const uint8_t*>(wanted.highway) + piece.begin * HighwayBytes(shape, call.highway_type);
      }
      slice.out = static_cast<uint8_t*>(wanted.out) + piece.begin * OutBytes(shape, call.form, call.highway_type);
      if (!call.token_mask.empty()) slice.token_mask = call.token_mask.data() + piece.begin;
      StepLayer& layer = layers[wanted.layer];
      layer.layer = wanted.layer;
      layer.slices.push_back(slice);
    }
    step.tokens += piece.end - piece.begin;
  }
  for (auto& [index, layer] : layers) step.layers.push_back(std::move(layer));
  return step;
}

}  // namespace engram
