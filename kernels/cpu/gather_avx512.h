// Q2_K rows to bf16 with AVX-512: a row's 16 sub-blocks have 4 values each, 64 bf16 in two registers, and vpermi2w
// picks 32 of them by code and sub-block: 8 registers of output for some 50 instructions.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/gather_loop.h"
#include "kernels/cpu/isa_avx512.h"

namespace engram::kernels {
namespace {

template <typename Isa>
struct RowDecoderAvx512 {
  // Exactly DecodeQ2K and Bf16FromF32 (a NaN stays a NaN).
  static ENGRAM_ALWAYS_INLINE void Decode(const uint8_t* block, Bf16* out) {
    const __m512i scales = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block)));
    const __m128 halves = _mm_cvtph_ps(_mm_cvtsi32_si128(LoadUnaligned<int32_t>(block + 80)));
    const __m512 d = _mm512_broadcastss_ps(halves);
    const __m512 dmin = _mm512_broadcastss_ps(_mm_movehdup_ps(halves));
    const Values values = FourValues<Isa>(d, dmin, scales);

    const __m512i code_bits = _mm512_set1_epi16(0x30);
    // Bits 3..0 of an index: the sub-block, first 0 for 16 words and 1 for 16, two more with each register.
    __m512i subs = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);
    const __m512i two = _mm512_set1_epi16(2);
    for (int half = 0; half < 2; ++half) {
      const __m512i codes =
          _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 16 + 32 * half)));
      const __m512i at_4[4] = {_mm512_slli_epi16(codes, 4), _mm512_slli_epi16(codes, 2), codes,
                               _mm512_srli_epi16(codes, 2)};
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m512i index = _mm512_ternarylogic_epi32(at_4[i], code_bits, subs, 0xEA);  // (a & b) | c
        _mm512_storeu_si512(out + 128 * half + 32 * i, _mm512_permutex2var_epi16(values.low, index, values.high));
        subs = _mm512_add_epi16(subs, two);
      }
    }
  }
};

}  // namespace
}  // namespace engram::kernels
