// The words of CUDA device code, for a host compiler and the executor. __shared__ is missing on purpose: what it
// declares would not be one object per block. Roundings are those of the device; __frsqrt_rn rounds twice, through
// double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/simt/executor.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct dim3 {
  constexpr dim3(unsigned dx = 1, unsigned dy = 1, unsigned dz = 1) : x(dx), y(dy), z(dz) {}
  unsigned x, y, z;
};

inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

// Of the thread that runs: set at every change of fiber.
extern thread_local constinit uint3 threadIdx;
extern thread_local constinit uint3 blockIdx;
extern thread_local constinit dim3 blockDim;
extern thread_local constinit dim3 gridDim;
inline constexpr int warpSize = 32;

inline void __syncthreads(simt::Where where = simt::Where::current()) { simt::SyncThreads(where); }
inline void __syncwarp(unsigned mask = ~0u, simt::Where where = simt::Where::current()) { simt::SyncWarp(mask, where); }
inline void __threadfence() { simt::Fence(); }
inline void __threadfence_block() { simt::Fence(); }

// The lane to read from, or this one where that lies outside this one's part of `width` lanes.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, simt::Where where = simt::Where::current()) {
  const int first = simt::Lane() & -width;
  return simt::AllLanes(mask, value, where)[first + (source & (width - 1))];
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, simt::Where where = simt::Where::current()) {
  const int from = simt::Lane() ^ bits, end = (simt::Lane() & -width) + width;
  const auto all = simt::AllLanes(mask, value, where);
  return from < end ? all[from] : value;
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, simt::Where where = simt::Where::current()) {
  const unsigned from = simt::Lane() + by, end = (simt::Lane() & -width) + width;
  const auto all = simt::AllLanes(mask, value, where);
  return from < end ? all[from] : value;
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, simt::Where where = simt::Where::current()) {
  const int from = simt::Lane() - static_cast<int>(by), first = simt::Lane() & -width;
  const auto all = simt::AllLanes(mask, value, where);
  return from >= first ? all[from] : value;
}
inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  const auto all = simt::AllLanes(mask, predicate, where);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= (all[lane] != 0 ? 1u : 0u) << lane;
  return ballot & mask;
}
inline int __any_sync(unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simt::Where where = simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) == mask;
}

// Atomic and relaxed, as on the device. Integers of CUDA's own types alone.
inline int atomicAdd(int* at, int by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* at, unsigned by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long by) {
  return __atomic_fetch_add(at, by, __ATOMIC_RELAXED);
}
inline float atomicAdd(float* at, float by) {
  float old, sum;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  do {
    sum = old + by;
  } while (!__atomic_compare_exchange(at, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
void __stcs(T* at, T value) {
  *at = value;
}
template <class T>
void __stcg(T* at, T value) {
  *at = value;
}

[[noreturn]] inline void __trap() { simt::Fail("__trap()"); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }

template <class To, class From>
To SimtBits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float a) { return SimtBits<unsigned>(a); }
inline int __float_as_int(float a) { return SimtBits<int>(a); }
inline float __uint_as_float(unsigned a) { return SimtBits<float>(a); }
inline float __int_as_float(int a) { return SimtBits<float>(a); }
inline long long __double_as_longlong(double a) { return SimtBits<long long>(a); }
inline double __longlong_as_double(long long a) { return SimtBits<double>(a); }

inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz(static_cast<unsigned>(a)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline int __ffs(int a) { return __builtin_ffs(a); }

// CUDA has these in the global namespace.
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
