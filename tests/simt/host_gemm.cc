// kernels/cuda/gemm.h without cuBLAS: a kernel of one thread per token that sums in ascending order.
#include <cstring>
#include <limits>
#include <string>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/gemm.h"

namespace engram::kernels::cuda {

struct Gemm {
  const Bf16* wkv;
  int64_t outputs, inputs, most_tokens;
};

namespace {

constexpr int64_t kWorkspaceBytes = 4096;

__global__ void GemmKernel(const Bf16* wkv, int64_t outputs, int64_t inputs, const Bf16* x, Bf16* kv) {
  const int64_t token = blockIdx.x;
  for (int64_t output = 0; output < outputs; ++output) {
    float sum = 0;
    for (int64_t k = 0; k < inputs; ++k) {
      sum = std::fma(F32FromBf16(wkv[output * inputs + k]), F32FromBf16(x[token * inputs + k]), sum);
    }
    kv[token * outputs + output] = Bf16FromF32(sum);
  }
}

bool Aligned(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 16 == 0; }

}  // namespace

cudaError_t CreateGemm(const Bf16* wkv, int64_t outputs, int64_t inputs, int64_t most_tokens, Gemm** gemm) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kGemmTokens;
  if (wkv == nullptr || !Aligned(wkv) || outputs < 1 || outputs > kMost || inputs < 1 || inputs > kMost ||
      most_tokens < 1 || most_tokens > kMost) {
    return cudaErrorInvalidValue;
  }
  *gemm = new Gemm{wkv, outputs, inputs, most_tokens};
  return cudaSuccess;
}

cudaError_t DestroyGemm(Gemm* gemm) {
  delete gemm;
  return cudaSuccess;
}

cudaError_t DescribeGemm(const Gemm&, GemmInfo& info) {
  info = {};
  std::strcpy(info.library, "cublasLt-none");
  for (char(&algorithm)[128] : info.algorithms) std::strcpy(algorithm, "ascending");
  return cudaSuccess;
}

int64_t GemmWorkspaceBytes() { return kWorkspaceBytes; }

int64_t PaddedTokens(int64_t tokens) { return (tokens + kGemmTokens - 1) / kGemmTokens * kGemmTokens; }

cudaError_t RunGemm(const Gemm& gemm, GemmClass shape, const Bf16* x, int64_t tokens, Bf16* kv, void*,
                    cudaStream_t stream) {
  const auto index = static_cast<int32_t>(shape);
  if (index < 0 || index > 1 || tokens < 0 || tokens > gemm.most_tokens || !Aligned(x) || !Aligned(kv)) {
    return cudaErrorInvalidValue;
  }
  return Launch(&GemmKernel, PaddedTokens(tokens), 1, 0, stream, gemm.wkv, gemm.outputs, gemm.inputs, x, kv);
}

}  // namespace engram::kernels::cuda
