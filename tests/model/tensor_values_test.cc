// Every type that a weight may have, against straightforward formulas.
#include "server/model/tensor_values.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "server/model/synth_values.h"

namespace engram {
namespace {

// A half's value by its definition, in f64.
double HalfValue(uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(TensorValues, AllHalves) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double want = HalfValue(static_cast<uint16_t>(bits));
    const float got = F32FromF16(static_cast<uint16_t>(bits));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
      continue;
    }
    EXPECT_EQ(got, want) << bits;
    EXPECT_EQ(std::signbit(got), std::signbit(want)) << bits;
    EXPECT_EQ(F16FromF32(got), bits);
  }
}

float FromBf16(kernels::Bf16 bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

TEST(TensorValues, Bf16IsNearestTiesToEven) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    uint32_t bits = random();
    if (i % 4 == 0) bits = (bits & 0xffff0000) | 0x8000;  // ties
    const float value = std::bit_cast<float>(bits);
    const kernels::Bf16 got = Bf16FromF32(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(FromBf16(got)));
      continue;
    }
    const kernels::Bf16 below = bits >> 16, above = below + 1;  // toward and away from zero
    const double to_below = std::fabs(static_cast<double>(value) - FromBf16(below));
    const double step = bits & 0xffff;
    const kernels::Bf16 want = step < 0x8000 ? below : step > 0x8000 ? above : (below & 1) == 0 ? below : above;
    EXPECT_EQ(got, want) << bits << " " << to_below;
  }
  EXPECT_EQ(Bf16FromF32(-0.0f), 0x8000);
  EXPECT_EQ(Bf16FromF32(std::numeric_limits<float>::max()), 0x7f80);
  // A NaN whose payload lies in the low half only must not become an infinity.
  EXPECT_TRUE(std::isnan(FromBf16(Bf16FromF32(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(FromBf16(Bf16FromF32(std::bit_cast<float>(0xffffffffu)))));
}

TEST(TensorValues, Q8_0IsScaleTimesSignedByte) {
  std::mt19937 random(2);
  std::vector<uint8_t> bytes(34 * 40);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (size_t block = 0; block < 40; ++block) bytes[34 * block + 1] &= 0x3b;  // finite scales below 2
  std::vector<float> got(32 * 40);
  ExpandToF32(GgufType::kQ8_0, bytes.data(), 32 * 40, got.data());
  for (int i = 0; i < 32 * 40; ++i) {
    const uint8_t* block = bytes.data() + i / 32 * 34;
    const double scale = HalfValue(static_cast<uint16_t>(block[0] | block[1] << 8));
    EXPECT_EQ(got[i], scale * static_cast<int8_t>(block[2 + i % 32])) << i;
  }
}

// Sizes that end inside, at and behind the piece that ExpandToBf16 works in; from an odd address.
TEST(TensorValues, Bf16ExpansionIsTheRoundedF32Expansion) {
  for (GgufType type : {GgufType::kF32, GgufType::kF16, GgufType::kBF16, GgufType::kQ8_0, GgufType::kQ2_K}) {
    ASSERT_TRUE(CanExpand(type));
    const GgufTypeTraits& traits = *GgufTypeTraitsOf(type);
    for (int64_t blocks : {1, 3, 4, 5, 9}) {
      const int64_t values = blocks * kernels::kRowValues;
      const int64_t size = values / traits.block_values * traits.block_bytes;
      std::vector<uint8_t> bytes(size + 1);
      SynthBlocks(type, 77, 5, blocks, bytes.data() + 1);
      std::vector<float> f32(values);
      std::vector<kernels::Bf16> bf16(values);
      ExpandToF32(type, bytes.data() + 1, values, f32.data());
      ExpandToBf16(type, bytes.data() + 1, values, bf16.data());
      for (int64_t i = 0; i < values; ++i) ASSERT_EQ(bf16[i], Bf16FromF32(f32[i])) << GgufTypeName(type) << " " << i;
    }
  }
}

TEST(TensorValues, OtherTypesAreNotExpanded) {
  for (GgufType type : {GgufType::kQ3_K, GgufType::kI8, GgufType::kF64, static_cast<GgufType>(77)}) {
    EXPECT_FALSE(CanExpand(type));
  }
}

TEST(TensorValues, SynthRowsAreFiniteAndOfRealisticScale) {
  constexpr int64_t kBlocks = 200;
  std::vector<uint8_t> bytes(kBlocks * kernels::kQ2KBlockBytes);
  std::vector<float> values(kBlocks * kernels::kRowValues);
  SynthQ2KBlocks(9, 0, kBlocks, bytes.data());
  ExpandToF32(GgufType::kQ2_K, bytes.data(), kBlocks * kernels::kRowValues, values.data());
  double sum = 0, squares = 0;
  for (float value : values) {
    ASSERT_LT(std::fabs(value), 0.5f);
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  const double rms = std::sqrt(squares / static_cast<double>(values.size()));
  EXPECT_GT(rms, 0.02);
  EXPECT_LT(rms, 0.1);
  EXPECT_LT(std::fabs(sum / static_cast<double>(values.size())), 0.01);
}

}  // namespace
}  // namespace engram
