// Projection of a panel with AVX-512, in the order of projection_order.h: one accumulator holds 16 outputs of a token.
//
// `Isa` says how a pair of k is multiplied and how f32 is rounded to bf16: vdpbf16ps and vcvtne2ps2bf16, or what gives
// the same bits without them (loops_avx512bf16.cc, loops_avx512.cc).
//
// Q2_K is expanded exactly: within a sub-block an output's weight takes one of four values, so the 16 outputs of a
// group have 64 of them, which fill two registers, and vpermi2w picks 32 weights by code and lane. A group's sub-block
// costs some 13 instructions for its table and 3 for each of its 8 registers of weights. One token to five expand into
// registers and use them at once; more tokens share what is expanded into the first-level cache, 1024 k at a time.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/isa_avx512.h"
#include "kernels/cpu/projection_layout.h"
#include "kernels/scalar.h"

namespace engram::kernels {
namespace {

// Up to here weights are used as they are expanded.
constexpr int64_t kFusedTokens = 5;

// Tokens whose sums stand beside one panel's expanded weights: 20 tiles by 2 groups are 30 KiB of f32.
constexpr int64_t kSumTiles = 20;

// Of the blocks to come, 10 KiB ahead: at 84 B in some 4 ns, half a microsecond.
constexpr int64_t kPrefetchBytes = kPanelBlockBytes;

// Subnormals are zero in loads, steps and additions (projection_order.h); restored on the way out.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

template <typename Isa>
ENGRAM_ALWAYS_INLINE Values ValuesOf(const uint8_t* group, int sub) {
  const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group)));
  const __m512 dmin = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 32)));
  const __m512i scales =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group + kGroupScales + 16 * sub)));
  return FourValues<Isa>(d, dmin, scales);
}

// Bit 5 and 4 of an index word are the code, bits 3 to 0 the lane: word w of the result is the weight of lane w / 2.
template <int kPair>
ENGRAM_ALWAYS_INLINE __m512i Pick(const Values& values, __m512i codes, __m512i lanes, __m512i code_bits) {
  __m512i at_4 = codes;
  if constexpr (kPair < 2) at_4 = _mm512_slli_epi16(codes, 4 - 2 * kPair);
  if constexpr (kPair > 2) at_4 = _mm512_srli_epi16(codes, 2 * kPair - 4);
  const __m512i index = _mm512_ternarylogic_epi32(at_4, code_bits, lanes, 0xEA);  // (a & b) | c
  return _mm512_permutex2var_epi16(values.low, index, values.high);
}

ENGRAM_ALWAYS_INLINE __m512i LaneOfWord() {
  return _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2,
                          2, 1, 1, 0, 0);
}
ENGRAM_ALWAYS_INLINE __m512i CodeBits() { return _mm512_set1_epi16(0x30); }

ENGRAM_ALWAYS_INLINE __m512i Broadcast(const uint8_t* pair) { return _mm512_set1_epi32(LoadUnaligned<int32_t>(pair)); }

// The first `outputs` lanes to kv.
ENGRAM_ALWAYS_INLINE void StoreKv(__m512 sum, int64_t outputs, Bf16* kv) {
  if (outputs <= 0) return;
  const __m256i words = Avx512Fma::Rounded(sum);
  if (outputs >= kGroupOutputs) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(kv), words);
  } else {
    _mm256_mask_storeu_epi16(kv, static_cast<__mmask16>((1u << outputs) - 1), words);
  }
}

// kGroups groups from `group` of a Q2_K panel on, all tokens of the only tile.
template <typename Isa, int kGroups, int kTokens>
ENGRAM_ALWAYS_INLINE void ProjectFused(const PanelCall& call, int64_t panel, int64_t group) {
  const uint8_t* weights = call.panel(panel) + group * kGroupBytes;
  const auto* x = reinterpret_cast<const uint8_t*>(call.x);
  const __m512i lanes = LaneOfWord();
  const __m512i code_bits = CodeBits();
  const int64_t blocks = call.inputs / kRowValues;
  constexpr int64_t kChunkBlocks = kProjectionChunk / kRowValues;
  __m512 total[kGroups][kTokens];
  for (int64_t first = 0; first < blocks; first += kChunkBlocks) {
    __m512 sum[kGroups][kTokens];
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) sum[g][t] = _mm512_setzero_ps();
    }
    const int64_t end = first + kChunkBlocks < blocks ? first + kChunkBlocks : blocks;
    for (int64_t block = first; block < end; ++block) {
      const uint8_t* from = weights + block * kPanelBlockBytes;
      for (int sub = 0; sub < 16; ++sub) {
        const uint8_t* pairs = x + (block * kRowValues + 16 * sub) * kTokens * 2;
        Values values[kGroups];
        __m512i codes[kGroups];
#pragma GCC unroll 16
        for (int g = 0; g < kGroups; ++g) {
          const uint8_t* at = from + g * kGroupBytes;
          // 16 steps of 84 bytes cover the 21 lines of a group but for every fourth, which the neighbour brings along.
          _mm_prefetch(reinterpret_cast<const char*>(at + 84 * sub + kPrefetchBytes), _MM_HINT_T0);
          values[g] = ValuesOf<Isa>(at, sub);
          codes[g] = _mm512_loadu_si512(at + kGroupCodes + 64 * sub);
        }
        const auto step = [&]<int kPair>() __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int g = 0; g < kGroups; ++g) {
            const __m512i w = Pick<kPair>(values[g], codes[g], lanes, code_bits);
#pragma GCC unroll 16
            for (int t = 0; t < kTokens; ++t) {
              sum[g][t] = Isa::AddPair(sum[g][t], w, Broadcast(pairs + (kPair * kTokens + t) * 4));
            }
          }
        };
        step.template operator()<0>();
        step.template operator()<1>();
        step.template operator()<2>();
        step.template operator()<3>();
        step.template operator()<4>();
        step.template operator()<5>();
        step.template operator()<6>();
        step.template operator()<7>();
      }
    }
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) {
        total[g][t] = _mm512_add_ps(first == 0 ? _mm512_setzero_ps() : total[g][t], sum[g][t]);
      }
    }
  }
  for (int g = 0; g < kGroups; ++g) {
    const int64_t output = panel * kPanelOutputs + (group + g) * kGroupOutputs;
    for (int t = 0; t < kTokens; ++t) StoreKv(total[g][t], call.outputs - output, call.kv + t * call.outputs + output);
  }
}

template <typename Isa, int kGroups, int kTokens>
void ProjectPanelFused(const PanelCall& call, int64_t panel) {
  for (int64_t group = 0; group < kPanelGroups; group += kGroups)
    ProjectFused<Isa, kGroups, kTokens>(call, panel, group);
}

constexpr int kTileGroups = 2;
constexpr int64_t kTilePairBytes = kTileGroups * 64;

// The weights of kTileGroups groups, k of blocks [first, end): [pair][group] registers into `to`.
template <typename Isa>
ENGRAM_ALWAYS_INLINE void ExpandGroups(const uint8_t* weights, int64_t first, int64_t end, uint8_t* to) {
  const __m512i lanes = LaneOfWord();
  const __m512i code_bits = CodeBits();
  for (int64_t block = first; block < end; ++block) {
    for (int sub = 0; sub < 16; ++sub, to += 8 * kTilePairBytes) {
#pragma GCC unroll 2
      for (int g = 0; g < kTileGroups; ++g) {
        const uint8_t* at = weights + block * kPanelBlockBytes + g * kGroupBytes;
        _mm_prefetch(reinterpret_cast<const char*>(at + 84 * sub + kPrefetchBytes), _MM_HINT_T0);
        const Values values = ValuesOf<Isa>(at, sub);
        const __m512i codes = _mm512_loadu_si512(at + kGroupCodes + 64 * sub);
        uint8_t* out = to + 64 * g;
        _mm512_store_si512(out, Pick<0>(values, codes, lanes, code_bits));
        _mm512_store_si512(out + kTilePairBytes, Pick<1>(values, codes, lanes, code_bits));
        _mm512_store_si512(out + 2 * kTilePairBytes, Pick<2>(values, codes, lanes, code_bits));
        _mm512_store_si512(out + 3 * kTilePairBytes, Pick<3>(values, codes, lanes, code_bits));
        _mm512_store_si512(out + 4 * kTilePairBytes, Pick<4>(values, codes, lanes, code_bits));
        _mm512_store_si512(out + 5 * kTilePairBytes, Pick<5>(values, codes, lanes, code_bits));
        _mm512_store_si512(out + 6 * kTilePairBytes, Pick<6>(values, codes, lanes, code_bits));
        _mm512_store_si512(out + 7 * kTilePairBytes, Pick<7>(values, codes, lanes, code_bits));
      }
    }
  }
}

// One chunk of k for one tile: adds its sums to `totals` [tokens][kTileGroups][16].
template <typename Isa, int kTokens>
void AddTile(const uint8_t* weights, int64_t pair_bytes, int64_t pairs, const uint8_t* x, float* totals) {
  __m512 sum[kTileGroups][kTokens];
#pragma GCC unroll 32
  for (int g = 0; g < kTileGroups; ++g) {
#pragma GCC unroll 32
    for (int t = 0; t < kTokens; ++t) sum[g][t] = _mm512_setzero_ps();
  }
#pragma GCC unroll 2
  for (int64_t p = 0; p < pairs; ++p) {
    __m512i w[kTileGroups];
#pragma GCC unroll 32
    for (int g = 0; g < kTileGroups; ++g) w[g] = _mm512_load_si512(weights + p * pair_bytes + g * 64);
#pragma GCC unroll 32
    for (int t = 0; t < kTokens; ++t) {
      const __m512i pair = Broadcast(x + (p * kTokens + t) * 4);
#pragma GCC unroll 32
      for (int g = 0; g < kTileGroups; ++g) sum[g][t] = Isa::AddPair(sum[g][t], w[g], pair);
    }
  }
#pragma GCC unroll 32
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 32
    for (int g = 0; g < kTileGroups; ++g) {
      float* total = totals + (t * kTileGroups + g) * kGroupOutputs;
      _mm512_storeu_ps(total, _mm512_add_ps(_mm512_loadu_ps(total), sum[g][t]));
    }
  }
}

using AddTileFn = void(const uint8_t* weights, int64_t pair_bytes, int64_t pairs, const uint8_t* x, float* totals);

template <typename Isa>
AddTileFn* AddTileOf(int64_t tokens) {
  static constexpr AddTileFn* kByTokens[kTileTokens] = {
      &AddTile<Isa, 1>, &AddTile<Isa, 2>, &AddTile<Isa, 3>, &AddTile<Isa, 4>,  &AddTile<Isa, 5>,  &AddTile<Isa, 6>,
      &AddTile<Isa, 7>, &AddTile<Isa, 8>, &AddTile<Isa, 9>, &AddTile<Isa, 10>, &AddTile<Isa, 11>, &AddTile<Isa, 12>};
  return kByTokens[tokens - 1];
}

// Tiles [first, end), at most kSumTiles of them, against kTileGroups groups.
template <typename Isa>
void ProjectTiles(const PanelCall& call, int64_t panel, int64_t group, int64_t first, int64_t end) {
  alignas(64) uint8_t expanded[kProjectionChunk / 2 * kTilePairBytes];
  alignas(64) float totals[kSumTiles * kTileTokens * kTileGroups * kGroupOutputs];
  const int64_t first_token = call.tiles.begin(first);
  const int64_t tokens = call.tiles.begin(end) - first_token;
  __builtin_memset(totals, 0, static_cast<size_t>(tokens * kTileGroups * kGroupOutputs) * sizeof(float));

  for (int64_t k = 0; k < call.inputs; k += kProjectionChunk) {
    const int64_t chunk = k + kProjectionChunk < call.inputs ? kProjectionChunk : call.inputs - k;
    const uint8_t* weights = expanded;
    int64_t pair_bytes = kTilePairBytes;
    if (call.q2k) {
      ExpandGroups<Isa>(call.panel(panel) + group * kGroupBytes, k / kRowValues, (k + chunk) / kRowValues, expanded);
    } else {
      weights = call.panel(panel) + k / 2 * kPanelPairBytes + group * 64;
      pair_bytes = kPanelPairBytes;
    }
    for (int64_t tile = first; tile < end; ++tile) {
      const int64_t begin = call.tiles.begin(tile);
      const int64_t in_tile = call.tiles.begin(tile + 1) - begin;
      AddTileOf<Isa>(in_tile)(weights, pair_bytes, chunk / 2,
                              reinterpret_cast<const uint8_t*>(call.x + begin * call.inputs + k * in_tile),
                              totals + (begin - first_token) * kTileGroups * kGroupOutputs);
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t g = 0; g < kTileGroups; ++g) {
      const int64_t output = panel * kPanelOutputs + (group + g) * kGroupOutputs;
      StoreKv(_mm512_load_ps(totals + (t * kTileGroups + g) * kGroupOutputs), call.outputs - output,
              call.kv + (first_token + t) * call.outputs + output);
    }
  }
}

// Groups side by side, by tokens: enough chains of additions (a step takes 6 cycles, two begin a cycle) and few enough
// registers: 2 for a group's values, 1 for its codes, 1 per group and token.
template <typename Isa>
void ProjectPanel(const PanelCall& call, int64_t panel) {
  const FlushSubnormals flush;
  if (call.q2k && call.tiles.tokens <= kFusedTokens) {
    switch (call.tiles.tokens) {
      case 1:
        return ProjectPanelFused<Isa, 8, 1>(call, panel);
      case 2:
        return ProjectPanelFused<Isa, 4, 2>(call, panel);
      case 3:
        return ProjectPanelFused<Isa, 4, 3>(call, panel);
      case 4:
        return ProjectPanelFused<Isa, 4, 4>(call, panel);
      default:
        return ProjectPanelFused<Isa, 4, 5>(call, panel);
    }
  }
  for (int64_t tile = 0; tile < call.tiles.count(); tile += kSumTiles) {
    const int64_t end = tile + kSumTiles < call.tiles.count() ? tile + kSumTiles : call.tiles.count();
    for (int64_t group = 0; group < kPanelGroups; group += kTileGroups) {
      if (panel * kPanelOutputs + group * kGroupOutputs >= call.outputs) break;
      ProjectTiles<Isa>(call, panel, group, tile, end);
    }
  }
}

}  // namespace
}  // namespace engram::kernels
