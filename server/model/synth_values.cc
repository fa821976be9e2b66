#include "server/model/synth_values.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "server/model/tensor_values.h"

namespace engram {
namespace {

// Random words of a block: 8 for qs, 2 for scales, 1 for d, dmin and the minima's jitter.
constexpr uint64_t kWordsPerBlock = 11;

template <typename T>
void Put(T value, uint8_t*& out) {
  std::memcpy(out, &value, sizeof value);
  out += sizeof value;
}

void PutQ8_0(const float* values, uint8_t*& out) {
  float most = 0;
  for (int i = 0; i < 32; ++i) most = std::max(most, std::fabs(values[i]));
  const uint16_t scale_bits = F16FromF32(most / 127);
  const float scale = F32FromF16(scale_bits);
  Put(scale_bits, out);
  for (int i = 0; i < 32; ++i) {
    const float q = scale > 0 ? std::nearbyint(values[i] / scale) : 0;
    Put(static_cast<int8_t>(std::clamp(q, -127.0f, 127.0f)), out);
  }
}

}  // namespace

uint16_t F16FromF32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = bits >> 16 & 0x8000;
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  const uint32_t m = bits & 0x7fffffff;
  return static_cast<uint16_t>(sign | ((m + 0xfff + (m >> 13 & 1) - (112u << 23)) >> 13));
}

void SynthQ2KBlocks(uint64_t stream, int64_t first, int64_t blocks, uint8_t* out) {
  for (int64_t b = 0; b < blocks; ++b, out += kernels::kQ2KBlockBytes) {
    const uint64_t base = static_cast<uint64_t>(first + b) * kWordsPerBlock;
    uint64_t words[kWordsPerBlock];
    for (uint64_t i = 0; i < kWordsPerBlock; ++i) words[i] = CounterRandom(stream, base + i);
    // Value = d * s * q - dmin * m with q in 0..3: m equal or next to s and dmin about 1.5 d centre it on zero.
    const uint64_t low = 0x0f0f0f0f0f0f0f0fu;
    for (int half = 0; half < 2; ++half) {
      const uint64_t scales = words[8 + half] & low;
      const uint64_t minima = scales ^ (words[8 + half] >> 4 & 0x0101010101010101u);
      const uint64_t both = scales | minima << 4;
      std::memcpy(out + 8 * half, &both, sizeof both);
    }
    std::memcpy(out + 16, words, 64);
    const uint64_t rest = words[10];
    // Halves by their bits: d in [2^-8, 2^-7), dmin in [2^-7, 1.25 * 2^-7).
    const uint16_t d = static_cast<uint16_t>(7 << 10 | (rest & 0x3ff));
    const uint16_t dmin = static_cast<uint16_t>(8 << 10 | (rest >> 16 & 0xff));
    std::memcpy(out + 80, &d, sizeof d);
    std::memcpy(out + 82, &dmin, sizeof dmin);
  }
}

void SynthBlocks(GgufType type, uint64_t stream, int64_t first, int64_t blocks, uint8_t* out) {
  if (type == GgufType::kQ2_K) return SynthQ2KBlocks(stream, first, blocks, out);
  for (int64_t b = 0; b < blocks; ++b) {
    uint8_t block[kernels::kQ2KBlockBytes];
    float values[kernels::kRowValues];
    SynthQ2KBlocks(stream, first + b, 1, block);
    kernels::DecodeQ2K(block, values);
    for (int64_t i = 0; i < kernels::kRowValues; ++i) {
      if (type == GgufType::kF32) {
        Put(values[i], out);
      } else if (type == GgufType::kF16) {
        Put(F16FromF32(values[i]), out);
      } else if (type == GgufType::kBF16) {
        Put(Bf16FromF32(values[i]), out);
      } else if (type == GgufType::kQ8_0 && i % 32 == 0) {
        PutQ8_0(values + i, out);
      }
    }
  }
}

void SynthNorm(GgufType type, uint64_t stream, int64_t values, uint8_t* out) {
  for (int64_t i = 0; i < values; ++i) {
    const double unit = static_cast<double>(CounterRandom(stream, static_cast<uint64_t>(i)) >> 11) * 0x1p-53;
    const float value = static_cast<float>(0.9 + 0.2 * unit);
    if (type == GgufType::kF32) {
      Put(value, out);
    } else {
      Put(type == GgufType::kF16 ? F16FromF32(value) : Bf16FromF32(value), out);
    }
  }
}

}  // namespace engram
