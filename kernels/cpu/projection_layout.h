// How the CPU twin keeps wkv: outputs in the lanes, k in sequence, panels of 128 outputs one behind the other.
//
// A group is 16 outputs, one f32 accumulator of AVX-512; a panel is 8 groups. The last panel is filled up with outputs
// whose weights are zero, which nobody stores.
//
//   Q2_K   [panel][block of 256 k][group] of 1344 bytes, the bytes of 16 blocks in another order:
//            d f16[16], dmin f16[16], scales u8[16 sub-blocks][16 outputs], codes u16[16 sub-blocks][32]
//          Word w of a sub-block belongs to output w / 2 of the group; its bits 2p..2p+1 are the code of
//          k = 2p + w % 2. So word w of a register shifted by 2p is the w-th factor of vdpbf16ps for that pair.
//   bf16   [panel][k / 2][group][output][k % 2]
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/projection_order.h"

namespace engram::kernels {

inline constexpr int64_t kGroupOutputs = 16;
inline constexpr int64_t kPanelGroups = 8;
inline constexpr int64_t kPanelOutputs = kGroupOutputs * kPanelGroups;

inline constexpr int64_t kGroupScales = 64;                 // behind d and dmin
inline constexpr int64_t kGroupCodes = kGroupScales + 256;  // behind the scales
inline constexpr int64_t kGroupBytes = kGroupCodes + 16 * 64;
static_assert(kGroupBytes == kGroupOutputs * kQ2KBlockBytes);
inline constexpr int64_t kPanelBlockBytes = kPanelGroups * kGroupBytes;  // of Q2_K, per 256 k
inline constexpr int64_t kPanelPairBytes = kPanelGroups * 64;            // of bf16, per pair of k

constexpr int64_t PanelsOf(const ProjectionWeights& weights) {
  return (weights.outputs + kPanelOutputs - 1) / kPanelOutputs;
}

constexpr int64_t PackedPanelBytes(int64_t inputs, bool q2k) {
  return q2k ? inputs / kRowValues * kPanelBlockBytes : inputs / 2 * kPanelPairBytes;
}

// Tokens that share the registers of one inner loop. x is packed for them: [tile][inputs / 2][tokens of the tile] pairs
// of bf16, tiles one behind the other, so that a tile of tokens [begin, end) stands at begin * inputs.
//
// Why 12: 2 groups by 12 tokens are 24 accumulators of 32 registers; at 2 multiply-adds a cycle with a latency of 6, 12
// would do, and every load of weights serves 12. Tokens are spread evenly, since a tile of 1 costs as much as one of 6.
inline constexpr int64_t kTileTokens = 12;

struct Tiles {
  int64_t tokens = 0;

  int64_t count() const { return (tokens + kTileTokens - 1) / kTileTokens; }
  int64_t begin(int64_t tile) const { return tile * tokens / count(); }
};

// The arguments of a panel's projection.
struct PanelCall {
  const uint8_t* packed = nullptr;  // of all panels
  bool q2k = false;
  int64_t outputs = 0, inputs = 0;
  Tiles tiles;
  const Bf16* x = nullptr;  // packed by tiles
  Bf16* kv = nullptr;       // [tokens, outputs]

  const uint8_t* panel(int64_t index) const { return packed + index * PackedPanelBytes(inputs, q2k); }
};

}  // namespace engram::kernels
