// The step's arithmetic on a CUDA device (docs/gpu.md): launch functions over device memory and a stream.
//
// The rows are the bits of kernels/kernels.h; kv and gates are within the tolerances of docs/numerics.md. Nothing here
// allocates, waits, or knows a file or a wire. A function returns a cudaError_t: cudaErrorInvalidValue for a shape that
// it does not take, else what the launch said; what the kernel itself meets shows at the stream's end.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/calls.h"

namespace engram::kernels::cuda {

// out [count][kRowValues] bf16, aligned to 16: each row decoded and rounded to nearest even.
cudaError_t GatherRows(const GatherCall& call, Bf16* out, cudaStream_t stream);

// out [count][kQ2KBlockBytes], aligned to 4: each row as the file holds it.
cudaError_t CopyRows(const GatherCall& call, uint8_t* out, cudaStream_t stream);

// Writes the tiles of outputs [first, first + count) from the file's blocks [count][inputs / 256][84] (aligned to 4) or
// from bf16 [count, inputs]; `first` is a multiple of 16, and so is `count` unless the last output is among them.
// `tiles` is TiledWeights::tiles, writable.
cudaError_t TileQ2K(const uint8_t* blocks, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
                    cudaStream_t stream);
cudaError_t TileBf16(const Bf16* wkv, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
                     cudaStream_t stream);

// kv = wkv * x: x [tokens, inputs] bf16, aligned to 16; kv [tokens, outputs] bf16. Sums are f32 in an order that
// depends on `inputs` alone (project.cuh). `multiprocessors` of the stream's device sizes the grid and no bit.
cudaError_t Project(const TiledWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, int multiprocessors,
                    cudaStream_t stream);

// The gate and the gated update (docs/numerics.md): `weights.qk` is device memory.
cudaError_t ApplyGate(const GateWeights& weights, const GateTokens& call, cudaStream_t stream);

}  // namespace engram::kernels::cuda
