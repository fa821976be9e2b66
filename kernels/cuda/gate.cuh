// The gate and the gated update of the highway (docs/numerics.md, gate), one block per token and copy.
//
// Thread t takes the groups of 8 values t, t + 256, ... whatever the alignment and the type, and sums are joined in one
// fixed tree: a token's bits depend on nothing but its own values. The highway is read once, kept in shared memory
// until the gate is known, and written once.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace engram::kernels::cuda {

inline constexpr int kGateThreads = 256;
inline constexpr int kGateWarps = kGateThreads / kWarp;
inline constexpr int kGroup = 8;  // values: 16 bytes of bf16
// Of shared memory that every launch may have; a copy that is larger is read twice.
inline constexpr int64_t kMostKeptBytes = 40960;

__device__ __forceinline__ float F32FromBits16(uint32_t bits) { return __uint_as_float(bits << 16); }

// Values [0, n) of a group, n <= 8, as f32; the others are 0. `vector`: all 8 are there, at an address that is a
// multiple of 16.
__device__ __forceinline__ void LoadGroup(const float* from, int64_t n, bool vector, float (&to)[kGroup]) {
  if (vector) {
    const float4 near_half = reinterpret_cast<const float4*>(from)[0];
    const float4 far_half = reinterpret_cast<const float4*>(from)[1];
    to[0] = near_half.x, to[1] = near_half.y, to[2] = near_half.z, to[3] = near_half.w;
    to[4] = far_half.x, to[5] = far_half.y, to[6] = far_half.z, to[7] = far_half.w;
    return;
  }
  ENGRAM_UNROLL
  for (int i = 0; i < kGroup; ++i) to[i] = i < n ? from[i] : 0.0f;
}

__device__ __forceinline__ void LoadGroup(const Bf16* from, int64_t n, bool vector, float (&to)[kGroup]) {
  if (vector) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
    ENGRAM_UNROLL
    for (int i = 0; i < kGroup; ++i)
      to[i] = __uint_as_float(i % 2 == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xFFFF0000u);
    return;
  }
  ENGRAM_UNROLL
  for (int i = 0; i < kGroup; ++i) to[i] = i < n ? F32FromBits16(from[i]) : 0.0f;
}

__device__ __forceinline__ void StoreGroup(const float (&from)[kGroup], int64_t n, bool vector, float* to) {
  if (vector) {
    reinterpret_cast<float4*>(to)[0] = make_float4(from[0], from[1], from[2], from[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(from[4], from[5], from[6], from[7]);
    return;
  }
  ENGRAM_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    if (i < n) to[i] = from[i];
  }
}

__device__ __forceinline__ void StoreGroup(const float (&from)[kGroup], int64_t n, bool vector, Bf16* to) {
  if (vector) {
    *reinterpret_cast<uint4*>(to) = make_uint4(PackBf16(from[0], from[1]), PackBf16(from[2], from[3]),
                                               PackBf16(from[4], from[5]), PackBf16(from[6], from[7]));
    return;
  }
  ENGRAM_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    if (i < n) to[i] = static_cast<Bf16>(PackBf16(from[i], 0.0f));
  }
}

__device__ __forceinline__ bool IsVector(const void* pointer, int64_t bytes_apart) {
  return (reinterpret_cast<uintptr_t>(pointer) | static_cast<uintptr_t>(bytes_apart)) % 16 == 0;
}

// Σ h², Σ key², Σ h·w·key.
struct DeviceGateSums {
  double hh, kk, hwk;
};

// Lanes' sums joined by a butterfly: all lanes get the total.
__device__ __forceinline__ double JoinLanes(double sum) {
  ENGRAM_UNROLL
  for (int apart = kWarp / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
  return sum;
}

// As GateFromSums in kernels/gate_value.h, operation by operation; exp is the device's.
__device__ inline float GateOfSums(const DeviceGateSums& sums, int64_t dim, float eps) {
  const float count = static_cast<float>(dim);
  const float mean_hh = __fdiv_rn(static_cast<float>(sums.hh), count);
  const float mean_kk = __fdiv_rn(static_cast<float>(sums.kk), count);
  const float rstd = __fmul_rn(__fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean_hh, eps))),
                               __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean_kk, eps))));
  const float inverse_sqrt_dim = static_cast<float>(1.0 / sqrt(static_cast<double>(dim)));
  const float dot = __fmul_rn(__fmul_rn(static_cast<float>(sums.hwk), rstd), inverse_sqrt_dim);
  // Written as a comparison, because fmax would turn a NaN into 1e-6.
  const float magnitude = fabsf(dot) < 1e-6f ? 1e-6f : fabsf(dot);
  const double root = copysign(sqrt(static_cast<double>(magnitude)), static_cast<double>(dot));
  return static_cast<float>(1.0 / (1.0 + exp(-root)));
}

// A masked token: its bytes are copied, since h + 0·v would turn −0 into +0.
template <typename Value>
__device__ void CopyMasked(const Value* from, Value* to, int64_t dim, bool vector) {
  if (to == nullptr || to == from) return;
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kGroup; at < dim; at += kGateThreads * kGroup) {
    if (vector) {
      ENGRAM_UNROLL
      for (int i = 0; i < static_cast<int>(kGroup * sizeof(Value) / sizeof(uint4)); ++i) {
        reinterpret_cast<uint4*>(to + at)[i] = reinterpret_cast<const uint4*>(from + at)[i];
      }
    } else {
      for (int64_t i = at; i < at + kGroup && i < dim; ++i) to[i] = from[i];
    }
  }
}

// Value: float or Bf16. `keep`: dynamic shared memory holds dim floats.
template <typename Value>
__global__ void __launch_bounds__(kGateThreads) GateKernel(const float* __restrict__ qk, int copies, int64_t dim,
                                                           float eps, const GateToken* __restrict__ tokens, bool keep) {
  ENGRAM_DYNAMIC_SHARED(shared);
  ENGRAM_SHARED(double, warp_sums, 3 * kGateWarps);
  ENGRAM_SHARED(float, shared_gate, 1);
  const int64_t token_index = static_cast<int64_t>(blockIdx.x) / copies;
  const int copy = static_cast<int>(static_cast<int64_t>(blockIdx.x) % copies);
  const GateToken token = tokens[token_index];
  const Value* const h = static_cast<const Value*>(token.highway) + copy * dim;
  Value* const out = token.out == nullptr ? nullptr : static_cast<Value*>(token.out) + copy * dim;
  // Every copy begins at a multiple of 16 bytes, or none is read by vectors.
  const int64_t copy_bytes = dim * static_cast<int64_t>(sizeof(Value));
  const bool h_vector = IsVector(token.highway, copy_bytes) && dim % kGroup == 0;
  const bool out_vector = IsVector(token.out, copy_bytes) && dim % kGroup == 0;
  const bool kv_vector = IsVector(token.kv, dim * 2) && dim % kGroup == 0;
  const bool qk_vector = IsVector(qk, dim * 4) && dim % kGroup == 0;
  if (token.live == 0) {
    if (token.gates != nullptr && threadIdx.x == 0) token.gates[copy] = 0.0f;
    CopyMasked(h, out, dim, h_vector && out_vector);
    return;
  }
  float* const kept = keep ? reinterpret_cast<float*>(shared) : nullptr;
  const Bf16* const key = token.kv + copy * dim;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kGroup;

  DeviceGateSums sums = {0.0, 0.0, 0.0};
  for (int64_t at = first; at < dim; at += kGateThreads * kGroup) {
    float hs[kGroup], keys[kGroup], weights[kGroup];
    LoadGroup(h + at, dim - at, h_vector, hs);
    LoadGroup(key + at, dim - at, kv_vector, keys);
    LoadGroup(qk + copy * dim + at, dim - at, qk_vector, weights);
    if (kept != nullptr) StoreGroup(hs, dim - at, dim % kGroup == 0, kept + at);
    ENGRAM_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      // h², key² and h·w are exact in f64.
      const double hi = hs[i], ki = keys[i], wi = weights[i];
      sums.hh = fma(hi, hi, sums.hh);
      sums.kk = fma(ki, ki, sums.kk);
      sums.hwk = fma(hi * wi, ki, sums.hwk);
    }
  }
  sums = {JoinLanes(sums.hh), JoinLanes(sums.kk), JoinLanes(sums.hwk)};
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (threadIdx.x % kWarp == 0) {
    warp_sums[3 * warp] = sums.hh;
    warp_sums[3 * warp + 1] = sums.kk;
    warp_sums[3 * warp + 2] = sums.hwk;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kGateWarps; ++i) {
      sums.hh += warp_sums[3 * i];
      sums.kk += warp_sums[3 * i + 1];
      sums.hwk += warp_sums[3 * i + 2];
    }
    const float gate = GateOfSums(sums, dim, eps);
    if (token.gates != nullptr) token.gates[copy] = gate;
    shared_gate[0] = gate;
  }
  if (out == nullptr) return;
  __syncthreads();

  const float gate = shared_gate[0];
  const Bf16* const value = token.kv + copies * dim;
  for (int64_t at = first; at < dim; at += kGateThreads * kGroup) {
    float hs[kGroup], values[kGroup];
    // This thread kept these itself.
    if (kept != nullptr) {
      LoadGroup(kept + at, dim - at, dim % kGroup == 0, hs);
    } else {
      LoadGroup(h + at, dim - at, h_vector, hs);
    }
    LoadGroup(value + at, dim - at, kv_vector, values);
    ENGRAM_UNROLL
    for (int i = 0; i < kGroup; ++i) hs[i] = __fadd_rn(hs[i], __fmul_rn(gate, values[i]));  // two roundings, never one
    StoreGroup(hs, dim - at, out_vector, out + at);
  }
}

cudaError_t ApplyGate(const GateWeights& weights, const GateTokens& call, cudaStream_t stream) {
  if (weights.copies < 1 || weights.copies > kMaxCopies || weights.dim < 1 || call.count < 0)
    return cudaErrorInvalidValue;
  const int64_t kept_bytes = weights.dim * static_cast<int64_t>(sizeof(float));
  const bool keep = kept_bytes <= kMostKeptBytes;
  const auto kernel = call.type == HighwayType::kF32 ? &GateKernel<float> : &GateKernel<Bf16>;
  return Launch(kernel, call.count * weights.copies, kGateThreads, keep ? static_cast<size_t>(kept_bytes) : 0, stream,
                weights.qk, weights.copies, weights.dim, weights.eps, call.tokens, keep);
}

}  // namespace engram::kernels::cuda
