// Projection of a bf16 panel with AVX2 and FMA, in the order of projection_order.h: a group's 16 outputs are two
// accumulators.
//
// A word of a register of weights holds an even k below an odd one: masked it is the odd one as f32, shifted up the
// even one. With FTZ and DAZ set, the FMA of the odd and then of the even are vdpbf16ps.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/projection_layout.h"
#include "kernels/scalar.h"

namespace engram::kernels {
namespace {

// Tokens side by side: 2 accumulators each beside 4 registers of weights and 2 of x, of 16.
constexpr int kAvx2Tokens = 4;

ENGRAM_ALWAYS_INLINE __m256 OddOf(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
ENGRAM_ALWAYS_INLINE __m256 EvenOf(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

// Tokens [t, t + kTokens) of a tile against a group: sums of all k into `totals` [kTokens][16].
template <int kTokens>
ENGRAM_ALWAYS_INLINE void SumGroupAvx2(const uint8_t* weights, const uint8_t* x, int64_t tile_tokens, int64_t inputs,
                                       float* totals) {
  __m256 total[kTokens][2];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) total[t][0] = total[t][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < inputs; k += kProjectionChunk) {
    __m256 sum[kTokens][2];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
    const int64_t end = k + kProjectionChunk < inputs ? k + kProjectionChunk : inputs;
    for (int64_t p = k / 2; p < end / 2; ++p) {
      const auto* pair = reinterpret_cast<const __m256i*>(weights + p * kPanelPairBytes);
      const __m256i w[2] = {_mm256_loadu_si256(pair), _mm256_loadu_si256(pair + 1)};
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const __m256i values = _mm256_set1_epi32(LoadUnaligned<int32_t>(x + (p * tile_tokens + t) * 4));
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m256 odd = _mm256_fmadd_ps(OddOf(w[half]), OddOf(values), sum[t][half]);
          sum[t][half] = _mm256_fmadd_ps(EvenOf(w[half]), EvenOf(values), odd);
        }
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      total[t][0] = _mm256_add_ps(total[t][0], sum[t][0]);
      total[t][1] = _mm256_add_ps(total[t][1], sum[t][1]);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    _mm256_storeu_ps(totals + t * kGroupOutputs, total[t][0]);
    _mm256_storeu_ps(totals + t * kGroupOutputs + 8, total[t][1]);
  }
}

void ProjectPanelAvx2(const PanelCall& call, int64_t panel) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);  // FTZ, DAZ
  for (int64_t tile = 0; tile < call.tiles.count(); ++tile) {
    const int64_t begin = call.tiles.begin(tile);
    const int64_t tokens = call.tiles.begin(tile + 1) - begin;
    for (int64_t group = 0; group < kPanelGroups; ++group) {
      const int64_t output = panel * kPanelOutputs + group * kGroupOutputs;
      if (output >= call.outputs) break;
      const int64_t outputs = call.outputs - output < kGroupOutputs ? call.outputs - output : kGroupOutputs;
      const uint8_t* weights = call.panel(panel) + group * 64;
      const auto* x = reinterpret_cast<const uint8_t*>(call.x + begin * call.inputs);
      for (int64_t t = 0; t < tokens;) {
        float totals[kAvx2Tokens * kGroupOutputs];
        int64_t done = 1;
        if (tokens - t >= kAvx2Tokens) {
          SumGroupAvx2<kAvx2Tokens>(weights, x + t * 4, tokens, call.inputs, totals);
          done = kAvx2Tokens;
        } else if (tokens - t >= 2) {
          SumGroupAvx2<2>(weights, x + t * 4, tokens, call.inputs, totals);
          done = 2;
        } else {
          SumGroupAvx2<1>(weights, x + t * 4, tokens, call.inputs, totals);
        }
        for (int64_t i = 0; i < done; ++i, ++t) {
          Bf16* kv = call.kv + (begin + t) * call.outputs + output;
          for (int64_t o = 0; o < outputs; ++o) kv[o] = Bf16FromF32(totals[i * kGroupOutputs + o]);
        }
      }
    }
  }
  _mm_setcsr(before);
}

}  // namespace
}  // namespace engram::kernels
