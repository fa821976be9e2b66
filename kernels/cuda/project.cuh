// kv = wkv · x for up to 64 tokens: one mma.sync product after another, over weights in tiles (tiles.cuh).
//
// The order of a sum, whatever the number of tokens, the grid and the source of the weights: the row's B = inputs / 256
// blocks are cut into 8 slices, slice s from block B·s/8 to B·(s+1)/8. Within a slice a sum starts at +0 and takes
// blocks, their four spans of 64 inputs and the four products of each span in ascending order; slices are added to +0
// in ascending order, in f32; the total is rounded once to bf16. A product adds its 16 terms as the tensor core does.
//
// Two kernels keep that order. Up to 16 tokens, reading the weights is the work: the 8 warps of a block take a slice
// each, so that enough loads are in flight, and add up in shared memory. Beyond, x is the larger read: a warp takes two
// tiles of outputs for all tokens, so that x read from shared memory serves 32 outputs, and the slices follow each
// other.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/tiles.cuh"

namespace engram::kernels::cuda {

inline constexpr int kSlices = 8;
inline constexpr int kTokenTile = 8;  // tokens of a product
inline constexpr int kNarrowThreads = kSlices * kWarp;
// Of the narrow kernel, on a multiprocessor: 16 warps with two tiles of 1344 bytes under way each are 43 KB in flight,
// and 4.3 TB/s times some 800 ns, over 132 multiprocessors, are 26 KB.
inline constexpr int kNarrowBlocks = 2;

// A lane's part of x for a product: [token tile] two registers.
template <int kTokenTiles>
struct SpanOfX {
  uint4 near_half[kTokenTiles], far_half[kTokenTiles];

  __device__ __forceinline__ void Operand(int tile, int product, uint32_t (&b)[2]) const {
    const uint4& half = product < 2 ? near_half[tile] : far_half[tile];
    b[0] = product % 2 == 0 ? half.x : half.z;
    b[1] = product % 2 == 0 ? half.y : half.w;
  }
};

template <typename Tile, int kTokenTiles>
__device__ __forceinline__ void AddSpan(Tile& tile, int span, const SpanOfX<kTokenTiles>& x,
                                        float (&sums)[kTokenTiles][4]) {
  tile.OpenSpan(span);
  ENGRAM_UNROLL
  for (int product = 0; product < kProducts; ++product) {
    uint32_t a[4];
    tile.Operand(span, product, a);
    ENGRAM_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) {
      uint32_t b[2];
      x.Operand(t, product, b);
      Mma(sums[t], a, b);
    }
  }
}

// Where a narrow block's warp stands: `tile_row` of the outputs, `block` of its slice's inputs.
struct NarrowPlace {
  int64_t tile_row;
  int64_t block;

  __device__ __forceinline__ void Advance(int64_t begin, int64_t end) {
    if (++block < end) return;
    block = begin;
    tile_row += gridDim.x;
  }
};

template <typename Tile, int kTokenTiles>
__global__ void __launch_bounds__(kNarrowThreads, kNarrowBlocks)
    ProjectNarrowKernel(const uint8_t* __restrict__ tiles, int64_t outputs, int64_t row_blocks,
                        const Bf16* __restrict__ x, int tokens, Bf16* __restrict__ kv) {
  constexpr int kSums = kTokenTiles * 4 * kWarp;  // of a warp
  // Two sets, so that one barrier per tile row is enough: who writes a set again has passed the barrier of the set
  // between, which everybody reached after reading.
  ENGRAM_SHARED(float, partial, 2 * kSlices * kSums);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, slice = static_cast<int>(threadIdx.x) / kWarp;
  const int group = lane / 4, quad = lane % 4;
  const int64_t begin = row_blocks * slice / kSlices, end = row_blocks * (slice + 1) / kSlices;
  const int64_t tile_rows = (outputs + kTileOutputs - 1) / kTileOutputs;
  const int64_t inputs = row_blocks * kRowValues;

  // One tile ahead of the one being computed, across tile rows.
  Tile tile, next;
  NarrowPlace ahead = {static_cast<int64_t>(blockIdx.x), begin};
  if (begin < end && ahead.tile_row < tile_rows) {
    next.Load(tiles + (ahead.tile_row * row_blocks + ahead.block) * Tile::kBytes, lane);
  }
  int set = 0;
  for (int64_t tile_row = blockIdx.x; tile_row < tile_rows; tile_row += gridDim.x, set ^= 1) {
    float sums[kTokenTiles][4] = {};
    for (int64_t block = begin; block < end; ++block) {
      tile = next;
      ahead.Advance(begin, end);
      if (ahead.tile_row < tile_rows) {
        next.Load(tiles + (ahead.tile_row * row_blocks + ahead.block) * Tile::kBytes, lane);
      }
      ENGRAM_UNROLL
      for (int span = 0; span < kSpans; ++span) {
        SpanOfX<kTokenTiles> part;
        ENGRAM_UNROLL
        for (int t = 0; t < kTokenTiles; ++t) {
          part.near_half[t] = part.far_half[t] = make_uint4(0, 0, 0, 0);
          const int token = t * kTokenTile + group;
          if (token >= tokens) continue;
          const uint4* const from =
              reinterpret_cast<const uint4*>(x + token * inputs + block * kRowValues + 64 * span + 16 * quad);
          part.near_half[t] = __ldg(from);
          part.far_half[t] = __ldg(from + 1);
        }
        AddSpan(tile, span, part, sums);
      }
    }
    float* const mine = partial + set * kSlices * kSums;
    ENGRAM_UNROLL
    for (int t = 0; t < kTokenTiles; ++t) {
      ENGRAM_UNROLL
      for (int i = 0; i < 4; ++i) mine[slice * kSums + (t * 4 + i) * kWarp + lane] = sums[t][i];
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= kSums) continue;
    float total = 0.0f;
    ENGRAM_UNROLL
    for (int s = 0; s < kSlices; ++s) total = __fadd_rn(total, mine[s * kSums + static_cast<int>(threadIdx.x)]);
    // Thread (t, i, lane) has what lane's sums[t][i] stands for.
    const int t = slice / 4, i = slice % 4;
    const int64_t output = tile_row * kTileOutputs + group + 8 * (i / 2);
    const int token = t * kTokenTile + 2 * quad + i % 2;
    if (output < outputs && token < tokens) kv[token * outputs + output] = static_cast<Bf16>(PackBf16(total, 0.0f));
  }
}

inline constexpr int kWideTiles = 2;  // of outputs, per warp
inline constexpr int kMostWideWarps = 8;
inline constexpr int kStages = 2;
// Bytes of a token's 256 inputs in shared memory: 16 more than they have, so that the eight lanes of a quarter of a
// 16-byte read, two tokens of four quads, meet all 32 banks.
inline constexpr int kStageRow = 2 * static_cast<int>(kRowValues) + 16;

constexpr int64_t WideStageBytes(int token_tiles) { return int64_t{kStages} * token_tiles * kTokenTile * kStageRow; }
constexpr int64_t WideTotalBytes(int token_tiles) { return int64_t{kWideTiles} * token_tiles * 4 * kWarp * 4; }

// Starts the copy of block `block` of all tokens' x into a stage; zeros for tokens that are not there.
template <int kTokenTiles>
__device__ __forceinline__ void StageX(unsigned char* stage, const Bf16* x, int tokens, int64_t row_blocks,
                                       int64_t block) {
  constexpr int kChunks = 2 * static_cast<int>(kRowValues) / 16;
  for (int i = static_cast<int>(threadIdx.x); i < kTokenTiles * kTokenTile * kChunks;
       i += static_cast<int>(blockDim.x)) {
    const int token = i / kChunks, chunk = i % kChunks;
    const bool valid = token < tokens;
    const Bf16* const from = x + ((valid ? token : 0) * row_blocks + block) * kRowValues + chunk * 8;
    CopyAsync16(stage + token * kStageRow + chunk * 16, from, valid);
  }
}

template <typename Tile, int kTokenTiles>
__global__ void __launch_bounds__(kMostWideWarps* kWarp, 1)
    ProjectWideKernel(const uint8_t* __restrict__ tiles, int64_t outputs, int64_t row_blocks,
                      const Bf16* __restrict__ x, int tokens, Bf16* __restrict__ kv) {
  ENGRAM_DYNAMIC_SHARED(shared);
  constexpr int kStageBytes = kTokenTiles * kTokenTile * kStageRow;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = lane / 4, quad = lane % 4;
  const int64_t tile_rows = (outputs + kTileOutputs - 1) / kTileOutputs;
  const int64_t warps = blockDim.x / kWarp;
  // Totals of earlier slices: each lane's own, [tile][token tile][4][lane].
  float* const totals =
      reinterpret_cast<float*>(shared + kStages * kStageBytes) + warp * kWideTiles * kTokenTiles * 4 * kWarp + lane;

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * warps * kWideTiles; first < tile_rows;
       first += static_cast<int64_t>(gridDim.x) * warps * kWideTiles) {
    // A warp beyond the outputs reads the last tiles again, and stores nothing: it has barriers to reach.
    int64_t rows[kWideTiles];
    Tile tile[kWideTiles], next[kWideTiles];
    ENGRAM_UNROLL
    for (int w = 0; w < kWideTiles; ++w) {
      rows[w] = first + warp * kWideTiles + w;
      next[w].Load(tiles + (rows[w] < tile_rows ? rows[w] : tile_rows - 1) * row_blocks * Tile::kBytes, lane);
    }
    float sums[kWideTiles][kTokenTiles][4] = {};
    ENGRAM_UNROLL
    for (int i = 0; i < kWideTiles * kTokenTiles * 4; ++i) totals[i * kWarp] = 0.0f;
    __syncthreads();  // nobody reads the stages of the outputs before
    StageX<kTokenTiles>(shared, x, tokens, row_blocks, 0);
    CommitCopies();
    int slice = 0;
    for (int64_t block = 0; block < row_blocks; ++block) {
      WaitCopies<0>();
      __syncthreads();  // this block's x is there, and nobody reads the stage before it any more
      ENGRAM_UNROLL
      for (int w = 0; w < kWideTiles; ++w) tile[w] = next[w];
      if (block + 1 < row_blocks) {
        StageX<kTokenTiles>(shared + (block + 1) % kStages * kStageBytes, x, tokens, row_blocks, block + 1);
        CommitCopies();
        ENGRAM_UNROLL
        for (int w = 0; w < kWideTiles; ++w) {
          const int64_t row = rows[w] < tile_rows ? rows[w] : tile_rows - 1;
          next[w].Load(tiles + (row * row_blocks + block + 1) * Tile::kBytes, lane);
        }
      }
      const unsigned char* const stage = shared + block % kStages * kStageBytes;
      ENGRAM_UNROLL
      for (int span = 0; span < kSpans; ++span) {
        ENGRAM_UNROLL
        for (int w = 0; w < kWideTiles; ++w) tile[w].OpenSpan(span);
        ENGRAM_UNROLL
        for (int half = 0; half < 2; ++half) {
          uint4 part[kTokenTiles];
          ENGRAM_UNROLL
          for (int t = 0; t < kTokenTiles; ++t) {
            part[t] = *reinterpret_cast<const uint4*>(stage + (t * kTokenTile + group) * kStageRow + 128 * span +
                                                      32 * quad + 16 * half);
          }
          ENGRAM_UNROLL
          for (int product = 0; product < 2; ++product) {
            ENGRAM_UNROLL
            for (int w = 0; w < kWideTiles; ++w) {
              uint32_t a[4];
              tile[w].Operand(span, 2 * half + product, a);
              ENGRAM_UNROLL
              for (int t = 0; t < kTokenTiles; ++t) {
                const uint32_t b[2] = {product == 0 ? part[t].x : part[t].z, product == 0 ? part[t].y : part[t].w};
                Mma(sums[w][t], a, b);
              }
            }
          }
        }
      }
      // The end of a slice, or of several where slices are empty: an empty one adds +0.
      while (slice < kSlices && block + 1 >= row_blocks * (slice + 1) / kSlices) {
        ENGRAM_UNROLL
        for (int w = 0; w < kWideTiles; ++w) {
          ENGRAM_UNROLL
          for (int t = 0; t < kTokenTiles; ++t) {
            ENGRAM_UNROLL
            for (int i = 0; i < 4; ++i) {
              float& total = totals[((w * kTokenTiles + t) * 4 + i) * kWarp];
              total = __fadd_rn(total, sums[w][t][i]);
              sums[w][t][i] = 0.0f;
            }
          }
        }
        ++slice;
      }
    }
    ENGRAM_UNROLL
    for (int w = 0; w < kWideTiles; ++w) {
      ENGRAM_UNROLL
      for (int t = 0; t < kTokenTiles; ++t) {
        ENGRAM_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int64_t output = rows[w] * kTileOutputs + group + 8 * (i / 2);
          const int token = t * kTokenTile + 2 * quad + i % 2;
          if (output >= outputs || token >= tokens) continue;
          kv[token * outputs + output] =
              static_cast<Bf16>(PackBf16(totals[((w * kTokenTiles + t) * 4 + i) * kWarp], 0.0f));
        }
      }
    }
  }
}

template <typename Tile, int kTokenTiles>
cudaError_t LaunchNarrow(const TiledWeights& weights, const Bf16* x, int tokens, Bf16* kv, int multiprocessors,
                         cudaStream_t stream) {
  const int64_t tile_rows = (weights.outputs + kTileOutputs - 1) / kTileOutputs;
  const int64_t resident = int64_t{kNarrowBlocks} * multiprocessors;
  return Launch(&ProjectNarrowKernel<Tile, kTokenTiles>, tile_rows < resident ? tile_rows : resident, kNarrowThreads, 0,
                stream, weights.tiles, weights.outputs, weights.inputs / kRowValues, x, tokens, kv);
}

template <typename Tile, int kTokenTiles>
cudaError_t LaunchWide(const TiledWeights& weights, const Bf16* x, int tokens, Bf16* kv, int multiprocessors,
                       cudaStream_t stream) {
  const int64_t pairs = ((weights.outputs + kTileOutputs - 1) / kTileOutputs + kWideTiles - 1) / kWideTiles;
  int device = 0, most_shared = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      error != cudaSuccess) {
    return error;
  }
  // As many warps as give every multiprocessor one block and no second round, where that many have room.
  int64_t warps = (pairs + multiprocessors - 1) / multiprocessors;
  const int64_t room = (most_shared - WideStageBytes(kTokenTiles)) / WideTotalBytes(kTokenTiles);
  if (warps > room) warps = room;
  if (warps > kMostWideWarps) warps = kMostWideWarps;
  if (warps < 1) return cudaErrorInvalidValue;
  const int64_t shared = WideStageBytes(kTokenTiles) + warps * WideTotalBytes(kTokenTiles);
  const auto kernel = &ProjectWideKernel<Tile, kTokenTiles>;
  if (const cudaError_t error = cudaFuncSetAttribute(
          reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
      error != cudaSuccess) {
    return error;
  }
  const int64_t blocks = (pairs + warps - 1) / warps;
  return Launch(kernel, blocks < multiprocessors ? blocks : multiprocessors, static_cast<int>(warps) * kWarp,
                static_cast<size_t>(shared), stream, weights.tiles, weights.outputs, weights.inputs / kRowValues, x,
                tokens, kv);
}

template <typename Tile>
cudaError_t ProjectPasses(const TiledWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, int multiprocessors,
                          cudaStream_t stream) {
  for (int64_t first = 0; first < tokens; first += kProjectTokens) {
    const int now = static_cast<int>(tokens - first < kProjectTokens ? tokens - first : kProjectTokens);
    const auto launch = now <= kTokenTile       ? &LaunchNarrow<Tile, 1>
                        : now <= 2 * kTokenTile ? &LaunchNarrow<Tile, 2>
                        : now <= 4 * kTokenTile ? &LaunchWide<Tile, 4>
                                                : &LaunchWide<Tile, 8>;
    const cudaError_t error =
        launch(weights, x + first * weights.inputs, now, kv + first * weights.outputs, multiprocessors, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t Project(const TiledWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, int multiprocessors,
                    cudaStream_t stream) {
  if (weights.outputs < 1 || weights.inputs < kRowValues || weights.inputs % kRowValues != 0 || tokens < 0 ||
      multiprocessors < 1) {
    return cudaErrorInvalidValue;
  }
  const auto passes = weights.source == TileSource::kQ2K ? &ProjectPasses<Q2KTile> : &ProjectPasses<Bf16Tile>;
  return passes(weights, x, tokens, kv, multiprocessors, stream);
}

}  // namespace engram::kernels::cuda
