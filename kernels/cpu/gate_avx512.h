// The gate's sums with AVX-512: the 8 lanes of gate_loop.h are one register each. The compiler's vectors give the same
// bits, but GCC 12 converts f32 to f64 in four pieces, which doubles the instructions.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/gate_loop.h"

namespace engram::kernels {
namespace {

struct GateTermsAvx512 {
  static ENGRAM_ALWAYS_INLINE __m512d Widen(__m256 values) { return _mm512_cvtps_pd(values); }
  static ENGRAM_ALWAYS_INLINE __m256 Load(const uint8_t* from, float) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
  static ENGRAM_ALWAYS_INLINE __m256 Load(const uint8_t* from, Bf16) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }

  // h·h and key·key are exact in f64, so fused or not is the same; (h·w)·key is not.
  template <typename Element>
  static ENGRAM_ALWAYS_INLINE int64_t Add(const uint8_t* h, const uint8_t* key, const float* qk, int64_t dim,
                                          GateLanes& lanes) {
    __m512d hh = _mm512_setzero_pd();
    __m512d kk = _mm512_setzero_pd();
    __m512d hwk = _mm512_setzero_pd();
    int64_t i = 0;
    for (; i + kGateLanes <= dim; i += kGateLanes) {
      const __m512d hv = Widen(Load(h + i * static_cast<int64_t>(sizeof(Element)), Element{}));
      const __m512d kv = Widen(Load(key + i * 2, Bf16{}));
      const __m512d wv = Widen(_mm256_loadu_ps(qk + i));
      hh = _mm512_fmadd_pd(hv, hv, hh);
      kk = _mm512_fmadd_pd(kv, kv, kk);
      hwk = _mm512_add_pd(hwk, _mm512_mul_pd(_mm512_mul_pd(hv, wv), kv));
    }
    _mm512_storeu_pd(lanes.hh, hh);
    _mm512_storeu_pd(lanes.kk, kk);
    _mm512_storeu_pd(lanes.hwk, hwk);
    return i;
  }
};

}  // namespace
}  // namespace engram::kernels
