// Rows of a table: gather fused with the decoding of Q2_K, and rows as they are.
//
// A warp takes a row: lanes 0..20 load a word each, which is the row's 84 bytes in two to four sectors, and each lane
// decodes and stores 8 values, 16 bytes. A random row is one miss of some 600 ns, so a warp has several under way.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/q2k.cuh"

namespace engram::kernels::cuda {

// Little's law: 4.3 TB/s times 600 ns is 2.6 MB in flight, 20 KB for each of 132 multiprocessors, 230 rows of 84 bytes;
// 64 resident warps of 4 rows are 256.
inline constexpr int kRowsPerWarp = 4;
inline constexpr int kGatherWarps = 8;
inline constexpr int kRowsPerBlock = kRowsPerWarp * kGatherWarps;

// Words `lane` of rows first .. first + kRowsPerWarp - 1; zeros for a row of zeros, beyond the row's words, and beyond
// `count`.
__device__ __forceinline__ void LoadRows(const uint32_t* table, const int64_t* ids, int64_t count, int64_t first,
                                         int lane, uint32_t (&words)[kRowsPerWarp]) {
  ENGRAM_UNROLL
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int64_t row = first + i;
    int64_t id = -1;
    if (row < count) id = ids == nullptr ? row : ids[row];
    words[i] = id >= 0 && lane < kBlockWords ? table[id * kBlockWords + lane] : 0;
  }
}

__global__ void __launch_bounds__(kGatherWarps* kWarp)
    GatherRowsKernel(const uint32_t* __restrict__ table, const int64_t* __restrict__ ids, int64_t count,
                     uint4* __restrict__ out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kGatherWarps + static_cast<int64_t>(threadIdx.x) / kWarp) * kRowsPerWarp;
  if (first >= count) return;
  uint32_t words[kRowsPerWarp];
  LoadRows(table, ids, count, first, lane, words);
  // This lane's values are 8 lane .. 8 lane + 7: of one 2-bit plane of eight consecutive code bytes, in one sub-block.
  const int code_word = kCodeWords + 8 * (lane / 16) + 2 * (lane % 4);
  const int plane = 2 * (lane % 16 / 4);
  const int scale_shift = 8 * (lane / 2 % 4);
  ENGRAM_UNROLL
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const uint32_t near_codes = __shfl_sync(kAllLanes, words[i], code_word);
    const uint32_t far_codes = __shfl_sync(kAllLanes, words[i], code_word + 1);
    const uint32_t scales = __shfl_sync(kAllLanes, words[i], lane / 8);
    const uint32_t ds = __shfl_sync(kAllLanes, words[i], kDWord);
    if (first + i >= count) continue;
    const FourValues four = ValuesOf(scales >> scale_shift & 0xFFu, F32FromHalf(ds), F32FromHalf(ds >> 16));
    const uint32_t near_picks = SelectorsOf(near_codes >> plane & 0x03030303u);
    const uint32_t far_picks = SelectorsOf(far_codes >> plane & 0x03030303u);
    uint4 values;
    values.x = Permute(four.low, four.high, near_picks);
    values.y = Permute(four.low, four.high, near_picks >> 16);
    values.z = Permute(four.low, four.high, far_picks);
    values.w = Permute(four.low, four.high, far_picks >> 16);
    out[(first + i) * kWarp + lane] = values;
  }
}

__global__ void __launch_bounds__(kGatherWarps* kWarp)
    CopyRowsKernel(const uint32_t* __restrict__ table, const int64_t* __restrict__ ids, int64_t count,
                   uint32_t* __restrict__ out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first =
      (static_cast<int64_t>(blockIdx.x) * kGatherWarps + static_cast<int64_t>(threadIdx.x) / kWarp) * kRowsPerWarp;
  uint32_t words[kRowsPerWarp];
  LoadRows(table, ids, count, first, lane, words);
  ENGRAM_UNROLL
  for (int i = 0; i < kRowsPerWarp; ++i) {
    if (first + i < count && lane < kBlockWords) out[(first + i) * kBlockWords + lane] = words[i];
  }
}

constexpr int64_t GatherBlocks(int64_t count) { return (count + kRowsPerBlock - 1) / kRowsPerBlock; }

cudaError_t GatherRows(const GatherCall& call, Bf16* out, cudaStream_t stream) {
  if (call.count < 0) return cudaErrorInvalidValue;
  return Launch(&GatherRowsKernel, GatherBlocks(call.count), kGatherWarps * kWarp, 0, stream,
                reinterpret_cast<const uint32_t*>(call.table), call.ids, call.count, reinterpret_cast<uint4*>(out));
}

cudaError_t CopyRows(const GatherCall& call, uint8_t* out, cudaStream_t stream) {
  if (call.count < 0) return cudaErrorInvalidValue;
  return Launch(&CopyRowsKernel, GatherBlocks(call.count), kGatherWarps * kWarp, 0, stream,
                reinterpret_cast<const uint32_t*>(call.table), call.ids, call.count, reinterpret_cast<uint32_t*>(out));
}

}  // namespace engram::kernels::cuda
