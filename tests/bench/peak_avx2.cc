#include <immintrin.h>

#include "tests/bench/peak.h"

namespace engram::kernels {

int64_t PeakAvx2Fma(int64_t rounds) {
  constexpr int kChains = 12;
  __m256 sums[kChains];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  const __m256 one = _mm256_set1_ps(1);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) sums[j] = _mm256_fmadd_ps(one, one, sums[j]);
  }
  __m256 all = sums[0];
  for (int j = 1; j < kChains; ++j) all = _mm256_add_ps(all, sums[j]);
  volatile float kept = _mm256_cvtss_f32(all);
  static_cast<void>(kept);
  return kChains * 16;
}

}  // namespace engram::kernels
