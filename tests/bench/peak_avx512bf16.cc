#include <immintrin.h>

#include "tests/bench/peak.h"

namespace engram::kernels {

int64_t PeakAvx512Bf16(int64_t rounds) {
  constexpr int kChains = 16;  // two a cycle with a latency of 6 need 12
  __m512 sums[kChains];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  const auto one = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3F80));
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], one, one);
  }
  __m512 all = sums[0];
  for (int j = 1; j < kChains; ++j) all = _mm512_add_ps(all, sums[j]);
  volatile float kept = _mm512_reduce_add_ps(all);
  static_cast<void>(kept);
  return kChains * 64;
}

}  // namespace engram::kernels
