#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "tests/kernels/twins.h"

namespace engram::kernels {
namespace {

// A gate call that owns its memory. The highway is held as f32 and given to the kernel in `type`, at an odd address.
struct Problem {
  int64_t tokens = 1;
  int copies = 1;
  int64_t dim = 16;
  HighwayType type = HighwayType::kF32;
  float eps = 1e-20f;
  std::vector<float> qk, h;
  std::vector<Bf16> kv;
  std::vector<uint8_t> mask;  // empty = none

  int64_t values() const { return tokens * copies * dim; }
  Bf16& key(int64_t t, int64_t copy, int64_t i) {
    return kv[static_cast<size_t>(t * dim * (copies + 1) + copy * dim + i)];
  }
  Bf16& value(int64_t t, int64_t i) { return key(t, copies, i); }
  const Bf16& key(int64_t t, int64_t copy, int64_t i) const { return const_cast<Problem*>(this)->key(t, copy, i); }
  const Bf16& value(int64_t t, int64_t i) const { return key(t, copies, i); }

  std::vector<uint8_t> HighwayBytes() const {
    std::vector<uint8_t> bytes;
    for (const float value : h) {
      const uint32_t bits = type == HighwayType::kF32 ? F32Bits(value) : Bf16FromF32(value);
      for (int64_t i = 0; i < HighwayBytesPerValue(type); ++i) bytes.push_back(static_cast<uint8_t>(bits >> (8 * i)));
    }
    return bytes;
  }
};

Problem RandomProblem(Random& random, int64_t tokens, int copies, int64_t dim, HighwayType type) {
  Problem problem;
  problem.tokens = tokens;
  problem.copies = copies;
  problem.dim = dim;
  problem.type = type;
  for (int64_t i = 0; i < copies * dim; ++i) problem.qk.push_back(Normal(random) * Normal(random));
  for (int64_t i = 0; i < problem.values(); ++i) problem.h.push_back(Normal(random) * 3);
  for (int64_t i = 0; i < tokens * dim * (copies + 1); ++i) problem.kv.push_back(Bf16FromF32(Normal(random)));
  if (type == HighwayType::kBf16) {
    for (float& value : problem.h) value = F32FromBf16(Bf16FromF32(value));
  }
  return problem;
}

struct Result {
  std::vector<uint8_t> bytes;
  std::vector<float> out, gates;
};

enum class Place { kApart, kInPlace, kGatesOnly };

Result Apply(const Kernels& kernels, const Problem& problem, int threads = 1, Place place = Place::kApart) {
  const std::vector<uint8_t> input = problem.HighwayBytes();
  // One byte ahead of each: unaligned. One behind: to see that nothing is written there.
  std::vector<uint8_t> highway(input.size() + 2, 0x5A);
  std::vector<uint8_t> apart(input.size() + 2, 0x5A);
  std::memcpy(highway.data() + 1, input.data(), input.size());
  Result result;
  result.gates.assign(static_cast<size_t>(problem.tokens * problem.copies), -1.0f);

  GateCall call;
  call.kv = problem.kv.data();
  call.token_mask = problem.mask.empty() ? nullptr : problem.mask.data();
  call.tokens = problem.tokens;
  call.type = problem.type;
  call.highway = highway.data() + 1;
  std::vector<uint8_t>& target = place == Place::kInPlace ? highway : apart;
  call.out = place == Place::kGatesOnly ? nullptr : target.data() + 1;
  call.gates = result.gates.data();
  Workers workers(threads);
  kernels.apply_gate({problem.qk.data(), problem.copies, problem.dim, problem.eps}, call, workers);
  EXPECT_EQ(target.front(), 0x5A);
  EXPECT_EQ(target.back(), 0x5A);
  if (place != Place::kInPlace) {
    EXPECT_TRUE(std::equal(input.begin(), input.end(), highway.begin() + 1)) << "the input was written";
  }

  result.bytes.assign(target.begin() + 1, target.end() - 1);
  for (int64_t i = 0; i < problem.values(); ++i) {
    const uint8_t* at = &result.bytes[static_cast<size_t>(i * HighwayBytesPerValue(problem.type))];
    result.out.push_back(problem.type == HighwayType::kF32 ? LoadUnaligned<float>(at)
                                                           : F32FromBf16(LoadUnaligned<Bf16>(at)));
  }
  return result;
}

// docs/numerics.md in f64 from end to end.
double ExactGate(const Problem& problem, int64_t t, int64_t copy) {
  double hh = 0, kk = 0, hwk = 0;
  for (int64_t i = 0; i < problem.dim; ++i) {
    const double h = problem.h[static_cast<size_t>((t * problem.copies + copy) * problem.dim + i)];
    const double key = F32FromBf16(problem.key(t, copy, i));
    hh += h * h;
    kk += key * key;
    hwk += h * static_cast<double>(problem.qk[static_cast<size_t>(copy * problem.dim + i)]) * key;
  }
  const auto dim = static_cast<double>(problem.dim);
  const auto eps = static_cast<double>(problem.eps);
  const double dot = hwk / std::sqrt(hh / dim + eps) / std::sqrt(kk / dim + eps) / std::sqrt(dim);
  const double root = std::copysign(std::sqrt(std::max(std::fabs(dot), 1e-6)), dot);
  return 1 / (1 + std::exp(-root));
}

void ExpectNearExact(const Problem& problem, const Result& result, const std::string& name) {
  for (int64_t t = 0; t < problem.tokens; ++t) {
    for (int64_t copy = 0; copy < problem.copies; ++copy) {
      const double g = ExactGate(problem, t, copy);
      ASSERT_NEAR(result.gates[static_cast<size_t>(t * problem.copies + copy)], g, std::ldexp(1.0, -20)) << name;
      for (int64_t i = 0; i < problem.dim; ++i) {
        const auto at = static_cast<size_t>((t * problem.copies + copy) * problem.dim + i);
        const double h = problem.h[at];
        const double step = g * F32FromBf16(problem.value(t, i));
        double bound = std::ldexp(std::fabs(h) + std::fabs(step), -20);
        if (problem.type == HighwayType::kBf16) bound += std::ldexp(std::fabs(h + step), -8);
        ASSERT_NEAR(result.out[at], h + step, bound) << name << ", token " << t << ", copy " << copy << ", " << i;
      }
    }
  }
}

constexpr HighwayType kTypes[] = {HighwayType::kF32, HighwayType::kBf16};

TEST(Gate, EveryTwinIsNearTheExactGate) {
  Random random(12);
  for (const HighwayType type : kTypes) {
    for (const int64_t dim : {1, 7, 8, 16, 33, 64, 96, 515}) {
      const Problem problem = RandomProblem(random, 5, 1 + static_cast<int>(dim) % kMaxCopies, dim, type);
      for (const NamedTwin& twin : AllTwins()) ExpectNearExact(problem, Apply(*twin.kernels, problem, 2), twin.name);
    }
  }
}

// The steps behind g are exact: t = g·v rounded, then h + t rounded, never fused, and once more for bf16.
TEST(Gate, TheUpdateIsTwoRoundedStepsFromTheReportedGate) {
  Random random(13);
  for (const HighwayType type : kTypes) {
    const Problem problem = RandomProblem(random, 3, 4, 77, type);
    for (const NamedTwin& twin : AllTwins()) {
      const Result result = Apply(*twin.kernels, problem);
      for (int64_t i = 0; i < problem.values(); ++i) {
        const int64_t copy = i / problem.dim;
        const volatile float step = result.gates[static_cast<size_t>(copy)] *
                                    F32FromBf16(problem.value(copy / problem.copies, i % problem.dim));
        float want = problem.h[static_cast<size_t>(i)] + step;
        if (type == HighwayType::kBf16) want = F32FromBf16(Bf16FromF32(want));
        ASSERT_EQ(result.out[static_cast<size_t>(i)], want) << twin.name;
      }
    }
  }
}

TEST(Gate, TheCpuTwinHasTheSameBitsAtEveryInstructionSetThreadCountAndBatch) {
  Random random(14);
  for (const HighwayType type : kTypes) {
    const Problem problem = RandomProblem(random, 23, 4, 75, type);
    const Result expected = Apply(CpuKernels(), problem);
    for (const CpuTwin& twin : SupportedCpuTwins()) {
      for (const int threads : {1, 2, 3, 5}) {
        const Result result = Apply(*twin.kernels, problem, threads);
        EXPECT_EQ(result.bytes, expected.bytes) << twin.instructions << ", " << threads << " threads";
        EXPECT_EQ(result.gates, expected.gates) << twin.instructions << ", " << threads << " threads";
      }
    }
    for (int64_t t = 0; t < problem.tokens; ++t) {
      Problem alone = problem;
      alone.tokens = 1;
      const int64_t h_values = problem.copies * problem.dim;
      const int64_t kv_values = (problem.copies + 1) * problem.dim;
      alone.h.assign(problem.h.begin() + t * h_values, problem.h.begin() + (t + 1) * h_values);
      alone.kv.assign(problem.kv.begin() + t * kv_values, problem.kv.begin() + (t + 1) * kv_values);
      const Result result = Apply(CpuKernels(), alone);
      EXPECT_TRUE(std::equal(result.bytes.begin(), result.bytes.end(),
                             expected.bytes.begin() + t * h_values * HighwayBytesPerValue(type)));
      EXPECT_TRUE(std::equal(result.gates.begin(), result.gates.end(), expected.gates.begin() + t * problem.copies));
    }
  }
}

TEST(Gate, InPlaceAndGatesOnlyAgreeWithOutOfPlace) {
  Random random(15);
  for (const HighwayType type : kTypes) {
    Problem problem = RandomProblem(random, 6, 3, 45, type);
    problem.mask = {1, 0, 1, 1, 0, 1};
    for (const NamedTwin& twin : AllTwins()) {
      const Result apart = Apply(*twin.kernels, problem, 2);
      const Result in_place = Apply(*twin.kernels, problem, 2, Place::kInPlace);
      const Result gates_only = Apply(*twin.kernels, problem, 2, Place::kGatesOnly);
      EXPECT_EQ(in_place.bytes, apart.bytes) << twin.name;
      EXPECT_EQ(in_place.gates, apart.gates) << twin.name;
      EXPECT_EQ(gates_only.gates, apart.gates) << twin.name;
      EXPECT_EQ(gates_only.bytes, std::vector<uint8_t>(apart.bytes.size(), 0x5A)) << twin.name;
    }
  }
}

TEST(Gate, GatesNeedNotBeAskedFor) {
  Random random(16);
  Problem problem = RandomProblem(random, 2, 2, 9, HighwayType::kF32);
  problem.mask = {0, 1};
  for (const NamedTwin& twin : AllTwins()) {
    const Result expected = Apply(*twin.kernels, problem);
    std::vector<float> out(problem.h.size());
    GateCall call;
    call.kv = problem.kv.data();
    call.token_mask = problem.mask.data();
    call.tokens = problem.tokens;
    call.highway = problem.h.data();
    call.out = out.data();
    Workers workers(1);
    twin.kernels->apply_gate({problem.qk.data(), problem.copies, problem.dim, problem.eps}, call, workers);
    EXPECT_EQ(out, expected.out) << twin.name;
  }
}

// copysign: a dot product of +0 opens the gate a little above one half, -0 a little below.
TEST(Gate, ADotProductOfEitherZeroKeepsItsSign) {
  Problem problem;
  problem.copies = 2;
  problem.dim = 1;
  problem.qk = {1, 1};
  problem.h = {0, 0};
  problem.kv = {Bf16FromF32(1), Bf16FromF32(1), Bf16FromF32(1)};
  for (const NamedTwin& twin : AllTwins()) {
    for (const float gate : Apply(*twin.kernels, problem).gates) EXPECT_NEAR(gate, 0.50025, 1e-7) << twin.name;
  }

  // A sum never ends in -0, because lanes start at +0; a product that underflows does.
  problem.h = {-1e-30f, 1e-30f};
  problem.qk = {1e-38f, 1e-38f};
  for (const NamedTwin& twin : AllTwins()) {
    const std::vector<float> gates = Apply(*twin.kernels, problem).gates;
    EXPECT_NEAR(gates[0], 0.49975, 1e-7) << twin.name << ": -1e-68 is -0 in f32";
    EXPECT_NEAR(gates[1], 0.50025, 1e-7) << twin.name;
  }
}

TEST(Gate, AZeroHighwayIsFiniteWithTheReleasedEps) {
  Random random(17);
  for (const HighwayType type : kTypes) {
    Problem problem = RandomProblem(random, 2, 4, 64, type);
    problem.eps = 1e-20f;
    problem.h.assign(problem.h.size(), 0.0f);
    for (const NamedTwin& twin : AllTwins()) {
      const Result result = Apply(*twin.kernels, problem);
      for (const float gate : result.gates) EXPECT_NEAR(gate, 0.50025, 1e-7) << twin.name;
      for (const float value : result.out) EXPECT_TRUE(std::isfinite(value)) << twin.name;
    }
  }
}

// h + 0·v would turn -0 into +0 and spread a NaN of the value.
TEST(Gate, AMaskedTokensBytesAreCopied) {
  Random random(18);
  for (const HighwayType type : kTypes) {
    Problem problem = RandomProblem(random, 3, 2, 21, type);
    problem.mask = {1, 0, 1};
    const auto masked = static_cast<size_t>(2 * 21);
    problem.h[masked] = -0.0f;
    problem.h[masked + 1] = F32FromBits(0x7FC12345);
    problem.h[masked + 2] = std::numeric_limits<float>::infinity();
    problem.value(1, 0) = 0x7FC0;
    problem.value(1, 5) = 0x7F80;
    const std::vector<uint8_t> input = problem.HighwayBytes();
    const int64_t token_bytes = 2 * 21 * HighwayBytesPerValue(type);
    for (const NamedTwin& twin : AllTwins()) {
      for (const Place place : {Place::kApart, Place::kInPlace}) {
        const Result result = Apply(*twin.kernels, problem, 1, place);
        EXPECT_TRUE(std::equal(input.begin() + token_bytes, input.begin() + 2 * token_bytes,
                               result.bytes.begin() + token_bytes))
            << twin.name;
        EXPECT_EQ(result.gates[2], 0.0f);
        EXPECT_EQ(result.gates[3], 0.0f);
        EXPECT_NE(result.gates[0], 0.0f);
        EXPECT_NE(result.gates[4], 0.0f);
      }
    }
  }
}

// fmax(|NaN|, 1e-6) would be 1e-6: the NaN would vanish from the gate and stay in one value only.
TEST(Gate, ANanStaysANan) {
  Random random(19);
  for (const HighwayType type : kTypes) {
    Problem in_h = RandomProblem(random, 2, 2, 40, type);
    in_h.h[3] = std::numeric_limits<float>::quiet_NaN();
    Problem in_key = RandomProblem(random, 2, 2, 40, type);
    in_key.key(0, 0, 39) = 0x7FC0;
    Problem in_value = RandomProblem(random, 2, 2, 40, type);
    in_value.value(0, 7) = 0xFFC0;
    for (const NamedTwin& twin : AllTwins()) {
      for (const Problem& problem : {in_h, in_key}) {
        const Result result = Apply(*twin.kernels, problem);
        for (size_t i = 0; i < result.gates.size(); ++i) EXPECT_EQ(std::isnan(result.gates[i]), i == 0) << twin.name;
        for (size_t i = 0; i < result.out.size(); ++i) EXPECT_EQ(std::isnan(result.out[i]), i < 40) << twin.name;
      }
      const Result result = Apply(*twin.kernels, in_value);
      for (const float gate : result.gates) EXPECT_FALSE(std::isnan(gate)) << twin.name;
      for (size_t i = 0; i < result.out.size(); ++i) {
        EXPECT_EQ(std::isnan(result.out[i]), i == 7 || i == 47) << twin.name << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace engram::kernels
