#include "kernels/cuda/gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace engram::kernels::cuda {

struct Gemm {
  const Bf16* wkv = nullptr;
  int64_t outputs = 0;
  int64_t inputs = 0;
  int64_t most_tokens = 0;
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulAlgo_t algorithms[2] = {};

  ~Gemm() {
    if (handle != nullptr) cublasLtDestroy(handle);
  }
};

namespace {

// What NVIDIA advises for Hopper; more buys nothing without a split of k.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
constexpr uint32_t kAlignment = 16;
constexpr int64_t kTunedTokens[2] = {256, 2048};
constexpr int kCandidates = 16;
constexpr int kTimedRuns = 5;
// The heuristic's earlier candidate wins over a later one that is not faster by more: another start, or another machine
// of the kind, should choose the same in spite of noise, for numerics_id names the choice.
constexpr float kNoise = 0.03F;

cudaError_t FromCublas(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return cudaSuccess;
    case CUBLAS_STATUS_ALLOC_FAILED:
      return cudaErrorMemoryAllocation;
    case CUBLAS_STATUS_INVALID_VALUE:
      return cudaErrorInvalidValue;
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return cudaErrorInitializationError;
    case CUBLAS_STATUS_NOT_SUPPORTED:
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return cudaErrorNotSupported;
    default: {
      // The runtime may know what went wrong.
      const cudaError_t error = cudaGetLastError();
      return error != cudaSuccess ? error : cudaErrorUnknown;
    }
  }
}

#define ENGRAM_RETURN_IF_FAILED(expression)                                            \
  do {                                                                                 \
    if (const cudaError_t failed = (expression); failed != cudaSuccess) return failed; \
  } while (false)

// To cuBLASLt, which counts columns first: kv^T [outputs x tokens] = (wkv^T [inputs x outputs])^T * x^T [inputs x
// tokens].
struct Problem {
  cublasLtMatmulDescOpaque_t operation = {};
  cublasLtMatrixLayoutOpaque_t weights = {}, x = {}, kv = {};

  cudaError_t Describe(const Gemm& gemm, int64_t tokens) {
    const auto outputs = static_cast<uint64_t>(gemm.outputs), inputs = static_cast<uint64_t>(gemm.inputs);
    const auto columns = static_cast<uint64_t>(tokens);
    const cublasOperation_t transposed = CUBLAS_OP_T;
    cublasStatus_t status = cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed));
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatrixLayoutInit(&weights, CUDA_R_16BF, inputs, outputs, gemm.inputs);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatrixLayoutInit(&x, CUDA_R_16BF, inputs, columns, gemm.inputs);
    }
    if (status == CUBLAS_STATUS_SUCCESS) {
      status = cublasLtMatrixLayoutInit(&kv, CUDA_R_16BF, outputs, columns, gemm.outputs);
    }
    return FromCublas(status);
  }
};

cudaError_t Run(const Gemm& gemm, const cublasLtMatmulAlgo_t& algorithm, const Bf16* x, int64_t padded, Bf16* kv,
                void* workspace, cudaStream_t stream) {
  Problem problem;
  ENGRAM_RETURN_IF_FAILED(problem.Describe(gemm, padded));
  const float one = 1, zero = 0;
  return FromCublas(cublasLtMatmul(gemm.handle, &problem.operation, &one, gemm.wkv, &problem.weights, x, &problem.x,
                                   &zero, kv, &problem.kv, kv, &problem.kv, &algorithm, workspace, kWorkspaceBytes,
                                   stream));
}

template <typename T>
T Setting(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, T unknown) {
  T value = unknown;
  size_t written = 0;
  const bool known = cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof(value), &written) ==
                         CUBLAS_STATUS_SUCCESS &&
                     written == sizeof(value);
  return known ? value : unknown;
}

// One sum per value, from its first product to its last.
bool SumsInOnePiece(const cublasLtMatmulAlgo_t& algorithm) {
  constexpr auto kUnknown = std::numeric_limits<uint32_t>::max();
  const auto split = Setting<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, -1);
  const auto reduction = Setting<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, kUnknown);
  return (split == 0 || split == 1) && reduction == CUBLASLT_REDUCTION_SCHEME_NONE;
}

bool Takes(const Gemm& gemm, const cublasLtMatmulAlgo_t& algorithm, int64_t padded) {
  Problem problem;
  cublasLtMatmulHeuristicResult_t result = {};
  return problem.Describe(gemm, padded) == cudaSuccess &&
         cublasLtMatmulAlgoCheck(gemm.handle, &problem.operation, &problem.weights, &problem.x, &problem.kv,
                                 &problem.kv, &algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
         result.workspaceSize <= static_cast<size_t>(kWorkspaceBytes);
}

std::vector<cublasLtMatmulAlgo_t> Candidates(const Gemm& gemm, int64_t padded, cudaError_t& error) {
  cublasLtMatmulPreferenceOpaque_t preference = {};
  cublasStatus_t status = cublasLtMatmulPreferenceInit(&preference);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    if (status != CUBLAS_STATUS_SUCCESS) return;
    status = cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);
  Problem problem;
  error = status == CUBLAS_STATUS_SUCCESS ? problem.Describe(gemm, padded) : FromCublas(status);
  if (error != cudaSuccess) return {};
  cublasLtMatmulHeuristicResult_t found[kCandidates] = {};
  int count = 0;
  error = FromCublas(cublasLtMatmulAlgoGetHeuristic(gemm.handle, &problem.operation, &problem.weights, &problem.x,
                                                    &problem.kv, &problem.kv, &preference, kCandidates, found, &count));
  std::vector<cublasLtMatmulAlgo_t> candidates;
  for (int i = 0; i < count && error == cudaSuccess; ++i) {
    const cublasLtMatmulAlgo_t& algorithm = found[i].algo;
    if (found[i].state == CUBLAS_STATUS_SUCCESS && SumsInOnePiece(algorithm) && Takes(gemm, algorithm, kGemmTokens) &&
        Takes(gemm, algorithm, PaddedTokens(gemm.most_tokens))) {
      candidates.push_back(algorithm);
    }
  }
  return candidates;
}

// Where candidates are tried: x and kv of `tokens`, all on the calling thread's device.
class Trial {
 public:
  explicit Trial(const Gemm& gemm) : gemm_(gemm), tokens_(PaddedTokens(std::min(gemm.most_tokens, kTunedTokens[1]))) {}
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  ~Trial() {
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    for (void* memory : {x_, kv_, workspace_}) cudaFree(memory);
    for (cudaEvent_t event : {begin_, end_}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  cudaError_t Prepare() {
    const int64_t values = tokens_ * gemm_.inputs;
    ENGRAM_RETURN_IF_FAILED(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ENGRAM_RETURN_IF_FAILED(cudaEventCreateWithFlags(&begin_, cudaEventBlockingSync));
    ENGRAM_RETURN_IF_FAILED(cudaEventCreateWithFlags(&end_, cudaEventBlockingSync));
    ENGRAM_RETURN_IF_FAILED(cudaMalloc(&x_, static_cast<size_t>(values * 2)));
    ENGRAM_RETURN_IF_FAILED(cudaMalloc(&kv_, static_cast<size_t>(tokens_ * gemm_.outputs * 2)));
    ENGRAM_RETURN_IF_FAILED(cudaMalloc(&workspace_, static_cast<size_t>(kWorkspaceBytes)));
    // Of either sign with random mantissas and exponents around 1, so that sums in another order differ.
    std::vector<Bf16> x(static_cast<size_t>(values));
    uint64_t state = 0x9E3779B97F4A7C15;
    for (Bf16& value : x) {
      state = state * 6364136223846793005 + 1442695040888963407;
      value = static_cast<Bf16>((state >> 63 << 15) | ((124 + (state >> 40 & 3)) << 7) | (state >> 33 & 127));
    }
    return cudaMemcpy(x_, x.data(), x.size() * 2, cudaMemcpyHostToDevice);
  }

  // The least of some runs, after one that is not timed.
  cudaError_t Time(const cublasLtMatmulAlgo_t& algorithm, int64_t tokens, float& milliseconds) {
    milliseconds = std::numeric_limits<float>::infinity();
    for (int run = 0; run <= kTimedRuns; ++run) {
      ENGRAM_RETURN_IF_FAILED(cudaEventRecord(begin_, stream_));
      ENGRAM_RETURN_IF_FAILED(Launch(algorithm, 0, std::min(tokens, tokens_)));
      ENGRAM_RETURN_IF_FAILED(cudaEventRecord(end_, stream_));
      ENGRAM_RETURN_IF_FAILED(cudaEventSynchronize(end_));
      float elapsed = 0;
      ENGRAM_RETURN_IF_FAILED(cudaEventElapsedTime(&elapsed, begin_, end_));
      if (run > 0) milliseconds = std::min(milliseconds, elapsed);
    }
    return cudaSuccess;
  }

  // Are the first and the last tokens the same bits alone as among all, and in calls of lengths between?
  cudaError_t SameBits(const cublasLtMatmulAlgo_t& algorithm, bool& same) {
    same = true;
    const int64_t last = tokens_ - kGemmTokens;
    std::vector<Bf16> first_bits, last_bits, bits;
    ENGRAM_RETURN_IF_FAILED(Launch(algorithm, 0, tokens_));
    ENGRAM_RETURN_IF_FAILED(Read(0, first_bits));
    ENGRAM_RETURN_IF_FAILED(Read(last, last_bits));
    for (const int64_t tokens : {kGemmTokens, 2 * kGemmTokens, 5 * kGemmTokens, kTunedTokens[0], tokens_ / 2}) {
      const int64_t padded = PaddedTokens(tokens);
      if (padded > tokens_ || padded == 0) continue;
      ENGRAM_RETURN_IF_FAILED(Launch(algorithm, 0, padded));
      ENGRAM_RETURN_IF_FAILED(Read(0, bits));
      same = same && bits == first_bits;
      ENGRAM_RETURN_IF_FAILED(Launch(algorithm, tokens_ - padded, padded));
      ENGRAM_RETURN_IF_FAILED(Read(padded - kGemmTokens, bits));
      same = same && bits == last_bits;
    }
    return cudaSuccess;
  }

 private:
  cudaError_t Launch(const cublasLtMatmulAlgo_t& algorithm, int64_t first, int64_t tokens) {
    return Run(gemm_, algorithm, static_cast<const Bf16*>(x_) + first * gemm_.inputs, tokens, static_cast<Bf16*>(kv_),
               workspace_, stream_);
  }

  cudaError_t Read(int64_t token, std::vector<Bf16>& bits) {
    bits.resize(static_cast<size_t>(kGemmTokens * gemm_.outputs));
    ENGRAM_RETURN_IF_FAILED(cudaMemcpyAsync(bits.data(), static_cast<const Bf16*>(kv_) + token * gemm_.outputs,
                                            bits.size() * 2, cudaMemcpyDeviceToHost, stream_));
    return cudaStreamSynchronize(stream_);
  }

  const Gemm& gemm_;
  const int64_t tokens_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  void *x_ = nullptr, *kv_ = nullptr, *workspace_ = nullptr;
};

cudaError_t Choose(const Gemm& gemm, Trial& trial, int64_t tokens, cublasLtMatmulAlgo_t& chosen) {
  tokens = PaddedTokens(std::min(tokens, gemm.most_tokens));
  cudaError_t error = cudaSuccess;
  std::vector<cublasLtMatmulAlgo_t> candidates = Candidates(gemm, tokens, error);
  ENGRAM_RETURN_IF_FAILED(error);
  std::vector<float> times(candidates.size());
  for (size_t i = 0; i < candidates.size(); ++i) {
    ENGRAM_RETURN_IF_FAILED(trial.Time(candidates[i], tokens, times[i]));
  }
  while (!candidates.empty()) {
    const float fastest = *std::min_element(times.begin(), times.end());
    const auto winner = std::find_if(times.begin(), times.end(), [&](float t) { return t <= fastest * (1 + kNoise); });
    const auto index = winner - times.begin();
    bool same = false;
    ENGRAM_RETURN_IF_FAILED(trial.SameBits(candidates[static_cast<size_t>(index)], same));
    if (same) {
      chosen = candidates[static_cast<size_t>(index)];
      return cudaSuccess;
    }
    times.erase(winner);
    candidates.erase(candidates.begin() + index);
  }
  return cudaErrorNotSupported;
}

cudaError_t Build(Gemm& gemm) {
  ENGRAM_RETURN_IF_FAILED(FromCublas(cublasLtCreate(&gemm.handle)));
  Trial trial(gemm);
  ENGRAM_RETURN_IF_FAILED(trial.Prepare());
  for (int shape = 0; shape < 2; ++shape) {
    ENGRAM_RETURN_IF_FAILED(Choose(gemm, trial, kTunedTokens[shape], gemm.algorithms[shape]));
  }
  return cudaSuccess;
}

// "66.t20.s36.w0.o0.i0.c2": the algorithm, then its tile, stages, swizzle, custom option, inner and cluster shape.
std::string Configuration(const cublasLtMatmulAlgo_t& algorithm) {
  const auto wide = [&](cublasLtMatmulAlgoConfigAttributes_t attribute) {
    return std::to_string(Setting<uint32_t>(algorithm, attribute, 0));
  };
  const auto narrow = [&](cublasLtMatmulAlgoConfigAttributes_t attribute) {
    return std::to_string(Setting<uint16_t>(algorithm, attribute, 0));
  };
  return std::to_string(Setting<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_ID, -1)) + ".t" +
         wide(CUBLASLT_ALGO_CONFIG_TILE_ID) + ".s" + wide(CUBLASLT_ALGO_CONFIG_STAGES_ID) + ".w" +
         wide(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING) + ".o" + wide(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION) + ".i" +
         narrow(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID) + ".c" + narrow(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
}

// Cut where it has no room, and always ended by a zero.
template <size_t kSize>
void Write(const std::string& text, char (&to)[kSize]) {
  const size_t length = std::min(text.size(), kSize - 1);
  std::memcpy(to, text.data(), length);
  to[length] = 0;
}

bool Aligned(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % kAlignment == 0; }

}  // namespace

cudaError_t CreateGemm(const Bf16* wkv, int64_t outputs, int64_t inputs, int64_t most_tokens, Gemm** gemm) {
  // Sizes that cuBLASLt counts in 32 bits.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kGemmTokens;
  if (wkv == nullptr || !Aligned(wkv) || outputs < 1 || outputs > kMost || inputs < 1 || inputs > kMost ||
      most_tokens < 1 || most_tokens > kMost) {
    return cudaErrorInvalidValue;
  }
  try {
    auto built = std::make_unique<Gemm>();
    built->wkv = wkv;
    built->outputs = outputs;
    built->inputs = inputs;
    built->most_tokens = most_tokens;
    ENGRAM_RETURN_IF_FAILED(Build(*built));
    *gemm = built.release();
    return cudaSuccess;
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
}

cudaError_t DestroyGemm(Gemm* gemm) {
  delete gemm;
  return cudaSuccess;
}

cudaError_t DescribeGemm(const Gemm& gemm, GemmInfo& info) {
  std::string library = "cublasLt";
  for (const libraryPropertyType which : {MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL}) {
    int part = 0;
    ENGRAM_RETURN_IF_FAILED(FromCublas(cublasLtGetProperty(which, &part)));
    library += which == MAJOR_VERSION ? '-' : '.';
    library += std::to_string(part);
  }
  info = {};
  Write(library, info.library);
  for (int shape = 0; shape < 2; ++shape) Write(Configuration(gemm.algorithms[shape]), info.algorithms[shape]);
  return cudaSuccess;
}

int64_t GemmWorkspaceBytes() { return kWorkspaceBytes; }

int64_t PaddedTokens(int64_t tokens) { return (tokens + kGemmTokens - 1) / kGemmTokens * kGemmTokens; }

cudaError_t RunGemm(const Gemm& gemm, GemmClass shape, const Bf16* x, int64_t tokens, Bf16* kv, void* workspace,
                    cudaStream_t stream) {
  const auto index = static_cast<int32_t>(shape);
  if (index < 0 || index > 1 || tokens < 0 || tokens > gemm.most_tokens || !Aligned(x) || !Aligned(kv)) {
    return cudaErrorInvalidValue;
  }
  if (tokens == 0) return cudaSuccess;
  return Run(gemm, gemm.algorithms[index], x, PaddedTokens(tokens), kv, workspace, stream);
}

#undef ENGRAM_RETURN_IF_FAILED

}  // namespace engram::kernels::cuda
