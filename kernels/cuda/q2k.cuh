// Q2_K on the device: 84 bytes are 256 values (docs/formats.md), to bf16.
//
// A sub-block of 16 values has only four different ones, d·s·q − dmin·m for q = 0..3. They are computed and rounded
// once and then picked by byte permutes: one for every two values.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.cuh"

namespace engram::kernels::cuda {

inline constexpr int kBlockWords = kQ2KBlockBytes / 4;  // 4 of scales, 16 of codes, 1 of d and dmin
inline constexpr int kCodeWords = 4;                    // where codes begin
inline constexpr int kDWord = 20;                       // d in its low half, dmin in its high half

// The four values of a sub-block as bf16: q = 0 and 1 in `low`, 2 and 3 in `high`.
struct FourValues {
  uint32_t low, high;
};

// 0..15, exactly, without the slow conversion: 2^23 + n has n in its last bits.
__device__ __forceinline__ float F32FromNibble(uint32_t n) { return __uint_as_float(0x4B000000u | n) - 8388608.0f; }

// `scale`: the sub-block's byte, the scale in the low nibble and the minimum's in the high one.
__device__ __forceinline__ FourValues ValuesOf(uint32_t scale, float d, float dmin) {
  const float step = d * F32FromNibble(scale & 15u);
  const float minimum = -(dmin * F32FromNibble(scale >> 4 & 15u));
  // All products are exact, so that the fused addition is the one rounding, and +0 where the reference has it: also
  // for q = 0, where −minimum alone would be −0.
  return {PackBf16(__fmaf_rn(step, 0.0f, minimum), __fmaf_rn(step, 1.0f, minimum)),
          PackBf16(__fmaf_rn(step, 2.0f, minimum), __fmaf_rn(step, 3.0f, minimum))};
}

// Four codes, one per byte, as selectors of Permute: of codes 0 and 1 in the low half, of 2 and 3 in the high half. A
// code q picks bytes 2q and 2q + 1. Bytes do not carry: 3 * 0x22 + 0x10 = 0x76.
__device__ __forceinline__ uint32_t SelectorsOf(uint32_t codes) { return codes * 0x22u + 0x10101010u; }

}  // namespace engram::kernels::cuda
