// The gate and the gated update, by vectors of kBytes.
//
// The order of the sums (docs/numerics.md, gate): 8 lanes of f64 start at +0; lane j takes the terms of i = j, j + 8,
// j + 16, … in ascending order, a term being ((h·w)·key), h·h or key·key; then lane j += lane j + 4 for j < 4, j + 2
// for j < 2, lane 0 + lane 1. The last dim mod 8 terms go to lanes 0, 1, … like all others.
//
// Why 8: one AVX-512 vector, two of AVX2, four of SSE for each of three sums. A round of 8 terms is about 14 vector
// instructions, longer than the 4 cycles that an addition takes, so more lanes would not run faster.
#pragma once

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vectors.h"
#include "kernels/gate_value.h"

namespace engram::kernels {
namespace {

constexpr int kGateLanes = 8;

ENGRAM_ALWAYS_INLINE double SumGateLanes(double lanes[kGateLanes]) {
  for (int j = 0; j < 4; ++j) lanes[j] += lanes[j + 4];
  for (int j = 0; j < 2; ++j) lanes[j] += lanes[j + 2];
  return lanes[0] + lanes[1];
}

struct GateLanes {
  double hh[kGateLanes], kk[kGateLanes], hwk[kGateLanes];
};

// The terms by vectors of kBytes.
template <int kBytes>
struct GateTerms {
  // Sums the terms of i < dim - dim mod 8 into `lanes` and returns where it stopped.
  template <typename Element>
  static ENGRAM_ALWAYS_INLINE int64_t Add(const uint8_t* h, const uint8_t* key, const float* qk, int64_t dim,
                                          GateLanes& lanes) {
    using V = Vectors<kBytes>;
    constexpr int kVectors = kGateLanes / V::kDoubles;
    typename V::Double hh[kVectors] = {};
    typename V::Double kk[kVectors] = {};
    typename V::Double hwk[kVectors] = {};
    const auto* w = reinterpret_cast<const uint8_t*>(qk);
    int64_t i = 0;
    for (; i + kGateLanes <= dim; i += kGateLanes) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = i + v * V::kDoubles;
        typename V::Double hv, kv, wv;
        Elements<kBytes, Element>::Load(h + at * static_cast<int64_t>(sizeof(Element)), hv);
        Elements<kBytes, Bf16>::Load(key + at * 2, kv);
        Elements<kBytes, float>::Load(w + at * 4, wv);
        hh[v] += hv * hv;
        kk[v] += kv * kv;
        hwk[v] += hv * wv * kv;
      }
    }
    __builtin_memcpy(lanes.hh, hh, sizeof(hh));
    __builtin_memcpy(lanes.kk, kk, sizeof(kk));
    __builtin_memcpy(lanes.hwk, hwk, sizeof(hwk));
    return i;
  }
};

template <typename Terms, int kBytes, typename Element>
ENGRAM_ALWAYS_INLINE GateSums SumGate(const uint8_t* h, const uint8_t* key, const float* qk, int64_t dim) {
  GateLanes lanes;
  int64_t i = Terms::template Add<Element>(h, key, qk, dim, lanes);
  for (int j = 0; i < dim; ++i, ++j) {
    const double hi = Elements<kBytes, Element>::LoadOne(h + i * static_cast<int64_t>(sizeof(Element)));
    const double ki = Elements<kBytes, Bf16>::LoadOne(key + i * 2);
    const double wi = qk[i];
    lanes.hh[j] += hi * hi;
    lanes.kk[j] += ki * ki;
    lanes.hwk[j] += hi * wi * ki;
  }
  GateSums sums;
  sums.hh = SumGateLanes(lanes.hh);
  sums.kk = SumGateLanes(lanes.kk);
  sums.hwk = SumGateLanes(lanes.hwk);
  return sums;
}

// out = h + g·value, both steps rounded to f32. `out` may be `h`: a vector is read before it is written.
template <int kBytes, typename Element>
ENGRAM_ALWAYS_INLINE void UpdateCopy(const uint8_t* h, const uint8_t* value, float g, int64_t dim, uint8_t* out) {
  using V = Vectors<kBytes>;
  constexpr int64_t kSize = sizeof(Element);
  int64_t i = 0;
  for (; i + V::kFloats <= dim; i += V::kFloats) {
    typename V::Float hv, vv;
    Elements<kBytes, Element>::Load(h + i * kSize, hv);
    Elements<kBytes, Bf16>::Load(value + i * 2, vv);
    const typename V::Float step = g * vv;
    Elements<kBytes, Element>::Store(hv + step, out + i * kSize);
  }
  for (; i < dim; ++i) {
    const float step = g * Elements<kBytes, Bf16>::LoadOne(value + i * 2);
    Elements<kBytes, Element>::StoreOne(Elements<kBytes, Element>::LoadOne(h + i * kSize) + step, out + i * kSize);
  }
}

template <typename Terms, int kBytes, typename Element>
void GateTokens(const GateWeights& weights, const GateCall& call, int64_t begin, int64_t end) {
  const int64_t dim = weights.dim;
  const int64_t copy_bytes = dim * static_cast<int64_t>(sizeof(Element));
  const int64_t token_bytes = copy_bytes * weights.copies;
  for (int64_t t = begin; t < end; ++t) {
    const uint8_t* h = static_cast<const uint8_t*>(call.highway) + t * token_bytes;
    uint8_t* out = call.out == nullptr ? nullptr : static_cast<uint8_t*>(call.out) + t * token_bytes;
    float* gates = call.gates == nullptr ? nullptr : call.gates + t * weights.copies;
    if (call.token_mask != nullptr && call.token_mask[t] == 0) {
      for (int copy = 0; gates != nullptr && copy < weights.copies; ++copy) gates[copy] = 0;
      if (out != nullptr && out != h) __builtin_memcpy(out, h, static_cast<size_t>(token_bytes));
      continue;
    }
    const auto* keys = reinterpret_cast<const uint8_t*>(call.kv + t * dim * (weights.copies + 1));
    const uint8_t* value = keys + weights.copies * dim * 2;
    for (int64_t copy = 0; copy < weights.copies; ++copy) {
      const GateSums sums =
          SumGate<Terms, kBytes, Element>(h + copy * copy_bytes, keys + copy * dim * 2, weights.qk + copy * dim, dim);
      const float g = GateFromSums(sums, dim, weights.eps);
      if (gates != nullptr) gates[copy] = g;
      if (out == nullptr) continue;
      UpdateCopy<kBytes, Element>(h + copy * copy_bytes, value, g, dim, out + copy * copy_bytes);
    }
  }
}

template <int kBytes, typename Terms = GateTerms<kBytes>>
void GateRange(const GateWeights& weights, const GateCall& call, int64_t begin, int64_t end) {
  if (call.type == HighwayType::kF32) {
    GateTokens<Terms, kBytes, float>(weights, call, begin, end);
  } else {
    GateTokens<Terms, kBytes, Bf16>(weights, call, begin, end);
  }
}

}  // namespace
}  // namespace engram::kernels
