// What a kernel on a CUDA device is called with (kernels.h, module.h): plain structs, no CUDA header.
//
// Pointers are device memory, or host memory that the device can reach (pinned), aligned as their element unless more
// is said.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace engram::kernels::cuda {

// Rows of a Q2_K table, `count` of them.
struct GatherCall {
  const uint8_t* table = nullptr;  // blocks of kQ2KBlockBytes, back to back; aligned to 4
  const int64_t* ids = nullptr;    // [count], -1 = a row of zeros; null: rows 0, 1, ... count - 1
  int64_t count = 0;
};

// What the projection kernel reads: wkv in tiles of 16 outputs x 256 inputs (project.cuh), as Q2_K or as bf16. Both
// give the same bits.
enum class TileSource : int32_t { kQ2K, kBf16 };

// wkv [outputs, inputs], in tiles.
struct TiledWeights {
  TileSource source = TileSource::kQ2K;
  const uint8_t* tiles = nullptr;  // TiledBytes() of them, aligned to 16
  int64_t outputs = 0;
  int64_t inputs = 0;  // a multiple of kRowValues
};

// Outputs are padded to a multiple of 16 by weights of zero.
constexpr int64_t TiledBytes(TileSource source, int64_t outputs, int64_t inputs) {
  const int64_t tiles = (outputs + 15) / 16 * (inputs / kRowValues);
  return tiles * 16 * (source == TileSource::kQ2K ? kQ2KBlockBytes : kRowValues * 2);
}

// Tokens that one pass of the projection kernel takes; more are passes of that many.
inline constexpr int64_t kProjectTokens = 64;

// A token whose gate is wanted. All of its memory may be anywhere: a step's own, a ticket's, a worker's region.
struct GateToken {
  const Bf16* kv = nullptr;       // [dim * (copies + 1)]: the key of each copy, then the shared value
  const void* highway = nullptr;  // [copies, dim] of the call's type
  void* out = nullptr;            // the updated highway; may be `highway`, and else overlaps nothing; null: gates only
  float* gates = nullptr;         // [copies]; null: not wanted
  int64_t live = 1;               // 0: masked, gates are 0 and the highway's bytes are copied
};

struct GateTokens {
  const GateToken* tokens = nullptr;  // [count], device memory
  int64_t count = 0;
  HighwayType type = HighwayType::kF32;
};

}  // namespace engram::kernels::cuda
