// Q2_K rows to bf16: rows on their way while one is decoded, and a decoder by vectors of kBytes.
#pragma once

#include "kernels/cpu/loops.h"
#include "kernels/cpu/vectors.h"

namespace engram::kernels {
namespace {

// Rows whose lines are on the way while one is decoded: decoding takes some 70 ns, a miss to memory some 100 ns and the
// page walk of a random row in a table of many GiB up to two more, so 300 / 70 = 5 rows cover both; 16 leaves room for
// a busy bus (8, 16 and 32 did not differ beyond noise on a 2 GB table).
constexpr int64_t kPrefetchDistance = 16;

// A row of 84 bytes touches two or three lines of 64: its first byte, its last, and one between.
ENGRAM_ALWAYS_INLINE void PrefetchRow(const uint8_t* row) {
  __builtin_prefetch(row);
  __builtin_prefetch(row + 64);
  __builtin_prefetch(row + kQ2KBlockBytes - 1);
}

template <int kBytes>
struct RowDecoder {
  // DecodeQ2K and Bf16FromF32 in one pass; exact, so the order of work is free.
  static ENGRAM_ALWAYS_INLINE void Decode(const uint8_t* block, Bf16* out) {
    using V = Vectors<kBytes>;
    const float d = F32FromF16(LoadUnaligned<uint16_t>(block + 80));
    const float dmin = F32FromF16(LoadUnaligned<uint16_t>(block + 82));
    auto* to = reinterpret_cast<uint8_t*>(out);
    for (int sub = 0; sub < 16; ++sub) {
      const float step = d * static_cast<float>(block[sub] & 15);
      const float minimum = dmin * static_cast<float>(block[sub] >> 4);
      const uint8_t* codes = block + 16 + 32 * (sub / 8) + 16 * (sub % 2);
      const int shift = sub % 8 / 2 * 2;
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += V::kFloats) {
        typename V::Bytes bytes;
        __builtin_memcpy(&bytes, codes + i, sizeof(bytes));
        // Widened in two steps: GCC 12 takes a step of four apart, byte by byte.
        const auto wide = __builtin_convertvector(bytes, typename V::HalfWords);
        const auto code = __builtin_convertvector((wide >> shift) & 3, typename V::Int);
        const typename V::Float value = step * __builtin_convertvector(code, typename V::Float) - minimum;
        Elements<kBytes, Bf16>::Store(value, to + (16 * sub + i) * 2);
      }
    }
  }
};

template <typename Decoder>
void GatherRange(const GatherCall& call, int64_t begin, int64_t end) {
  // Rows are counted token by token; `token` and `column` are the place of `row`, `ahead_*` of the row to prefetch.
  int64_t ahead_token = begin / call.columns;
  int64_t ahead_column = begin % call.columns;
  int64_t ahead = begin;
  const auto prefetch_next = [&] {
    if (ahead >= end) return;
    const int64_t id = call.ids[ahead_token * call.id_stride + ahead_column];
    if (id >= 0) PrefetchRow(call.table.bytes + id * kQ2KBlockBytes);
    ++ahead;
    if (++ahead_column == call.columns) {
      ahead_column = 0;
      ++ahead_token;
    }
  };
  for (int64_t i = 0; i < kPrefetchDistance; ++i) prefetch_next();

  int64_t token = begin / call.columns;
  int64_t column = begin % call.columns;
  for (int64_t row = begin; row < end; ++row) {
    prefetch_next();
    const int64_t id = call.ids[token * call.id_stride + column];
    Bf16* out = call.out + row * kRowValues;
    if (id < 0) {
      __builtin_memset(out, 0, kRowValues * sizeof(Bf16));
    } else {
      Decoder::Decode(call.table.bytes + id * kQ2KBlockBytes, out);
    }
    if (++column == call.columns) {
      column = 0;
      ++token;
    }
  }
}

}  // namespace
}  // namespace engram::kernels
