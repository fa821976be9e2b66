#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

constexpr unsigned kAll = ~0u;

cudaLaunchConfig_t Config(dim3 grid, dim3 block, size_t dynamic_bytes = 0) {
  cudaLaunchConfig_t config;
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = dynamic_bytes;
  return config;
}

template <class... Params, class... Args>
cudaError_t Launch(const cudaLaunchConfig_t& config, void (*kernel)(Params...), Args... args) {
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// A pool of ThreadSanitizer's threads for a block of 1024 takes seconds to make.
std::vector<int> BlockSizes() {
  if (std::strcmp(simt::Flavour(), "tsan") == 0) return {1, 31, 32, 33, 65, 128};
  return {1, 2, 31, 32, 33, 63, 64, 65, 127, 256, 500, 1023, 1024};
}

// A value goes round the block, one place a barrier.
__global__ void Rotate(int rounds, int* out) {
  const int t = threadIdx.x, n = blockDim.x;
  int* values = simt::Shared<int, 0>(n);
  values[t] = t;
  for (int round = 0; round < rounds; ++round) {
    __syncthreads();
    const int next = values[(t + 1) % n];
    __syncthreads();
    values[t] = next;
  }
  out[blockIdx.x * n + t] = values[t];
}

TEST(Executor, BarriersHoldBlocksOfEverySize) {
  simt::ForEachOrder([] {
    for (const int threads : BlockSizes()) {
      std::vector<int> out(2 * threads, -1);
      ASSERT_EQ(Launch(Config(2, threads), Rotate, 5, out.data()), cudaSuccess);
      for (int i = 0; i < 2 * threads; ++i) ASSERT_EQ(out[i], (i % threads + 5) % threads) << threads;
    }
  });
}

TEST(Executor, BothWaysToSwitchGiveTheSame) {
  for (const simt::Switch how : {simt::Switch::kUcontext, simt::Switch::kAssembly}) {
    simt::SetSwitch(how);
    simt::ForEachOrder([] {
      std::vector<int> out(2 * 96, -1);
      ASSERT_EQ(Launch(Config(2, 96), Rotate, 3, out.data()), cudaSuccess);
      for (int i = 0; i < 2 * 96; ++i) ASSERT_EQ(out[i], (i % 96 + 3) % 96);
    });
  }
}

// Threads that leave early are not waited for.
__global__ void LeaveEarly(int* out) {
  const int t = threadIdx.x;
  for (int round = 0; round < t % 4; ++round) __syncthreads();
  out[t] = t % 4;
}

TEST(Executor, BarriersDoNotWaitForThreadsThatHaveExited) {
  simt::ForEachOrder([] {
    std::vector<int> out(70, -1);
    ASSERT_EQ(Launch(Config(1, 70), LeaveEarly, out.data()), cudaSuccess);
    for (int t = 0; t < 70; ++t) EXPECT_EQ(out[t], t % 4);
  });
}

// Registers of both kinds and the stack survive a switch; large frames fit.
__global__ void KeepState(double* out) {
  double values[256];
  for (int i = 0; i < 256; ++i) values[i] = std::sqrt(threadIdx.x * 256.0 + i);
  double sum = 0;
  for (int i = 0; i < 256; ++i) {
    if (i % 64 == 0) __syncthreads();
    sum += values[i];
  }
  out[threadIdx.x] = sum;
}

TEST(Executor, AThreadKeepsItsStateAcrossSwitches) {
  simt::ForEachOrder([] {
    std::vector<double> out(40);
    ASSERT_EQ(Launch(Config(1, 40), KeepState, out.data()), cudaSuccess);
    for (int t = 0; t < 40; ++t) {
      double sum = 0;
      for (int i = 0; i < 256; ++i) sum += std::sqrt(t * 256.0 + i);
      EXPECT_EQ(out[t], sum);
    }
  });
}

__global__ void Indices(dim3* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  __syncthreads();
  out[block * 24 + thread] =
      dim3(blockIdx.x * 100 + threadIdx.x, blockIdx.y * 100 + threadIdx.y, blockIdx.z * 100 + threadIdx.z);
}

TEST(Executor, IndicesRunInThreeDimensions) {
  simt::ForEachOrder([] {
    std::vector<dim3> out(3 * 2 * 2 * 24);
    ASSERT_EQ(Launch(Config(dim3(3, 2, 2), dim3(4, 3, 2)), Indices, out.data()), cudaSuccess);
    for (unsigned i = 0; i < out.size(); ++i) {
      const unsigned block = i / 24, thread = i % 24;
      EXPECT_EQ(out[i].x, block % 3 * 100 + thread % 4);
      EXPECT_EQ(out[i].y, block / 3 % 2 * 100 + thread / 4 % 3);
      EXPECT_EQ(out[i].z, block / 6 * 100 + thread / 12);
    }
  });
}

// out[t]: 4 results of a shuffle of `width` by `by`.
__global__ void Shuffles(int width, int by, int* out) {
  const int t = threadIdx.x, value = 1000 + t;
  out[4 * t] = __shfl_sync(kAll, value, by, width);
  out[4 * t + 1] = __shfl_xor_sync(kAll, value, by, width);
  out[4 * t + 2] = __shfl_down_sync(kAll, value, by, width);
  out[4 * t + 3] = __shfl_up_sync(kAll, value, by, width);
}

TEST(Executor, ShufflesOfEveryWidthAndLane) {
  simt::ForEachOrder([] {
    for (int width = 1; width <= 32; width *= 2) {
      for (int by = 0; by < 32; ++by) {
        std::vector<int> out(4 * 32);
        ASSERT_EQ(Launch(Config(1, 32), Shuffles, width, by, out.data()), cudaSuccess);
        for (int t = 0; t < 32; ++t) {
          const int first = t / width * width, end = first + width;
          ASSERT_EQ(out[4 * t], 1000 + first + by % width);
          // A lane of an earlier part may be read, one of a later part not: as CUDA says of __shfl_xor_sync.
          ASSERT_EQ(out[4 * t + 1], 1000 + ((t ^ by) < end ? t ^ by : t));
          ASSERT_EQ(out[4 * t + 2], 1000 + (t + by < end ? t + by : t));
          ASSERT_EQ(out[4 * t + 3], 1000 + (t - by >= first ? t - by : t));
        }
      }
    }
  });
}

struct Wide {
  int64_t values[5];
};

// Groups of lanes that meet in their own collectives, with types of several sizes.
__global__ void Groups(unsigned mask, int64_t* out) {
  const int lane = threadIdx.x % 32;
  const unsigned mine = mask >> lane & 1 ? mask : ~mask;
  const auto all = simt::AllLanes(mine, Wide{{lane, 1, 2, 3, 4}});
  int64_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += all[i].values[0] * all[i].values[1];
  for (int i = 0; i < 3; ++i) __syncwarp(mine);
  const int ballot = __popc(__ballot_sync(mine, lane % 2));
  out[threadIdx.x] = sum * 100 + ballot;
}

TEST(Executor, CollectivesOfPartsOfAWarp) {
  simt::ForEachOrder([] {
    for (const unsigned mask : {0x0000FFFFu, 0x55555555u, 1u, 0xF00F00F0u}) {
      std::vector<int64_t> out(64);
      ASSERT_EQ(Launch(Config(1, 64), Groups, mask, out.data()), cudaSuccess);
      for (int t = 0; t < 64; ++t) {
        const unsigned mine = mask >> t % 32 & 1 ? mask : ~mask;
        int64_t sum = 0;
        for (int i = 0; i < 32; ++i) sum += mine >> i & 1 ? i : 0;
        EXPECT_EQ(out[t], sum * 100 + __builtin_popcount(mine & 0xAAAAAAAAu));
      }
    }
  });
}

__global__ void Votes(int* out) {
  const int t = threadIdx.x;
  const unsigned mask = t < 32 ? kAll : (1u << (blockDim.x - 32)) - 1;  // the last warp has but some lanes
  out[t] = __any_sync(mask, t == 3) + 2 * __all_sync(mask, t != 3) + 4 * __popc(__ballot_sync(mask, t % 3 == 0));
}

TEST(Executor, VotesAndPartialWarps) {
  simt::ForEachOrder([] {
    std::vector<int> out(42);
    ASSERT_EQ(Launch(Config(1, 42), Votes, out.data()), cudaSuccess);
    EXPECT_EQ(out[0], 1 + 4 * 11);
    EXPECT_EQ(out[41], 2 + 4 * 3);  // 33, 36, 39
  });
}

__global__ void Atomics(int* i, unsigned* u, unsigned long long* l, float* f) {
  atomicAdd(i, -1);
  atomicAdd(u, 1u);
  atomicAdd(l, 1ull << 33);
  atomicAdd(f, 0.5f);
}

TEST(Executor, AtomicsOfAllBlocks) {
  simt::ForEachOrder([] {
    int i = 0;
    unsigned u = 0;
    unsigned long long l = 0;
    float f = 0;
    ASSERT_EQ(Launch(Config(3, 50), Atomics, &i, &u, &l, &f), cudaSuccess);
    EXPECT_EQ(i, -150);
    EXPECT_EQ(u, 150u);
    EXPECT_EQ(l, 150ull << 33);
    EXPECT_EQ(f, 75.0f);
  });
}

// Two static objects and the dynamic one are apart, poisoned, aligned and the block's own.
__global__ void SharedObjects(int* out) {
  const unsigned t = threadIdx.x;
  unsigned* first = simt::Shared<unsigned, 1>(blockDim.x);
  float* second = simt::Shared<float, 2>(blockDim.x);
  char* dynamic = simt::DynamicShared();
  const bool poisoned = first[t] == ~0u && std::isnan(second[t]) && dynamic[t] == '\xFF';
  const bool aligned = reinterpret_cast<uintptr_t>(first) % 128 == 0 && reinterpret_cast<uintptr_t>(dynamic) % 128 == 0;
  __syncthreads();
  first[t] = t;
  second[t] = static_cast<float>(t);
  dynamic[t] = static_cast<char>(t);
  __syncthreads();
  const unsigned other = blockDim.x - 1 - t;
  out[blockIdx.x * blockDim.x + t] = poisoned && aligned && first[other] == other &&
                                     second[other] == static_cast<float>(other) &&
                                     dynamic[other] == static_cast<char>(other);
}

TEST(Executor, StaticAndDynamicSharedMemory) {
  simt::ForEachOrder([] {
    std::vector<int> out(3 * 48);
    ASSERT_EQ(Launch(Config(3, 48, 48), SharedObjects, out.data()), cudaSuccess);
    EXPECT_EQ(out, std::vector<int>(3 * 48, 1));
  });
}

// cp.async lands at the wait and reads its source there; `probe` sees what was there before.
__global__ void CopyLater(int* source, int* probe, int* out) {
  int* values = simt::Shared<int, 0>(8);
  simt::CopyAsync(values, source, 4);
  simt::CommitCopies();
  simt::CopyAsync(values + 4, source, 16, 8);
  simt::CommitCopies();
  probe[0] = values[0];
  source[0] = 11;
  simt::WaitCopies(1);
  probe[1] = values[0];
  probe[2] = values[4];
  simt::WaitCopies(0);
  for (int i = 0; i < 4; ++i) out[i] = values[4 + i];
}

TEST(Executor, CopiesLandAtTheWait) {
  alignas(16) int source[4] = {1, 2, 3, 4};
  int probe[3] = {}, out[4] = {};
  ASSERT_EQ(Launch(Config(1, 1), CopyLater, source, probe, out), cudaSuccess);
  EXPECT_EQ(probe[0], -1);
  EXPECT_EQ(probe[1], 11);
  EXPECT_EQ(probe[2], -1);
  EXPECT_EQ(out[0], 11);
  EXPECT_EQ(out[1], 2);
  EXPECT_EQ(out[2], 0);
  EXPECT_EQ(out[3], 0);
}

__global__ void Nothing() {}
__global__ void NothingLarge() {}
__global__ void StaticKilobytes(int count) { simt::Shared<char, 0>(static_cast<size_t>(count) << 10)[0] = 0; }

TEST(Executor, LimitsOfALaunch) {
  EXPECT_EQ(Launch(Config(1, 0), Nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Config(0, 1), Nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Config(1, 1025), Nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Config(1, dim3(1, 1, 65)), Nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Config(dim3(1, 65536), 1), Nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Config(dim3(1, 1, 65536), 1), Nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Config(1u << 31, 1), Nothing), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Launch(Config(1000, 1), Nothing), cudaSuccess);
  EXPECT_EQ(Launch(Config(1, 1, 48 << 10), Nothing), cudaSuccess);
  EXPECT_EQ(Launch(Config(1, 1, (48 << 10) + 1), NothingLarge), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(NothingLarge, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(NothingLarge, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10), cudaSuccess);
  EXPECT_EQ(Launch(Config(1, 1, 100 << 10), NothingLarge), cudaSuccess);
  EXPECT_EQ(Launch(Config(1, 1, (100 << 10) + 1), NothingLarge), cudaErrorInvalidValue);
  EXPECT_EQ(Launch(Config(1, 1, 8 << 10), StaticKilobytes, 40), cudaSuccess);
  cudaGetLastError();
}

TEST(ExecutorDeathTest, StaticSharedMemoryCountsToo) {
  EXPECT_EXIT(Launch(Config(1, 1, 9 << 10), StaticKilobytes, 40), testing::ExitedWithCode(simt::kFailureExit),
              "40960 bytes of shared memory, with the 9216 that the block has more than its limit of 49152");
}

}  // namespace
