// One batch as plain work for a backend: windows to hash, and per layer the slices of tokens that want it.
#pragma once

#include <cstdint>
#include <vector>

#include "server/engine/call.h"

namespace engram {

// Tokens [begin, end) of a call that is committed.
struct Piece {
  Call* call = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

// Consecutive positions of one sequence, to be hashed.
struct WindowRun {
  const int32_t* window = nullptr;  // [N-1 + tokens], oldest first
  int64_t tokens = 0;
};

// Where hashed ids are kept, for a later ticket.
struct IdCopy {
  int64_t first = 0;  // index of the first token among the step's hashed ones
  int64_t tokens = 0;
  int64_t* to = nullptr;  // [tokens][layers of the model][columns]
};

// Tokens of one piece, for one layer. All pointers stand at the slice's first token.
struct StepSlice {
  int64_t tokens = 0;
  int64_t call_tokens = 0;  // of the whole call, however it is cut: what may decide how a backend computes kv
  Form form = Form::kHighway;
  kernels::HighwayType highway_type = kernels::HighwayType::kF32;
  OutputSlice range;
  bool uncounted = false;  // as in Call

  // Rows come from `ids` (this layer's, id_stride apart), or where that is null from the step's hashed tokens, `first`
  // on; where `kv` is not null it is ready and rows are not needed for it.
  int64_t first = 0;
  const int64_t* ids = nullptr;
  int64_t id_stride = 0;
  const kernels::Bf16* kv = nullptr;

  const uint8_t* token_mask = nullptr;  // null = all live
  const void* highway = nullptr;
  void* out = nullptr;
  float* gates = nullptr;
  kernels::Bf16* value = nullptr;
};

struct StepLayer {
  int layer = 0;
  std::vector<StepSlice> slices;
};

struct Step {
  std::vector<WindowRun> runs;  // in token order, together `hashed_tokens`
  int64_t hashed_tokens = 0;
  int64_t dead_tokens = 0;  // hashed ones whose own id takes no part in the hash
  std::vector<IdCopy> id_copies;
  // Ascending: all that any piece's call asks for, without slices where there is nothing of it to compute, since the
  // call waits for each of its layers to be done.
  std::vector<StepLayer> layers;
};

// Sizes that outputs follow from.
struct StepShape {
  int max_ngram = 0;
  int layers = 0;   // of the model
  int columns = 0;  // rows per token and layer
  int copies = 0;   // hc
  int64_t dim = 0;

  int64_t highway_values() const { return copies * dim; }
  int64_t kv_values() const { return dim * (copies + 1); }
};

// Bytes per token: of the highway, and of `out` (0 where the form writes gates and value alone).
int64_t HighwayBytes(const StepShape& shape, kernels::HighwayType type);
int64_t OutBytes(const StepShape& shape, Form form, kernels::HighwayType type, const OutputSlice& slice);

// The calls must outlive the step. Tokens of refused sequences are left out.
Step BuildStep(const std::vector<Piece>& pieces, const StepShape& shape);

}  // namespace engram
