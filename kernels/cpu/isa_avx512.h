// The two products that kernels/cpu/*_avx512.h take: with AVX512_BF16's instructions, and with FMA and integers.
#pragma once

#include <immintrin.h>

#include "kernels/scalar.h"

namespace engram::kernels {
namespace {

#ifdef __AVX512BF16__
struct Avx512Bf16 {
  // bf16 of `low`'s 16 values, then of `high`'s. The instruction flushes subnormals, which no Q2_K value is: f16 scales
  // make them multiples of 2^-24.
  static ENGRAM_ALWAYS_INLINE __m512i ToBf16(__m512 low, __m512 high) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
  static ENGRAM_ALWAYS_INLINE __m512 AddPair(__m512 sum, __m512i w, __m512i x) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
  }
};
#endif

// The caller has set FTZ and DAZ.
struct Avx512Fma {
  static ENGRAM_ALWAYS_INLINE __m256i Rounded(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i upper = _mm512_srli_epi32(bits, 16);
    const __m512i even = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i words = _mm512_mask_or_epi32(_mm512_srli_epi32(sum, 16), is_nan, upper, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(words);
  }
  static ENGRAM_ALWAYS_INLINE __m512i ToBf16(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(Rounded(low)), Rounded(high), 1);
  }
  static ENGRAM_ALWAYS_INLINE __m512 AddPair(__m512 sum, __m512i w, __m512i x) {
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, odd)), _mm512_castsi512_ps(_mm512_and_si512(x, odd)),
                          sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                           sum);
  }
};

// The four values that each of 16 sub-blocks of Q2_K can take.
struct Values {
  __m512i low, high;  // bf16: value 0 of the 16 and value 1; value 2 and value 3
};

// `scales`: the 16 scale bytes, one in each word.
template <typename Isa>
ENGRAM_ALWAYS_INLINE Values FourValues(__m512 d, __m512 dmin, __m512i scales) {
  const __m512 nibbles = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 step = _mm512_mul_ps(d, _mm512_permutexvar_ps(scales, nibbles));  // the low four bits count
  const __m512 minimum = _mm512_mul_ps(dmin, _mm512_permutexvar_ps(_mm512_srli_epi32(scales, 4), nibbles));
  // The products are exact, so fused or not is the same; 0 · step - minimum has the sign that DecodeQ2K gives it.
  const __m512 value0 = _mm512_fmsub_ps(step, _mm512_setzero_ps(), minimum);
  const __m512 value1 = _mm512_sub_ps(step, minimum);
  const __m512 value2 = _mm512_fmsub_ps(step, _mm512_set1_ps(2), minimum);
  const __m512 value3 = _mm512_fmsub_ps(step, _mm512_set1_ps(3), minimum);
  return {Isa::ToBf16(value0, value1), Isa::ToBf16(value2, value3)};
}

}  // namespace
}  // namespace engram::kernels
