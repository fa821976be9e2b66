// One value at a time: bf16, f16 and unaligned loads, shared by every twin that runs on a CPU.
//
// Everything here is always inlined: the loops of kernels/cpu are compiled once per instruction set, and an out-of-line
// copy compiled for AVX-512 must never be the one that the linker keeps for everybody.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace engram::kernels {

#define ENGRAM_ALWAYS_INLINE inline __attribute__((always_inline))

// Reads or writes a T at any address.
template <typename T>
ENGRAM_ALWAYS_INLINE T LoadUnaligned(const void* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
ENGRAM_ALWAYS_INLINE void StoreUnaligned(void* to, T value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

ENGRAM_ALWAYS_INLINE float F32FromBits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
ENGRAM_ALWAYS_INLINE uint32_t F32Bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// Exact: a bf16 is the upper half of an f32.
ENGRAM_ALWAYS_INLINE float F32FromBf16(Bf16 value) { return F32FromBits(static_cast<uint32_t>(value) << 16); }

// Nearest even; overflow rounds to infinity. A NaN stays one and is quieted: truncation alone could leave an infinity.
ENGRAM_ALWAYS_INLINE Bf16 Bf16FromF32(float value) {
  const uint32_t bits = F32Bits(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quieted = (bits >> 16) | 0x40u;
  return static_cast<Bf16>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quieted : rounded);
}

// Exact, subnormals included; a NaN keeps its payload and is quieted.
ENGRAM_ALWAYS_INLINE float F32FromF16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 31u;
  const uint32_t mantissa = half & 0x3FFu;
  if (exponent == 31) {
    return F32FromBits(sign | 0x7F800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
  }
  if (exponent == 0) {
    // mantissa * 2^-24, exact; the sign is put back by bits so that -0 stays -0.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return F32FromBits(F32Bits(magnitude) | sign);
  }
  return F32FromBits(sign | ((exponent + 127 - 15) << 23) | (mantissa << 13));
}

}  // namespace engram::kernels
