// What a kernel says in other words to nvcc than to a host compiler: shared memory and PTX, each with a branch for
// both.
//
// Kernels include this and nothing else of CUDA, so that the executor in tests/simt, which brings a <cuda_runtime.h> of
// its own, runs their very source. Host branches are the instruction's documented meaning, slowly.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/kernels.h"

// ENGRAM_SHARED(float, name, 128): static shared memory, a pointer or an array. ENGRAM_DYNAMIC_SHARED(name): the
// launch's dynamic shared memory as bytes, aligned to 16.
#ifdef __CUDACC__
#define ENGRAM_SHARED(type, name, count) __shared__ type name[count]
#define ENGRAM_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define ENGRAM_UNROLL _Pragma("unroll")
#else
#include <cmath>

#include "kernels/scalar.h"
#define ENGRAM_SHARED(type, name, count) type* const name = ::simt::Shared<type, __COUNTER__>(count)
#define ENGRAM_DYNAMIC_SHARED(name) \
  unsigned char* const name = reinterpret_cast<unsigned char*>(::simt::DynamicShared())
#define ENGRAM_UNROLL
#endif

namespace engram::kernels::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// prmt.b32, default mode: byte i of the result is byte (selector >> 4i & 7) of the eight bytes of `low` and `high`.
__device__ __forceinline__ uint32_t Permute(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDACC__
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7))) & 0xFF;
    if ((nibble & 8) != 0) byte = (byte & 0x80) != 0 ? 0xFF : 0;  // its sign, eight times
    result |= byte << (8 * i);
  }
  return result;
#endif
}

// Two values rounded to bf16, nearest even, `low` in the low half. A NaN stays one.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
#ifdef __CUDACC__
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return static_cast<uint32_t>(Bf16FromF32(high)) << 16 | Bf16FromF32(low);
#endif
}

// The f16 in the low 16 bits, exactly.
__device__ __forceinline__ float F32FromHalf(uint32_t bits) {
#ifdef __CUDACC__
  float result;
  asm("{ .reg .b16 half, rest; mov.b32 {half, rest}, %1; cvt.f32.f16 %0, half; }" : "=f"(result) : "r"(bits));
  return result;
#else
  return F32FromF16(static_cast<uint16_t>(bits));
#endif
}

// 16 bytes that are read once: they take no room in L1. `from` is aligned to 16 and not written while the kernel runs.
__device__ __forceinline__ uint4 LoadOnce(const uint4* from) {
#ifdef __CUDACC__
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
#else
  return *from;
#endif
}

__device__ __forceinline__ uint2 LoadOnce(const uint2* from) {
#ifdef __CUDACC__
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
  return value;
#else
  return *from;
#endif
}

// cp.async: 16 bytes from global to shared memory, in the background, zeros instead of them where `valid` is false
// (`from` is not read then). What was started since the last CommitCopies is one group; WaitCopies<n> waits until at
// most n of this thread's groups are under way. Other threads see the bytes after a barrier behind the wait.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* from, bool valid) {
#ifdef __CUDACC__
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  ::simt::CopyAsync(shared, from, 16, valid ? 16 : 0);
#endif
}

__device__ __forceinline__ void CommitCopies() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  ::simt::CommitCopies();
#endif
}

template <int kMostLeft>
__device__ __forceinline__ void WaitCopies() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(kMostLeft) : "memory");
#else
  ::simt::WaitCopies(kMostLeft);
#endif
}

// sum += a * b of one warp, mma.m16n8k16 with bf16 products and f32 sums. With group = lane / 4, quad = lane % 4, a
// lane holds of a (16 x 16): rows group and group + 8 (a[0], a[1]) at columns 2 quad, 2 quad + 1, and the same rows
// (a[2], a[3]) 8 columns on; of b (16 x 8): column group at rows 2 quad, 2 quad + 1 (b[0]) and 8 rows on (b[1]); of the
// sum (16 x 8): row group at columns 2 quad, 2 quad + 1 (sum[0], sum[1]), row group + 8 likewise (sum[2], sum[3]).
__device__ __forceinline__ void Mma(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  struct Operands {
    uint32_t a[4], b[2];
  };
  const auto lanes = ::simt::AllLanes(kAllLanes, Operands{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const unsigned lane = threadIdx.x % kWarp;
  const auto half = [](uint32_t pair, int e) { return double{F32FromBf16(static_cast<Bf16>(pair >> (16 * e)))}; };
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = i / 2;  // of group and group + 8
    const unsigned column = 2 * (lane % 4) + i % 2;
    double total = 0;
    for (unsigned quad = 0; quad < 4; ++quad) {
      for (unsigned far = 0; far < 2; ++far) {
        const uint32_t left = lanes[lane / 4 * 4 + quad].a[row + 2 * far];
        const uint32_t right = lanes[column * 4 + quad].b[far];
        total += half(left, 0) * half(right, 0) + half(left, 1) * half(right, 1);
      }
    }
    sum[i] = static_cast<float>(double{sum[i]} + total);
  }
#endif
}

// The launch of `kernel` over a one-dimensional grid.
template <typename... Params, typename... Args>
cudaError_t Launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
                   Args... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks < 0 || blocks > INT32_MAX) return cudaErrorInvalidValue;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace engram::kernels::cuda
