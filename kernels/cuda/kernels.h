// The step's arithmetic on a CUDA device (docs/gpu.md): launch functions over device memory and a stream.
//
// The rows are the bits of kernels/kernels.h; kv and gates are within the tolerances of docs/numerics.md. Nothing here
// allocates, waits, or knows a file or a wire. Pointers are device memory, or host memory that the device can reach
// (pinned), aligned as their element unless more is said. A function returns a cudaError_t: cudaErrorInvalidValue for a
// shape that it does not take, else what the launch said; what the kernel itself meets shows at the stream's end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/kernels.h"

namespace engram::kernels::cuda {

// Rows of a Q2_K table, `count` of them.
struct GatherCall {
  const uint8_t* table = nullptr;  // blocks of kQ2KBlockBytes, back to back; aligned to 4
  const int64_t* ids = nullptr;    // [count], -1 = a row of zeros; null: rows 0, 1, ... count - 1
  int64_t count = 0;
};

// out [count][kRowValues] bf16, aligned to 16: each row decoded and rounded to nearest even.
cudaError_t GatherRows(const GatherCall& call, Bf16* out, cudaStream_t stream);

// out [count][kQ2KBlockBytes], aligned to 4: each row as the file holds it.
cudaError_t CopyRows(const GatherCall& call, uint8_t* out, cudaStream_t stream);

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

// Writes the tiles of outputs [first, first + count) from the file's blocks [count][inputs / 256][84] (aligned to 4) or
// from bf16 [count, inputs]; `first` is a multiple of 16, and so is `count` unless the last output is among them.
// `tiles` is TiledWeights::tiles, writable.
cudaError_t TileQ2K(const uint8_t* blocks, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
                    cudaStream_t stream);
cudaError_t TileBf16(const Bf16* wkv, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
                     cudaStream_t stream);

// Tokens that one pass of the projection kernel takes; more are passes of that many.
inline constexpr int64_t kProjectTokens = 64;

// kv = wkv * x: x [tokens, inputs] bf16, aligned to 16; kv [tokens, outputs] bf16. Sums are f32 in an order that
// depends on `inputs` alone (project.cuh). `multiprocessors` of the stream's device sizes the grid and no bit.
cudaError_t Project(const TiledWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, int multiprocessors,
                    cudaStream_t stream);

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

// The gate and the gated update (docs/numerics.md): `weights.qk` is device memory.
cudaError_t ApplyGate(const GateWeights& weights, const GateTokens& call, cudaStream_t stream);

}  // namespace engram::kernels::cuda
