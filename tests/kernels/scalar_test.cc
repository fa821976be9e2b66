#include "kernels/scalar.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace engram::kernels {
namespace {

TEST(Bf16, EveryValueSurvivesTheRoundTripAndNansAreQuieted) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = F32FromBf16(static_cast<Bf16>(bits));
    const Bf16 back = Bf16FromF32(value);
    if (std::isnan(value)) {
      EXPECT_EQ(back, bits | 0x40u);
    } else {
      EXPECT_EQ(back, bits);
    }
  }
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(Bf16FromF32(F32FromBits(0x3F800000)), 0x3F80);
  EXPECT_EQ(Bf16FromF32(F32FromBits(0x3F807FFF)), 0x3F80);
  EXPECT_EQ(Bf16FromF32(F32FromBits(0x3F808000)), 0x3F80) << "a tie goes to the even neighbour below";
  EXPECT_EQ(Bf16FromF32(F32FromBits(0x3F808001)), 0x3F81);
  EXPECT_EQ(Bf16FromF32(F32FromBits(0x3F818000)), 0x3F82) << "a tie goes to the even neighbour above";
  EXPECT_EQ(Bf16FromF32(F32FromBits(0x00008000)), 0x0000) << "subnormals round like all others";
  EXPECT_EQ(Bf16FromF32(F32FromBits(0x80018000)), 0x8002);
  EXPECT_EQ(Bf16FromF32(std::numeric_limits<float>::max()), 0x7F80) << "overflow is infinity";
}

TEST(Bf16, ANanWhoseUpperHalfIsInfinityStaysANan) {
  EXPECT_EQ(Bf16FromF32(F32FromBits(0x7F800001)), 0x7FC0);
  EXPECT_EQ(Bf16FromF32(F32FromBits(0xFFFFFFFF)), 0xFFFF) << "adding the rounding bit must not wrap around";
}

TEST(F16, EveryValueIsExact) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float value = F32FromF16(static_cast<uint16_t>(bits));
    const int exponent = static_cast<int>(bits >> 10 & 31);
    const int mantissa = static_cast<int>(bits & 0x3FF);
    EXPECT_EQ(std::signbit(value), bits >> 15 != 0) << bits;
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), mantissa != 0) << bits;
      EXPECT_EQ(std::isinf(value), mantissa == 0) << bits;
    } else {
      const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      EXPECT_EQ(std::fabs(static_cast<double>(value)), magnitude) << bits;
    }
  }
}

}  // namespace
}  // namespace engram::kernels
