#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace {

__global__ void Sum(const int* in, int* out) {
  int* all = simt::Shared<int, 0>(blockDim.x);
  all[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  int sum = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) sum += all[i];
  out[threadIdx.x] = sum + __shfl_xor_sync(~0u, 0, 1);
}

TEST(Executor, Sums) {
  simt::ForEachOrder([] {
    std::vector<int> in(64, 2), out(64);
    cudaLaunchConfig_t config;
    config.gridDim = 1;
    config.blockDim = 64;
    ASSERT_EQ(cudaLaunchKernelEx(&config, Sum, in.data(), out.data()), cudaSuccess);
    EXPECT_EQ(out, std::vector<int>(64, 128));
  });
}

}  // namespace
