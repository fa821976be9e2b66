// The client's addition against the reference kernel's: the same bits.
#include "client/highway_update.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/kernels.h"

namespace engram::client {
namespace {

constexpr int kHc = 3;
constexpr int64_t kDim = 19;  // no multiple of a vector
constexpr int64_t kTokens = 40;

// Values of all sizes, and now and then an awkward one: zeros, denormals and the largest; infinities and NaN if `wild`.
class Values {
 public:
  uint32_t F32(bool wild) {
    constexpr uint32_t kAwkward[] = {0x80000000, 0,          0x00000001, 0x807fffff,
                                     0x7f7fffff, 0x7f800000, 0xff800000, 0x7fc00001};
    if (random_() % 7 == 0) return kAwkward[random_() % (wild ? 8 : 5)];
    const auto value = static_cast<float>(std::ldexp(normal_(random_), static_cast<int>(random_() % 40) - 20));
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    return bits;
  }
  uint16_t Bf16(bool wild) { return static_cast<uint16_t>(F32(wild) >> 16); }

 private:
  std::mt19937 random_{1};
  std::normal_distribution<double> normal_;
};

template <typename T>
bool IsNan(T bits) {
  const uint32_t wide = sizeof(T) == 2 ? uint32_t{bits} << 16 : bits;
  return (wide & 0x7fffffff) > 0x7f800000;
}

// The same bits; of a NaN that it is one.
template <typename T>
void ExpectSame(const std::vector<T>& got, const std::vector<T>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (IsNan(expected[i])) {
      EXPECT_TRUE(IsNan(got[i])) << i;
    } else {
      ASSERT_EQ(got[i], expected[i]) << i;
    }
  }
}

template <typename T>
void Compare(HighwayDtype dtype, kernels::HighwayType type) {
  Values values;
  std::vector<uint16_t> kv(kTokens * kDim * (kHc + 1));
  for (size_t i = 0; i < kv.size(); ++i) {
    // A wild key would make the gate NaN; of the value each is of its own element.
    kv[i] = values.Bf16(static_cast<int64_t>(i) % (kDim * (kHc + 1)) >= kDim * kHc);
  }
  std::vector<T> highway(kTokens * kHc * kDim);
  for (size_t i = 0; i < highway.size(); ++i) {
    const bool wild = static_cast<int64_t>(i) / (kHc * kDim) % 10 == 3;
    highway[i] = static_cast<T>(sizeof(T) == 2 ? values.Bf16(wild) : values.F32(wild));
  }
  std::vector<float> qk(kHc * kDim, 0.75f);
  std::vector<uint8_t> mask(kTokens, 1);
  mask[0] = mask[7] = mask[kTokens - 1] = 0;

  std::vector<float> gates(kTokens * kHc);
  std::vector<T> expected(highway.size());
  kernels::GateCall call{.kv = kv.data(), .token_mask = mask.data(), .tokens = kTokens, .type = type};
  call.highway = highway.data();
  call.out = expected.data();
  call.gates = gates.data();
  kernels::Workers workers(1);
  kernels::ReferenceKernels().apply_gate({.qk = qk.data(), .copies = kHc, .dim = kDim, .eps = 1e-20f}, call, workers);

  std::vector<uint16_t> value;
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto* row = kv.data() + t * kDim * (kHc + 1) + kHc * kDim;
    value.insert(value.end(), row, row + kDim);
  }
  std::vector<T> out(highway.size());
  HighwayUpdate update{.dtype = dtype, .tokens = kTokens, .hc = kHc, .dim = kDim};
  update.gates = gates.data();
  update.value = value.data();
  update.token_mask = mask.data();
  update.highway = highway.data();
  update.out = out.data();
  UpdateHighway(update);
  ExpectSame(out, expected);
  EXPECT_EQ(std::memcmp(out.data(), highway.data(), kHc * kDim * sizeof(T)), 0)
      << "a masked token's bytes, NaN and all";

  std::vector<T> in_place = highway;
  update.highway = update.out = in_place.data();
  UpdateHighway(update);
  ExpectSame(in_place, expected);

  // As pieces of a reply lie: at any byte.
  std::string odd(1 + value.size() * 2, ' ');
  std::memcpy(odd.data() + 1, value.data(), value.size() * 2);
  update.value = odd.data() + 1;
  update.highway = highway.data();
  update.out = out.data();
  UpdateHighway(update);
  ExpectSame(out, expected);
}

TEST(HighwayUpdate, F32IsTheReferenceKernelsBits) { Compare<uint32_t>(HighwayDtype::kF32, kernels::HighwayType::kF32); }

TEST(HighwayUpdate, Bf16IsTheReferenceKernelsBits) {
  Compare<uint16_t>(HighwayDtype::kBf16, kernels::HighwayType::kBf16);
}

// A product less its own rounding leaves something only where the two operations are fused.
TEST(HighwayUpdate, ProductAndSumAreTwoRoundings) {
  const float gate = 1 + 0x1p-20f;
  const uint16_t value = 0x3f81;  // 1 + 2^-7
  const float highway = -(gate * (1 + 0x1p-7f));
  float out = 1;
  HighwayUpdate update{.tokens = 1, .hc = 1, .dim = 1};
  update.gates = &gate;
  update.value = &value;
  update.highway = &highway;
  update.out = &out;
  UpdateHighway(update);
  EXPECT_EQ(out, 0.0f);
}

}  // namespace
}  // namespace engram::client
