// kv = wkv * x through cuBLASLt, for calls of many tokens; what module.h says of create_gemm and its siblings.
//
// In a file of its own so that a build without cuBLAS can bring other definitions of these functions. One algorithm
// serves every number of tokens of a class, so bits do not depend on it; CreateGemm proves that on the device before it
// returns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/module.h"

namespace engram::kernels::cuda {

// Tokens are padded to a multiple of this: few enough shapes to check, and no algorithm meets a ragged edge. Padding
// rows of x may hold anything, NaN too: a row of x reaches its own row of kv and no other.
inline constexpr int64_t kGemmTokens = 64;

// wkv [outputs, inputs], aligned to 16 as x and kv are, outlives the Gemm. Takes seconds, and while it runs device
// memory for up to 2048 tokens of x and kv and the workspace. cudaErrorNotSupported: cuBLASLt knows no algorithm that
// sums each value in one piece and gives the same bits for every number of tokens.
cudaError_t CreateGemm(const Bf16* wkv, int64_t outputs, int64_t inputs, int64_t most_tokens, Gemm** gemm);
cudaError_t DestroyGemm(Gemm* gemm);  // takes null; no run may be under way
cudaError_t DescribeGemm(const Gemm& gemm, GemmInfo& info);
int64_t GemmWorkspaceBytes();
int64_t PaddedTokens(int64_t tokens);
// Any number of threads, each with a stream and workspace (aligned to 256) of its own. tokens <= most_tokens.
cudaError_t RunGemm(const Gemm& gemm, GemmClass shape, const Bf16* x, int64_t tokens, Bf16* kv, void* workspace,
                    cudaStream_t stream);

}  // namespace engram::kernels::cuda
