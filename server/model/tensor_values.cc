#include "server/model/tensor_values.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "server/model/byte_reader.h"

namespace engram {
namespace {

constexpr int64_t kQ8_0Values = 32;
constexpr int64_t kQ8_0Bytes = 34;  // f16 scale, 32 signed bytes

// Q8_0, as ggml does: one f32 product per value, exact before its one rounding.
void ExpandQ8_0(const uint8_t* block, float* out) {
  const float scale = F32FromF16(LoadLittle<uint16_t>(block));
  for (int64_t i = 0; i < kQ8_0Values; ++i) out[i] = scale * static_cast<float>(static_cast<int8_t>(block[2 + i]));
}

}  // namespace

float F32FromF16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000 | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  // Subnormal: mantissa * 2^-24, a normal f32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

kernels::Bf16 Bf16FromF32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // Rounding up could carry a NaN's payload away: cut it and keep it quiet.
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<kernels::Bf16>(bits >> 16 | 0x40);
  return static_cast<kernels::Bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

bool CanExpand(GgufType type) {
  return type == GgufType::kF32 || type == GgufType::kF16 || type == GgufType::kBF16 || type == GgufType::kQ8_0 ||
         type == GgufType::kQ2_K;
}

void ExpandToF32(GgufType type, const uint8_t* bytes, int64_t values, float* out) {
  switch (type) {
    case GgufType::kF32:
      std::memcpy(out, bytes, values * sizeof(float));
      return;
    case GgufType::kF16:
      for (int64_t i = 0; i < values; ++i) out[i] = F32FromF16(LoadLittle<uint16_t>(bytes + 2 * i));
      return;
    case GgufType::kBF16:
      for (int64_t i = 0; i < values; ++i) {
        out[i] = std::bit_cast<float>(static_cast<uint32_t>(LoadLittle<uint16_t>(bytes + 2 * i)) << 16);
      }
      return;
    case GgufType::kQ8_0:
      for (int64_t i = 0; i < values; i += kQ8_0Values) ExpandQ8_0(bytes + i / kQ8_0Values * kQ8_0Bytes, out + i);
      return;
    case GgufType::kQ2_K:
      for (int64_t i = 0; i < values; i += kernels::kRowValues) {
        kernels::DecodeQ2K(bytes + i / kernels::kRowValues * kernels::kQ2KBlockBytes, out + i);
      }
      return;
    default:
      return;  // CanExpand says no
  }
}

void ExpandToBf16(GgufType type, const uint8_t* bytes, int64_t values, kernels::Bf16* out) {
  if (type == GgufType::kBF16) {
    std::memcpy(out, bytes, values * sizeof(kernels::Bf16));
    return;
  }
  constexpr int64_t kStep = 1024;  // a multiple of every block; 4 KiB of f32 stay in L1
  float step[kStep];
  const GgufTypeTraits& traits = *GgufTypeTraitsOf(type);
  for (int64_t i = 0; i < values; i += kStep) {
    const int64_t count = std::min(kStep, values - i);
    ExpandToF32(type, bytes + i / traits.block_values * traits.block_bytes, count, step);
    for (int64_t j = 0; j < count; ++j) out[i + j] = Bf16FromF32(step[j]);
  }
}

}  // namespace engram
