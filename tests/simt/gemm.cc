// The matrix product of gemm.h without cuBLASLt: plain sums, one per thread, from the other end where the class is
// long, so that whoever picks the wrong class gets other bits.
#include "kernels/cuda/gemm.h"

#include <limits>

#include "kernels/scalar.h"

namespace engram::kernels::cuda {

struct Gemm {
  const Bf16* wkv;
  int64_t outputs, inputs, most_tokens;
};

namespace {

constexpr unsigned kThreads = 64;
constexpr int kSums = 16;  // at a time: one alone waits for itself

bool Aligned(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 16 == 0; }

void ProductKernel(const Bf16* wkv, int64_t outputs, int64_t inputs, bool reversed, const Bf16* x, Bf16* kv) {
  const int64_t output = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (output >= outputs) return;
  const Bf16 *const w = wkv + output * inputs, *const v = x + token * inputs;
  float sums[kSums] = {};
  const int64_t whole = inputs / kSums * kSums;
  for (int64_t i = 0; i < whole; i += kSums) {
    const int64_t k = reversed ? whole - kSums - i : i;
    for (int j = 0; j < kSums; ++j) sums[j] += F32FromBf16(w[k + j]) * F32FromBf16(v[k + j]);
  }
  for (int64_t k = whole; k < inputs; ++k) sums[0] += F32FromBf16(w[k]) * F32FromBf16(v[k]);
  float sum = 0;
  for (const float part : sums) sum += part;
  kv[token * outputs + output] = Bf16FromF32(sum);
}

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
  info = {"cublasLt-none", {"ascending", "descending"}};
  return cudaSuccess;
}

int64_t GemmWorkspaceBytes() { return 4096; }

int64_t PaddedTokens(int64_t tokens) { return (tokens + kGemmTokens - 1) / kGemmTokens * kGemmTokens; }

cudaError_t RunGemm(const Gemm& gemm, GemmClass shape, const Bf16* x, int64_t tokens, Bf16* kv, void* workspace,
                    cudaStream_t stream) {
  const auto index = static_cast<int32_t>(shape);
  if (index < 0 || index > 1 || tokens < 0 || tokens > gemm.most_tokens || !Aligned(x) || !Aligned(kv)) {
    return cudaErrorInvalidValue;
  }
  if (tokens == 0) return cudaSuccess;
  if (workspace == nullptr) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config;
  config.gridDim = dim3(static_cast<unsigned>((gemm.outputs + kThreads - 1) / kThreads),
                        static_cast<unsigned>(PaddedTokens(tokens)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, ProductKernel, gemm.wkv, gemm.outputs, gemm.inputs, shape == GemmClass::kLong, x,
                            kv);
}

}  // namespace engram::kernels::cuda
