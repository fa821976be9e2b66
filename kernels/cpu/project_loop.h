// Projection in the order of projection_order.h, by vectors of kBytes.
//
// A 32-bit word of a row holds an even k below an odd one (little endian): shifted up it is the even value as f32,
// masked the odd one. So the 32 lanes live in 16 words: `even` and `odd` vectors whose element i is lane 2i and lane 2i
// + 1.
#pragma once

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vectors.h"
#include "kernels/projection_order.h"

namespace engram::kernels {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half of a word must be the smaller k");

// kRows outputs times kTokens tokens: every load of a row serves kTokens products, every load of x kRows.
template <int kBytes, int kRows, int kTokens>
ENGRAM_ALWAYS_INLINE void ProjectBlock(const Bf16* weights, const Bf16* x, int64_t inputs, int64_t outputs, Bf16* kv) {
  using V = Vectors<kBytes>;
  constexpr int kWords = kProjectionLanes / 2 / V::kFloats;  // vectors of words per 32 inputs
  constexpr int64_t kWordValues = 2 * V::kFloats;
  typename V::Float even[kRows][kTokens][kWords] = {};
  typename V::Float odd[kRows][kTokens][kWords] = {};

  for (int64_t k = 0; k < inputs; k += kProjectionLanes) {
#pragma GCC unroll 8
    for (int v = 0; v < kWords; ++v) {
      typename V::Float x_even[kTokens];
      typename V::Float x_odd[kTokens];
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        typename V::Word words;
        __builtin_memcpy(&words, x + t * inputs + k + v * kWordValues, sizeof(words));
        x_even[t] = (typename V::Float)(words << 16);
        x_odd[t] = (typename V::Float)(words & 0xFFFF0000u);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        typename V::Word words;
        __builtin_memcpy(&words, weights + r * inputs + k + v * kWordValues, sizeof(words));
        const auto w_even = (typename V::Float)(words << 16);
        const auto w_odd = (typename V::Float)(words & 0xFFFF0000u);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          even[r][t][v] += w_even * x_even[t];
          odd[r][t][v] += w_odd * x_odd[t];
        }
      }
    }
  }

  for (int t = 0; t < kTokens; ++t) {
    for (int r = 0; r < kRows; ++r) {
      float pairs[kProjectionLanes / 2];
#pragma GCC unroll 8
      for (int v = 0; v < kWords; ++v) {
        const typename V::Float sum = even[r][t][v] + odd[r][t][v];
        __builtin_memcpy(pairs + v * V::kFloats, &sum, sizeof(sum));
      }
      kv[t * outputs + r] = Bf16FromF32(SumProjectionPairs(pairs));
    }
  }
}

// kRows outputs, all of `tokens`.
template <int kBytes, int kRows, int kTokens>
ENGRAM_ALWAYS_INLINE void ProjectRows(const Bf16* weights, const Bf16* x, int64_t tokens, int64_t inputs,
                                      int64_t outputs, Bf16* kv) {
  int64_t t = 0;
  for (; t + kTokens <= tokens; t += kTokens) {
    ProjectBlock<kBytes, kRows, kTokens>(weights, x + t * inputs, inputs, outputs, kv + t * outputs);
  }
  for (; t < tokens; ++t) ProjectBlock<kBytes, kRows, 1>(weights, x + t * inputs, inputs, outputs, kv + t * outputs);
}

// Tokens per pass over a range's rows: 64 tokens of 12 KiB (6144 inputs) are 768 KiB and stay in a 1 MiB second-level
// cache, so that x comes from memory once per range and not once per row.
constexpr int64_t kTokenPanel = 64;

// kRows1: outputs side by side for a single token, one stream of memory each. kRows and kTokens: the block for several.
template <int kBytes, int kRows1, int kRows, int kTokens>
void ProjectRange(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, int64_t begin,
                  int64_t end) {
  const int64_t inputs = weights.inputs;
  const int64_t outputs = weights.outputs;
  for (int64_t first = 0; first < tokens; first += kTokenPanel) {
    const int64_t panel = tokens - first < kTokenPanel ? tokens - first : kTokenPanel;
    const Bf16* panel_x = x + first * inputs;
    Bf16* panel_kv = kv + first * outputs;
    int64_t o = begin;
    if (panel < kTokens) {
      for (; o + kRows1 <= end; o += kRows1) {
        ProjectRows<kBytes, kRows1, 1>(weights.bf16 + o * inputs, panel_x, panel, inputs, outputs, panel_kv + o);
      }
    }
    for (; o + kRows <= end; o += kRows) {
      ProjectRows<kBytes, kRows, kTokens>(weights.bf16 + o * inputs, panel_x, panel, inputs, outputs, panel_kv + o);
    }
    for (; o < end; ++o) {
      ProjectRows<kBytes, 1, kTokens>(weights.bf16 + o * inputs, panel_x, panel, inputs, outputs, panel_kv + o);
    }
  }
}

}  // namespace
}  // namespace engram::kernels
