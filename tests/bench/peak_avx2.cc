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

uint64_t ReadLinesAvx2(const uint8_t* memory, int64_t lines) {
  constexpr int64_t kAhead = 4096;  // a tenth more than the hardware's own prefetching reads (Zen 5)
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < lines; ++i) {
    const uint8_t* line = memory + i * 64;
    _mm_prefetch(reinterpret_cast<const char*>(line) + kAhead, _MM_HINT_T0);
    for (int j = 0; j < 2; ++j) {
      sums[j] = _mm256_add_epi64(sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 32 * j)));
    }
  }
  const __m256i all = _mm256_add_epi64(sums[0], sums[1]);
  return static_cast<uint64_t>(_mm256_extract_epi64(all, 0)) + static_cast<uint64_t>(_mm256_extract_epi64(all, 1)) +
         static_cast<uint64_t>(_mm256_extract_epi64(all, 2)) + static_cast<uint64_t>(_mm256_extract_epi64(all, 3));
}

}  // namespace engram::kernels
