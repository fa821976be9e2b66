// One batch as plain work for a backend: windows to hash, and per layer the slices of tokens that want it.
#pragma once

#include <cstdint>
#include <vector>

#include "server/engine/call.h"

namespace engram {

// Tokens [begin, end) of a call, and the call's windows as its commit returned them.
struct Piece {
  const Call* call = nullptr;
  const std::vector<int32_t>* windows = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// Consecutive positions of one sequence.
struct WindowRun {
  const int32_t* window = nullptr;  // [N-1 + tokens], oldest first
  int64_t tokens = 0;
};

// The tokens of one piece, for one layer.
struct StepSlice {
  int64_t first = 0;  // index of its first token in the step
  int64_t tokens = 0;
  Form form = Form::kHighway;
  kernels::HighwayType highway_type = kernels::HighwayType::kF32;
  const void* highway = nullptr;        // at the slice's first token
  void* out = nullptr;                  // likewise
  const uint8_t* token_mask = nullptr;  // likewise; null = all live
};

struct StepLayer {
  int layer = 0;
  std::vector<StepSlice> slices;  // ascending by `first`, disjoint
};

struct Step {
  std::vector<WindowRun> runs;  // in token order, together `tokens`
  int64_t tokens = 0;
  int64_t dead_tokens = 0;  // whose own id takes no part in the hash
  std::vector<StepLayer> layers;
};

// What a slice's output and highway take per token.
struct StepShape {
  int max_ngram = 0;
  int64_t highway_values = 0;  // hc * dim
  int64_t kv_values = 0;       // dim * (hc + 1)
};

int64_t HighwayBytes(const StepShape& shape, kernels::HighwayType type);         // per token
int64_t OutBytes(const StepShape& shape, Form form, kernels::HighwayType type);  // per token and layer

// Layers in ascending order. The pieces' calls and windows must outlive the step.
Step BuildStep(const std::vector<Piece>& pieces, const StepShape& shape);

}  // namespace engram
