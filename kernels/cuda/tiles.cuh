// wkv as the projection kernel reads it: tiles of 16 outputs x 256 inputs, each lane's weights side by side.
//
// In mma.m16n8k16 a lane (group = lane / 4, quad = lane % 4) holds two rows of the 16 and four of the 16 columns. Which
// column of the product is which input is free, as long as weights and x agree. So of every 64 inputs a lane takes the
// 16 that are one Q2_K sub-block, inputs 16 quad .. 16 quad + 15, four at a time over four products: a lane never needs
// another lane's scale, and of x it reads 32 consecutive bytes.
//
// A tile of Q2_K has the 1344 bytes of its 16 blocks:
//   0     [2 rows: group, group + 8][lane] 16 bytes: a word of codes for each 64 inputs
//   1024  [lane] 8 bytes: the sub-blocks' scale bytes, for row group of the four 64s, then for row group + 8
//   1280  [group] 8 bytes: d and dmin of row group, of row group + 8
// In a word of codes, value v of the sub-block stands at bits 8 (v % 4) + 2 (v / 4): one shift and mask gives the codes
// of a product, one per byte.
// A tile of bf16 has 8192: [product 0..15][lane] 16 bytes, the lane's four registers of `a`.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/q2k.cuh"

namespace engram::kernels::cuda {

inline constexpr int kTileOutputs = 16;
inline constexpr int kQ2KTileBytes = kTileOutputs * static_cast<int>(kQ2KBlockBytes);
inline constexpr int kBf16TileBytes = kTileOutputs * static_cast<int>(kRowValues) * 2;
inline constexpr int kScalesAt = 1024;
inline constexpr int kDsAt = 1280;
inline constexpr int kSpans = 4;     // of 64 inputs, in a tile
inline constexpr int kProducts = 4;  // in a span
inline constexpr int kTileWarps = 8;

// The 16 codes of sub-block `s` of a block, as a tile's word.
__device__ __forceinline__ uint32_t CodeWord(const uint8_t* block, int s) {
  const int half = s / 8, plane = 2 * (s % 8 / 2), byte = 16 * (s % 2);
  uint32_t word = 0;
  for (int v = 0; v < 16; ++v) {
    const uint32_t code = block[16 + 32 * half + byte + v] >> plane & 3u;
    word |= code << (8 * (v % 4) + 2 * (v / 4));
  }
  return word;
}

// A warp per tile.
__global__ void __launch_bounds__(kTileWarps* kWarp)
    TileQ2KKernel(const uint8_t* __restrict__ blocks, int64_t first, int64_t count, int64_t row_blocks,
                  uint8_t* __restrict__ tiles) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, group = lane / 4, quad = lane % 4;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileWarps + static_cast<int64_t>(threadIdx.x) / kWarp;
  const int64_t tile_row = tile / row_blocks;
  if (tile_row * kTileOutputs >= count) return;
  uint8_t* const to = tiles + (first / kTileOutputs * row_blocks + tile) * kQ2KTileBytes;
  uint32_t scales[2] = {0, 0}, ds[2] = {0, 0};
  ENGRAM_UNROLL
  for (int r = 0; r < 2; ++r) {
    uint32_t words[kSpans] = {0, 0, 0, 0};
    const int64_t output = tile_row * kTileOutputs + group + 8 * r;
    if (output < count) {
      const uint8_t* const block = blocks + (output * row_blocks + tile % row_blocks) * kQ2KBlockBytes;
      ENGRAM_UNROLL
      for (int span = 0; span < kSpans; ++span) {
        words[span] = CodeWord(block, 4 * span + quad);
        scales[r] |= static_cast<uint32_t>(block[4 * span + quad]) << (8 * span);
      }
      ds[r] = reinterpret_cast<const uint32_t*>(block)[kDWord];
    }
    reinterpret_cast<uint4*>(to)[r * kWarp + lane] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  reinterpret_cast<uint2*>(to + kScalesAt)[lane] = make_uint2(scales[0], scales[1]);
  if (quad == 0) reinterpret_cast<uint2*>(to + kDsAt)[group] = make_uint2(ds[0], ds[1]);
}

__global__ void __launch_bounds__(kTileWarps* kWarp)
    TileBf16Kernel(const Bf16* __restrict__ wkv, int64_t first, int64_t count, int64_t row_blocks,
                   uint8_t* __restrict__ tiles) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, group = lane / 4, quad = lane % 4;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileWarps + static_cast<int64_t>(threadIdx.x) / kWarp;
  const int64_t tile_row = tile / row_blocks;
  if (tile_row * kTileOutputs >= count) return;
  uint4* const to = reinterpret_cast<uint4*>(tiles + (first / kTileOutputs * row_blocks + tile) * kBf16TileBytes);
  for (int product = 0; product < kSpans * kProducts; ++product) {
    uint32_t pairs[4] = {0, 0, 0, 0};  // rows group, group + 8 at values 0 and 1, then at values 2 and 3
    for (int i = 0; i < 4; ++i) {
      const int64_t output = tile_row * kTileOutputs + group + 8 * (i % 2);
      if (output >= count) continue;
      const int64_t input = tile % row_blocks * kRowValues + 64 * (product / kProducts) + 16 * quad +
                            4 * (product % kProducts) + 2 * (i / 2);
      const Bf16* const at = wkv + output * row_blocks * kRowValues + input;
      pairs[i] = static_cast<uint32_t>(at[1]) << 16 | at[0];
    }
    to[product * kWarp + lane] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// A lane's share of one tile, as the projection kernel asks for it: Load() early, OpenSpan() once per 64 inputs, then
// Operand() for each of its products.
struct Q2KTile {
  static constexpr int kBytes = kQ2KTileBytes;
  uint4 codes[2];
  uint2 scales, ds;
  FourValues four[2];

  __device__ __forceinline__ void Load(const uint8_t* tile, int lane) {
    codes[0] = LoadOnce(reinterpret_cast<const uint4*>(tile) + lane);
    codes[1] = LoadOnce(reinterpret_cast<const uint4*>(tile) + kWarp + lane);
    scales = LoadOnce(reinterpret_cast<const uint2*>(tile + kScalesAt) + lane);
    ds = LoadOnce(reinterpret_cast<const uint2*>(tile + kDsAt) + lane / 4);
  }
  __device__ __forceinline__ void OpenSpan(int span) {
    four[0] = ValuesOf(scales.x >> (8 * span) & 0xFFu, F32FromHalf(ds.x), F32FromHalf(ds.x >> 16));
    four[1] = ValuesOf(scales.y >> (8 * span) & 0xFFu, F32FromHalf(ds.y), F32FromHalf(ds.y >> 16));
  }
  __device__ __forceinline__ void Operand(int span, int product, uint32_t (&a)[4]) const {
    ENGRAM_UNROLL
    for (int r = 0; r < 2; ++r) {
      const uint32_t word = span == 0 ? codes[r].x : span == 1 ? codes[r].y : span == 2 ? codes[r].z : codes[r].w;
      const uint32_t picks = SelectorsOf(word >> (2 * product) & 0x03030303u);
      a[r] = Permute(four[r].low, four[r].high, picks);
      a[r + 2] = Permute(four[r].low, four[r].high, picks >> 16);
    }
  }
};

struct Bf16Tile {
  static constexpr int kBytes = kBf16TileBytes;
  const uint4* values = nullptr;  // of a warp without blocks it stays that

  __device__ __forceinline__ void Load(const uint8_t* tile, int lane) {
    values = reinterpret_cast<const uint4*>(tile) + lane;
  }
  __device__ __forceinline__ void OpenSpan(int) {}
  __device__ __forceinline__ void Operand(int span, int product, uint32_t (&a)[4]) const {
    const uint4 words = LoadOnce(values + (span * kProducts + product) * kWarp);
    a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
  }
};

template <typename Kernel, typename Weight>
cudaError_t LaunchTiling(Kernel kernel, const Weight* wkv, int64_t first, int64_t count, const TiledWeights& weights,
                         uint8_t* tiles, cudaStream_t stream) {
  const bool whole = count % kTileOutputs == 0 || first + count == weights.outputs;
  if (weights.inputs < kRowValues || weights.inputs % kRowValues != 0 || first < 0 || first % kTileOutputs != 0 ||
      count < 0 || count > weights.outputs - first || !whole) {
    return cudaErrorInvalidValue;
  }
  const int64_t row_blocks = weights.inputs / kRowValues;
  const int64_t warps = (count + kTileOutputs - 1) / kTileOutputs * row_blocks;
  return Launch(kernel, (warps + kTileWarps - 1) / kTileWarps, kTileWarps * kWarp, 0, stream, wkv, first, count,
                row_blocks, tiles);
}

cudaError_t TileQ2K(const uint8_t* blocks, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
                    cudaStream_t stream) {
  return LaunchTiling(&TileQ2KKernel, blocks, first, count, weights, tiles, stream);
}

cudaError_t TileBf16(const Bf16* wkv, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
                     cudaStream_t stream) {
  return LaunchTiling(&TileBf16Kernel, wkv, first, count, weights, tiles, stream);
}

}  // namespace engram::kernels::cuda
