// The one order in which a kv value is summed (docs/numerics.md, projection), shared by the reference and the CPU twin.
//
// 32 lanes start at +0. Lane j takes the products of k = j, j + 32, j + 64, … in ascending order: a product is rounded
// to f32 (exact unless it under- or overflows), then added and rounded. Then the lanes are added in this tree:
// neighbours 2i and 2i + 1 into p[i], then p[i] += p[i + 8] for i < 8, p[i] += p[i + 4] for i < 4, p[i] += p[i + 2] for
// i < 2, p[0] + p[1]. The sum is rounded once to bf16. No T, batch mix, block size or thread count enters.
//
// Why 32: eight vectors of SSE, four of AVX2, two of AVX-512, so one output's lanes fit every register file; and a load
// of 32 bf16 splits into its even and its odd values with one shift and one mask, which is why neighbours are added
// first.
#pragma once

#include "kernels/scalar.h"

namespace engram::kernels {

inline constexpr int kProjectionLanes = 32;

// p[i]: the sum of lanes 2i and 2i + 1. Overwrites `p`.
ENGRAM_ALWAYS_INLINE float SumProjectionPairs(float p[kProjectionLanes / 2]) {
  for (int i = 0; i < 8; ++i) p[i] += p[i + 8];
  for (int i = 0; i < 4; ++i) p[i] += p[i + 4];
  for (int i = 0; i < 2; ++i) p[i] += p[i + 2];
  return p[0] + p[1];
}

ENGRAM_ALWAYS_INLINE float SumProjectionLanes(const float lanes[kProjectionLanes]) {
  float pairs[kProjectionLanes / 2];
  for (int i = 0; i < kProjectionLanes / 2; ++i) pairs[i] = lanes[2 * i] + lanes[2 * i + 1];
  return SumProjectionPairs(pairs);
}

}  // namespace engram::kernels
