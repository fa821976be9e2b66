#include "client/highway_update.h"

#include <cstring>

#include "client/bf16.h"

namespace engram::client {
namespace {

float LoadF32(const char* at) {
  float value = 0;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

uint16_t LoadBits(const char* at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  return bits;
}

// The build compiles with -ffp-contract=off: the product and the sum stay two roundings.
inline void UpdateF32(float gate, const char* value, const char* in, char* out, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) {
    const float step = gate * Bf16ToFloat(LoadBits(value + 2 * i));
    const float sum = LoadF32(in + 4 * i) + step;
    std::memcpy(out + 4 * i, &sum, sizeof(sum));
  }
}

inline void UpdateBf16(float gate, const char* value, const char* in, char* out, int64_t dim) {
  for (int64_t i = 0; i < dim; ++i) {
    const float step = gate * Bf16ToFloat(LoadBits(value + 2 * i));
    const uint16_t sum = FloatToBf16(Bf16ToFloat(LoadBits(in + 2 * i)) + step);
    std::memcpy(out + 2 * i, &sum, sizeof(sum));
  }
}

// In place is said apart: where the compiler sees one pointer it needs no proof that two do not overlap.
void Update(HighwayDtype dtype, float gate, const char* value, const char* in, char* out, int64_t dim) {
  if (dtype == HighwayDtype::kBf16) {
    in == out ? UpdateBf16(gate, value, out, out, dim) : UpdateBf16(gate, value, in, out, dim);
  } else {
    in == out ? UpdateF32(gate, value, out, out, dim) : UpdateF32(gate, value, in, out, dim);
  }
}

}  // namespace

void UpdateHighway(const HighwayUpdate& update) {
  const int64_t copy_bytes = update.dim * BytesOf(update.dtype);
  const auto* gates = static_cast<const char*>(update.gates);
  const auto* values = static_cast<const char*>(update.value);
  const auto* highway = static_cast<const char*>(update.highway);
  auto* result = static_cast<char*>(update.out);
  for (int64_t t = 0; t < update.tokens; ++t) {
    if (update.token_mask != nullptr && update.token_mask[t] == 0) {
      const int64_t at = t * update.hc * copy_bytes;
      if (result != highway) std::memcpy(result + at, highway + at, static_cast<size_t>(update.hc * copy_bytes));
      continue;
    }
    for (int64_t copy = 0; copy < update.hc; ++copy) {
      const int64_t index = t * update.hc + copy;
      const float gate = LoadF32(gates + 4 * index);
      const char* value = values + 2 * t * update.dim;
      const char* in = highway + index * copy_bytes;
      char* out = result + index * copy_bytes;
      Update(update.dtype, gate, value, in, out, update.dim);
    }
  }
}

}  // namespace engram::client
