// Projection of a bf16 panel in plain C++, in the order of projection_order.h. Without an FMA instruction the library's
// does its work: right, and some fifty times slower; x86-64 machines of the last decade have AVX2 and do not come here.
#pragma once

#include "kernels/cpu/projection_layout.h"
#include "kernels/projection_order.h"
#include "kernels/scalar.h"

namespace engram::kernels {
namespace {

void ProjectPanelPortable(const PanelCall& call, int64_t panel) {
  const uint8_t* weights = call.panel(panel);
  const int64_t first = panel * kPanelOutputs;
  const int64_t outputs = call.outputs - first < kPanelOutputs ? call.outputs - first : kPanelOutputs;
  for (int64_t tile = 0; tile < call.tiles.count(); ++tile) {
    const int64_t begin = call.tiles.begin(tile);
    const int64_t tokens = call.tiles.begin(tile + 1) - begin;
    const Bf16* x = call.x + begin * call.inputs;
    for (int64_t t = 0; t < tokens; ++t) {
      float total[kPanelOutputs] = {};
      for (int64_t k = 0; k < call.inputs; k += kProjectionChunk) {
        float sum[kPanelOutputs] = {};
        const int64_t end = k + kProjectionChunk < call.inputs ? k + kProjectionChunk : call.inputs;
        for (int64_t p = k / 2; p < end / 2; ++p) {
          const Bf16* pair = x + (p * tokens + t) * 2;
          const uint8_t* row = weights + p * kPanelPairBytes;
          for (int64_t o = 0; o < outputs; ++o) {
            sum[o] = ProjectionStep(sum[o], LoadUnaligned<Bf16>(row + 4 * o + 2), pair[1]);
            sum[o] = ProjectionStep(sum[o], LoadUnaligned<Bf16>(row + 4 * o), pair[0]);
          }
        }
        for (int64_t o = 0; o < outputs; ++o) total[o] = FlushSubnormal(total[o] + sum[o]);
      }
      Bf16* kv = call.kv + (begin + t) * call.outputs + first;
      for (int64_t o = 0; o < outputs; ++o) kv[o] = Bf16FromF32(total[o]);
    }
  }
}

}  // namespace
}  // namespace engram::kernels
