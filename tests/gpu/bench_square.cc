// cuBLASLt's own large square, called directly: free to choose what the module may not, such as sums in several pieces.
#include <cublasLt.h>

#include <limits>

#include "tests/gpu/bench.h"

namespace engram::gpu {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;
constexpr int kCandidates = 4;

void MustDo(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(what) + ": cuBLAS status " + std::to_string(status));
}

}  // namespace

double SquareSeconds(const Device& device, const Stopwatch& stopwatch, const Guarded<kernels::Bf16>& values,
                     int64_t size) {
  cublasLtHandle_t handle = nullptr;
  MustDo(cublasLtCreate(&handle), "cublasLtCreate");
  cublasLtMatmulDescOpaque_t operation = {};
  cublasLtMatrixLayoutOpaque_t layout = {};
  cublasLtMatmulPreferenceOpaque_t preference = {};
  const cublasOperation_t transposed = CUBLAS_OP_T;
  const auto side = static_cast<uint64_t>(size);
  const auto workspace_bytes = static_cast<uint64_t>(kWorkspaceBytes);
  MustDo(cublasLtMatmulDescInit(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
  MustDo(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)),
         "cublasLtMatmulDescSetAttribute");
  MustDo(cublasLtMatrixLayoutInit(&layout, CUDA_R_16BF, side, side, size), "cublasLtMatrixLayoutInit");
  MustDo(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
  MustDo(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                              sizeof(workspace_bytes)),
         "cublasLtMatmulPreferenceSetAttribute");
  cublasLtMatmulHeuristicResult_t found[kCandidates] = {};
  int count = 0;
  MustDo(cublasLtMatmulAlgoGetHeuristic(handle, &operation, &layout, &layout, &layout, &layout, &preference,
                                        kCandidates, found, &count),
         "cublasLtMatmulAlgoGetHeuristic");
  const Guarded<uint8_t> workspace(device, kWorkspaceBytes);
  const Guarded<kernels::Bf16> product(device, size * size);
  const float one = 1, zero = 0;
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < count; ++i) {
    if (found[i].state != CUBLAS_STATUS_SUCCESS) continue;
    best = std::min(best, stopwatch.OneByOne(size * size * 6, [&](int64_t) {
      MustDo(cublasLtMatmul(handle, &operation, &one, values.data(), &layout, values.data() + size * size, &layout,
                            &zero, product.data(), &layout, product.data(), &layout, &found[i].algo, workspace.data(),
                            static_cast<size_t>(kWorkspaceBytes), device.stream()),
             "cublasLtMatmul");
    }));
  }
  cublasLtDestroy(handle);
  return best;
}

}  // namespace engram::gpu
