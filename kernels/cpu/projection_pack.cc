#include "kernels/cpu/projection_pack.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/scalar.h"

namespace engram::kernels {
namespace {

// One output's block of 256 weights into lane `lane` of its group.
void PackBlock(const uint8_t* block, int64_t lane, uint8_t* group) {
  std::memcpy(group + 2 * lane, block + 80, 2);
  std::memcpy(group + 32 + 2 * lane, block + 82, 2);
  for (int64_t sub = 0; sub < 16; ++sub) {
    group[kGroupScales + 16 * sub + lane] = block[sub];
    const uint8_t* codes = block + 16 + 32 * (sub / 8) + 16 * (sub % 2);
    const int shift = static_cast<int>(sub % 8 / 2 * 2);
    uint32_t words[2] = {};
    for (int i = 0; i < 16; ++i) words[i % 2] |= static_cast<uint32_t>((codes[i] >> shift) & 3) << (i / 2 * 2);
    uint8_t* to = group + kGroupCodes + 64 * sub + 4 * lane;
    StoreUnaligned(to, static_cast<uint16_t>(words[0]));
    StoreUnaligned(to + 2, static_cast<uint16_t>(words[1]));
  }
}

void ExpandOutput(const ProjectionWeights& weights, int64_t output, Bf16* row) {
  if (weights.bf16 != nullptr) {
    std::memcpy(row, weights.bf16 + output * weights.inputs, static_cast<size_t>(weights.inputs) * sizeof(Bf16));
    return;
  }
  const uint8_t* blocks = weights.q2k + output * (weights.inputs / kRowValues) * kQ2KBlockBytes;
  for (int64_t k = 0; k < weights.inputs; k += kRowValues, blocks += kQ2KBlockBytes) {
    float values[kRowValues];
    DecodeQ2K(blocks, values);
    for (int64_t i = 0; i < kRowValues; ++i) row[k + i] = Bf16FromF32(values[i]);
  }
}

}  // namespace

void PackQ2K(const ProjectionWeights& weights, uint8_t* packed, Workers& workers) {
  const int64_t blocks = weights.inputs / kRowValues;
  const int64_t panel_bytes = PackedPanelBytes(weights.inputs, true);
  workers.ForEachRange(PanelsOf(weights), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      uint8_t* to = packed + panel * panel_bytes;
      std::memset(to, 0, static_cast<size_t>(panel_bytes));
      const int64_t first = panel * kPanelOutputs;
      for (int64_t i = 0; i < std::min(kPanelOutputs, weights.outputs - first); ++i) {
        for (int64_t b = 0; b < blocks; ++b) {
          PackBlock(weights.q2k + ((first + i) * blocks + b) * kQ2KBlockBytes, i % kGroupOutputs,
                    to + (b * kPanelGroups + i / kGroupOutputs) * kGroupBytes);
        }
      }
    }
  });
}

void PackBf16(const ProjectionWeights& weights, uint8_t* packed, Workers& workers) {
  const int64_t panel_bytes = PackedPanelBytes(weights.inputs, false);
  workers.ForEachRange(PanelsOf(weights), 1, [&](int64_t begin, int64_t end) {
    std::vector<Bf16> row(static_cast<size_t>(weights.inputs));
    for (int64_t panel = begin; panel < end; ++panel) {
      uint8_t* to = packed + panel * panel_bytes;
      std::memset(to, 0, static_cast<size_t>(panel_bytes));
      const int64_t first = panel * kPanelOutputs;
      for (int64_t i = 0; i < std::min(kPanelOutputs, weights.outputs - first); ++i) {
        ExpandOutput(weights, first + i, row.data());
        for (int64_t k = 0; k < weights.inputs; k += 2) {
          std::memcpy(to + k / 2 * kPanelPairBytes + 4 * i, row.data() + k, 4);
        }
      }
    }
  });
}

void PackTokens(const Bf16* x, const Tiles& tiles, int64_t inputs, Bf16* packed, Workers& workers) {
  // Runs of 512 pairs: 2 KiB of every token of a tile, so that what is read and written stays in the first-level cache.
  constexpr int64_t kRun = 512;
  const int64_t pairs = inputs / 2;
  const int64_t runs = (pairs + kRun - 1) / kRun;
  workers.ForEachRange(tiles.count() * runs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = tiles.begin(i / runs);
      const int64_t tokens = tiles.begin(i / runs + 1) - first;
      const auto* from = reinterpret_cast<const uint8_t*>(x + first * inputs);
      auto* to = reinterpret_cast<uint8_t*>(packed + first * inputs);
      const int64_t last = std::min(pairs, (i % runs + 1) * kRun);
      for (int64_t p = i % runs * kRun; p < last; ++p) {
        for (int64_t t = 0; t < tokens; ++t) {
          StoreUnaligned(to + (p * tokens + t) * 4, LoadUnaligned<uint32_t>(from + (t * pairs + p) * 4));
        }
      }
    }
  });
}

}  // namespace engram::kernels
