// The bench's large square without cuBLASLt, by the GEMM that stands in for it.
#include "tests/gpu/bench.h"

namespace engram::gpu {

double SquareSeconds(const Device& device, const Stopwatch& stopwatch, const Guarded<kernels::Bf16>& values,
                     int64_t size) {
  const Guarded<kernels::Bf16> product(device, device.module().padded_tokens(size) * size);
  const Guarded<uint8_t> workspace(device, device.module().gemm_workspace_bytes());
  kernels::cuda::Gemm* gemm = nullptr;
  Must(device.module().create_gemm(values.data(), size, size, size, &gemm), "create_gemm");
  const double seconds = stopwatch.OneByOne(size * size * 6, [&](int64_t) {
    Must(device.module().run_gemm(gemm, kernels::cuda::GemmClass::kLong, values.data() + size * size, size,
                                  product.data(), workspace.data(), device.stream()),
         "run_gemm");
  });
  device.Wait();
  Must(device.module().destroy_gemm(gemm), "destroy_gemm");
  return seconds;
}

}  // namespace engram::gpu
