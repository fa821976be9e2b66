// The scalar twin: docs/numerics.md, sentence by sentence. Nothing here is fast, and nothing here should become so.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/gate_value.h"
#include "kernels/kernels.h"
#include "kernels/projection_order.h"
#include "kernels/scalar.h"

namespace engram::kernels {
namespace {

int64_t FloorMod(int64_t value, int64_t modulus) {
  const int64_t remainder = value % modulus;
  return remainder < 0 ? remainder + modulus : remainder;
}

void HashWindow(const HashTables& tables, const int32_t* window, int64_t tokens, int64_t* ids, Workers&) {
  const int n = tables.max_ngram;
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* current = window + t + n - 1;
    // `blocked` is sticky and starts with the current token: a dead token hides itself and all before it.
    int64_t gram[kMaxNgram];
    bool blocked = false;
    for (int j = 0; j < n; ++j) {
      blocked = blocked || current[-j] == kDead;
      gram[j] = blocked ? tables.pad_id : current[-j];
    }
    for (int layer = 0; layer < tables.layers; ++layer) {
      const int64_t* multipliers = tables.multipliers + static_cast<int64_t>(layer) * n;
      const int64_t* primes = tables.primes + static_cast<int64_t>(layer) * tables.columns();
      const int64_t* offsets = tables.offsets + static_cast<int64_t>(layer) * tables.columns();
      // Unsigned, so that the products wrap by definition.
      uint64_t roll = static_cast<uint64_t>(gram[0]) * static_cast<uint64_t>(multipliers[0]);
      for (int g = 1; g < n; ++g) {
        roll ^= static_cast<uint64_t>(gram[g]) * static_cast<uint64_t>(multipliers[g]);
        for (int head = 0; head < tables.heads; ++head) {
          const int column = (g - 1) * tables.heads + head;
          *ids++ = FloorMod(static_cast<int64_t>(roll), primes[column]) + offsets[column];
        }
      }
    }
  }
}

void GatherRows(const TableView& table, const int64_t* ids, int64_t id_stride, int64_t tokens, int columns, Bf16* out,
                Workers&) {
  for (int64_t t = 0; t < tokens; ++t) {
    for (int column = 0; column < columns; ++column, out += kRowValues) {
      const int64_t id = ids[t * id_stride + column];
      if (id < 0) {
        std::memset(out, 0, kRowValues * sizeof(Bf16));
        continue;
      }
      float row[kRowValues];
      DecodeQ2K(table.bytes + id * kQ2KBlockBytes, row);
      for (int64_t i = 0; i < kRowValues; ++i) out[i] = Bf16FromF32(row[i]);
    }
  }
}

// A row of wkv as bf16, whatever the file holds.
void ExpandWeights(const ProjectionWeights& weights, int64_t output, std::vector<Bf16>& row) {
  if (weights.bf16 != nullptr) {
    row.assign(weights.bf16 + output * weights.inputs, weights.bf16 + (output + 1) * weights.inputs);
    return;
  }
  const int64_t blocks = weights.inputs / kRowValues;
  for (int64_t b = 0; b < blocks; ++b) {
    float values[kRowValues];
    DecodeQ2K(weights.q2k + (output * blocks + b) * kQ2KBlockBytes, values);
    for (int64_t i = 0; i < kRowValues; ++i) row[static_cast<size_t>(b * kRowValues + i)] = Bf16FromF32(values[i]);
  }
}

int64_t PackedBytes(const ProjectionWeights&) { return 0; }

void Pack(const ProjectionWeights&, uint8_t*, Workers&) {}

void Project(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, Bf16*, Workers&) {
  std::vector<Bf16> row(static_cast<size_t>(weights.inputs));
  for (int64_t o = 0; o < weights.outputs; ++o) {
    ExpandWeights(weights, o, row);
    for (int64_t t = 0; t < tokens; ++t) {
      const Bf16* token = x + t * weights.inputs;
      float total = 0;
      for (int64_t begin = 0; begin < weights.inputs; begin += kProjectionChunk) {
        float sum = 0;
        for (int64_t k = begin; k < std::min(begin + kProjectionChunk, weights.inputs); k += 2) {
          sum = ProjectionStep(sum, row[static_cast<size_t>(k) + 1], token[k + 1]);
          sum = ProjectionStep(sum, row[static_cast<size_t>(k)], token[k]);
        }
        total = FlushSubnormal(total + sum);
      }
      kv[t * weights.outputs + o] = Bf16FromF32(total);
    }
  }
}

float LoadHighway(const uint8_t* values, HighwayType type, int64_t index) {
  const uint8_t* at = values + index * HighwayBytesPerValue(type);
  return type == HighwayType::kF32 ? LoadUnaligned<float>(at) : F32FromBf16(LoadUnaligned<Bf16>(at));
}

void StoreHighway(uint8_t* values, HighwayType type, int64_t index, float value) {
  uint8_t* at = values + index * HighwayBytesPerValue(type);
  if (type == HighwayType::kF32) {
    StoreUnaligned(at, value);
  } else {
    StoreUnaligned(at, Bf16FromF32(value));
  }
}

void ApplyGate(const GateWeights& weights, const GateCall& call, Workers&) {
  const int64_t dim = weights.dim;
  const int64_t copy_bytes = dim * HighwayBytesPerValue(call.type);
  for (int64_t t = 0; t < call.tokens; ++t) {
    const bool live = call.token_mask == nullptr || call.token_mask[t] != 0;
    const Bf16* keys = call.kv + t * dim * (weights.copies + 1);
    const Bf16* value = keys + dim * weights.copies;
    for (int64_t copy = 0; copy < weights.copies; ++copy) {
      const int64_t index = t * weights.copies + copy;
      const uint8_t* h = static_cast<const uint8_t*>(call.highway) + index * copy_bytes;
      uint8_t* out = call.out == nullptr ? nullptr : static_cast<uint8_t*>(call.out) + index * copy_bytes;
      if (!live) {
        if (call.gates != nullptr) call.gates[index] = 0;
        if (out != nullptr && out != h) std::memcpy(out, h, static_cast<size_t>(copy_bytes));
        continue;
      }
      GateSums sums;
      for (int64_t i = 0; i < dim; ++i) {
        const double hi = LoadHighway(h, call.type, i);
        const double ki = F32FromBf16(keys[copy * dim + i]);
        const double wi = weights.qk[copy * dim + i];
        sums.hh += hi * hi;
        sums.kk += ki * ki;
        sums.hwk += hi * wi * ki;
      }
      const float g = GateFromSums(sums, dim, weights.eps);
      if (call.gates != nullptr) call.gates[index] = g;
      if (out == nullptr) continue;
      for (int64_t i = 0; i < dim; ++i) {
        const float step = g * F32FromBf16(value[i]);
        StoreHighway(out, call.type, i, LoadHighway(h, call.type, i) + step);
      }
    }
  }
}

}  // namespace

void DecodeQ2K(const uint8_t* block, float out[kRowValues]) {
  const uint8_t* scales = block;
  const uint8_t* codes = block + 16;
  const float d = F32FromF16(LoadUnaligned<uint16_t>(block + 80));
  const float dmin = F32FromF16(LoadUnaligned<uint16_t>(block + 82));
  for (int64_t i = 0; i < kRowValues; ++i) {
    const int64_t half = i / 128;
    const int64_t t = i % 128;
    const int code = (codes[32 * half + t % 32] >> (2 * (t / 32))) & 3;
    const int scale = scales[i / 16];
    // Both products are exact in f32, so the subtraction is the only rounding.
    out[i] = d * static_cast<float>(scale & 15) * static_cast<float>(code) - dmin * static_cast<float>(scale >> 4);
  }
}

const Kernels& ReferenceKernels() {
  static constexpr Kernels kernels = {"reference", &HashWindow, &GatherRows, &PackedBytes, &Pack, &Project, &ApplyGate};
  return kernels;
}

}  // namespace engram::kernels
