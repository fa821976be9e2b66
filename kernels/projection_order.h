// The one order in which a kv value is summed (docs/numerics.md, projection), by the reference and by every CPU twin.
//
// k runs in chunks of 1024. A chunk's sum starts at +0 and takes the pairs (k, k + 1) in ascending order; of a pair,
// the product of k + 1 is added first and then that of k, each product and addition fused (one rounding to f32). Chunks
// are added in ascending order, and the total is rounded once to bf16. A subnormal is zero wherever it appears: as an
// input, after each fused step, after each addition. No T, batch mix, block size or thread count enters.
//
// Why: this is what vdpbf16ps does to a register (both fused steps, this way round, flushing), with outputs in the
// lanes and k in sequence; oneDNN's bf16 GEMM on AVX512_BF16 sums so too. Machines without it have the same bits from
// two FMAs with FTZ and DAZ set.
#pragma once

#include <cmath>

#include "kernels/scalar.h"

namespace engram::kernels {

inline constexpr int64_t kProjectionChunk = 1024;

ENGRAM_ALWAYS_INLINE float FlushSubnormal(float value) {
  const uint32_t bits = F32Bits(value);
  return (bits & 0x7F800000u) == 0 ? F32FromBits(bits & 0x80000000u) : value;
}

// sum + w·x, one step of the order. __builtin_fmaf is exact with or without an instruction for it.
ENGRAM_ALWAYS_INLINE float ProjectionStep(float sum, Bf16 w, Bf16 x) {
  return FlushSubnormal(
      __builtin_fmaf(FlushSubnormal(F32FromBf16(w)), FlushSubnormal(F32FromBf16(x)), FlushSubnormal(sum)));
}

}  // namespace engram::kernels
