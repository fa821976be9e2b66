// The bench's own kernels: one that does nothing, and one that reads.
#include "kernels/cuda/device.cuh"
#include "tests/gpu/bench.h"

namespace engram::gpu {
namespace {

namespace cuda = kernels::cuda;

constexpr int kThreads = 512;
constexpr int kBlocks = 4;  // of a multiprocessor: all its threads
constexpr int kAhead = 8;   // 16-byte reads of a thread under way; 2048 threads of 8 are 256 KB

__global__ void NothingKernel() {}

// Reads `count` times 16 bytes. Writes only if their sum is one that it hardly ever is, so that no read is left out.
__global__ void __launch_bounds__(kThreads) ReadKernel(const uint4* from, int64_t count, uint32_t* rarely) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  uint32_t sum = 0;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + (kAhead - 1) * step < count; i += kAhead * step) {
    uint4 words[kAhead];
    ENGRAM_UNROLL
    for (int ahead = 0; ahead < kAhead; ++ahead) words[ahead] = cuda::LoadOnce(from + i + ahead * step);
    ENGRAM_UNROLL
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      sum += words[ahead].x ^ words[ahead].y ^ words[ahead].z ^ words[ahead].w;
    }
  }
  for (; i < count; i += step) sum += cuda::LoadOnce(from + i).x;
  if (sum == 0x9E3779B9u) *rarely = sum;
}

}  // namespace

void LaunchNothing(const Device& device) {
  Must(cuda::Launch(&NothingKernel, 1, 1, 0, device.stream()), "launching nothing");
}

void LaunchRead(const Device& device, const void* memory, int64_t bytes) {
  const int blocks = kBlocks * device.multiprocessors();
  // Where it writes is what it reads.
  auto* const from = static_cast<const uint4*>(memory);
  auto* const rarely = static_cast<uint32_t*>(const_cast<void*>(memory));
  Must(cuda::Launch(&ReadKernel, blocks, kThreads, 0, device.stream(), from, bytes / 16, rarely), "launching a read");
}

}  // namespace engram::gpu
