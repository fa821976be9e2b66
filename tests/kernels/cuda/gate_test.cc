// ApplyGate of the CUDA kernels, run by the executor of tests/simt.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "tests/kernels/twins.h"
#include "tests/simt/executor.h"

namespace engram::kernels::cuda {
namespace {

struct Problem {
  int64_t tokens, dim;
  int copies;
  HighwayType type;
  std::vector<float> qk;
  std::vector<Bf16> kv;
  std::vector<uint8_t> mask;     // [tokens]
  std::vector<uint8_t> highway;  // of `type`

  GateWeights weights() const { return {qk.data(), copies, dim, 1e-20f}; }
  int64_t token_bytes() const { return copies * dim * HighwayBytesPerValue(type); }
};

void PutValue(Problem& problem, int64_t index, float value) {
  uint8_t* const at = &problem.highway[static_cast<size_t>(index * HighwayBytesPerValue(problem.type))];
  if (problem.type == HighwayType::kF32) {
    StoreUnaligned(at, value);
  } else {
    StoreUnaligned(at, Bf16FromF32(value));
  }
}

float ValueAt(const std::vector<uint8_t>& highway, HighwayType type, int64_t index) {
  const uint8_t* const at = &highway[static_cast<size_t>(index * HighwayBytesPerValue(type))];
  return type == HighwayType::kF32 ? LoadUnaligned<float>(at) : F32FromBf16(LoadUnaligned<Bf16>(at));
}

Problem RandomProblem(Random& random, int64_t tokens, int copies, int64_t dim, HighwayType type) {
  Problem problem = {tokens, dim, copies, type, {}, {}, std::vector<uint8_t>(static_cast<size_t>(tokens), 1), {}};
  for (int64_t i = 0; i < copies * dim; ++i) problem.qk.push_back(Normal(random) * Normal(random));
  for (int64_t i = 0; i < tokens * dim * (copies + 1); ++i) problem.kv.push_back(Bf16FromF32(Normal(random)));
  problem.highway.resize(static_cast<size_t>(tokens * problem.token_bytes()));
  for (int64_t i = 0; i < tokens * copies * dim; ++i) PutValue(problem, i, Normal(random) * 3);
  return problem;
}

struct Result {
  std::vector<uint8_t> highway;
  std::vector<float> gates;
};

enum class Place { kApart, kInPlace, kGatesOnly };

// `misaligned`: values that the highway and its output begin behind a multiple of 16 bytes.
Result Gated(const Problem& problem, Place place, int64_t misaligned = 0) {
  const auto shift = static_cast<size_t>(misaligned * HighwayBytesPerValue(problem.type));
  std::vector<uint8_t> highway(shift + problem.highway.size()), out(shift + problem.highway.size(), 0xFF);
  std::memcpy(highway.data() + shift, problem.highway.data(), problem.highway.size());
  Result result;
  result.gates.assign(static_cast<size_t>(problem.tokens * problem.copies), -7.0f);
  std::vector<GateToken> tokens;
  for (int64_t t = 0; t < problem.tokens; ++t) {
    uint8_t* const h = highway.data() + shift + t * problem.token_bytes();
    void* const to = place == Place::kInPlace ? h
                     : place == Place::kApart ? out.data() + shift + t * problem.token_bytes()
                                              : nullptr;
    tokens.push_back({problem.kv.data() + t * problem.dim * (problem.copies + 1), h, to,
                      &result.gates[static_cast<size_t>(t * problem.copies)], problem.mask[static_cast<size_t>(t)]});
  }
  EXPECT_EQ(ApplyGate(problem.weights(), {tokens.data(), problem.tokens, problem.type}, nullptr), cudaSuccess);
  if (place != Place::kInPlace) {
    EXPECT_EQ(std::memcmp(highway.data() + shift, problem.highway.data(), problem.highway.size()), 0)
        << "input written";
  }
  const std::vector<uint8_t>& written = place == Place::kInPlace ? highway : out;
  result.highway.assign(written.begin() + static_cast<int64_t>(shift), written.end());
  return result;
}

Result Reference(const Problem& problem) {
  Result result;
  result.highway.resize(problem.highway.size());
  result.gates.resize(static_cast<size_t>(problem.tokens * problem.copies));
  Workers workers(1);
  ReferenceKernels().apply_gate(problem.weights(),
                                {.kv = problem.kv.data(),
                                 .token_mask = problem.mask.data(),
                                 .tokens = problem.tokens,
                                 .type = problem.type,
                                 .highway = problem.highway.data(),
                                 .out = result.highway.data(),
                                 .gates = result.gates.data()},
                                workers);
  return result;
}

// Gates within 2^-20 of the reference; the update two roundings from the kernel's own gate, to the bit.
void ExpectRight(const Problem& problem, const Result& result) {
  const Result expected = Reference(problem);
  for (int64_t i = 0; i < problem.tokens * problem.copies; ++i) {
    const float gate = result.gates[static_cast<size_t>(i)], want = expected.gates[static_cast<size_t>(i)];
    const int64_t t = i / problem.copies, copy = i % problem.copies;
    if (problem.mask[static_cast<size_t>(t)] == 0) {
      ASSERT_EQ(gate, 0.0f);
      const int64_t copy_bytes = problem.token_bytes() / problem.copies;
      ASSERT_EQ(std::memcmp(&result.highway[static_cast<size_t>(i * copy_bytes)],
                            &problem.highway[static_cast<size_t>(i * copy_bytes)], static_cast<size_t>(copy_bytes)),
                0)
          << "token " << t << " is masked";
      continue;
    }
    ASSERT_EQ(std::isnan(gate), std::isnan(want)) << "token " << t << ", copy " << copy;
    if (!std::isnan(want)) {
      ASSERT_NEAR(gate, want, std::ldexp(1.0, -20)) << "token " << t << ", copy " << copy;
    }
    for (int64_t d = 0; d < problem.dim; ++d) {
      const Bf16 value = problem.kv[static_cast<size_t>((t * (problem.copies + 1) + problem.copies) * problem.dim + d)];
      const volatile float step = gate * F32FromBf16(value);
      float sum = ValueAt(problem.highway, problem.type, i * problem.dim + d) + step;
      if (problem.type == HighwayType::kBf16) sum = F32FromBf16(Bf16FromF32(sum));
      const float got = ValueAt(result.highway, problem.type, i * problem.dim + d);
      if (std::isnan(sum) && std::isnan(got)) continue;
      ASSERT_EQ(F32Bits(got), F32Bits(sum)) << "token " << t << ", copy " << copy << ", value " << d;
    }
  }
}

constexpr HighwayType kTypes[] = {HighwayType::kF32, HighwayType::kBf16};

// 2056 is a round of the block and one group more; 12296 has no room in shared memory.
TEST(CudaGate, RightForEveryDimCopiesAndType) {
  Random random(8);
  for (const HighwayType type : kTypes) {
    for (const int64_t dim : {1, 7, 8, 16, 33, 515, 2056, 12296}) {
      const Problem problem = RandomProblem(random, 3, 1 + static_cast<int>(dim) % kMaxCopies, dim, type);
      ExpectRight(problem, Gated(problem, Place::kApart));
    }
  }
}

TEST(CudaGate, PlaceAlignmentAndOrderOfThreadsChangeNoBit) {
  Random random(9);
  for (const HighwayType type : kTypes) {
    Problem problem = RandomProblem(random, 5, 4, 72, type);
    problem.mask = {1, 0, 1, 1, 0};
    const Result expected = Gated(problem, Place::kApart);
    ExpectRight(problem, expected);
    simt::ForEachOrder([&] {
      for (const int64_t misaligned : {0, 1, 4}) {
        const Result apart = Gated(problem, Place::kApart, misaligned),
                     in_place = Gated(problem, Place::kInPlace, misaligned);
        ASSERT_EQ(apart.highway, expected.highway);
        ASSERT_EQ(in_place.highway, expected.highway);
        ASSERT_EQ(apart.gates, expected.gates);
        ASSERT_EQ(in_place.gates, expected.gates);
        const Result gates_only = Gated(problem, Place::kGatesOnly, misaligned);
        ASSERT_EQ(gates_only.gates, expected.gates);
        ASSERT_EQ(gates_only.highway, std::vector<uint8_t>(problem.highway.size(), 0xFF));
      }
    });
  }
}

TEST(CudaGate, MaskedTokensKeepTheirBytesAndNansStayWhereTheyAre) {
  Random random(10);
  for (const HighwayType type : kTypes) {
    Problem problem = RandomProblem(random, 4, 2, 40, type);
    problem.mask = {1, 0, 1, 1};
    const float nan = std::numeric_limits<float>::quiet_NaN();
    PutValue(problem, 0 * 80 + 3, nan);  // token 0, copy 0: a live one
    PutValue(problem, 1 * 80 + 3, nan);  // a masked one
    PutValue(problem, 1 * 80 + 50, -0.0f);
    problem.kv[static_cast<size_t>(2 * 120 + 85)] = 0x7FC0;  // token 2's value
    const Result result = Gated(problem, Place::kApart);
    ExpectRight(problem, result);
    EXPECT_TRUE(std::isnan(result.gates[0]));
    EXPECT_FALSE(std::isnan(result.gates[1])) << "copies do not share a norm";
  }
}

// dot = +0 and −0, h = 0, and sums that cancel.
TEST(CudaGate, Corners) {
  for (const HighwayType type : kTypes) {
    Random random(11);
    Problem problem = RandomProblem(random, 3, 1, 32, type);
    for (int64_t i = 0; i < 32; ++i) PutValue(problem, i, 0.0f);
    for (int64_t i = 0; i < 32; ++i) {  // token 1: terms that cancel pairwise
      problem.qk[static_cast<size_t>(i)] = 1.0f;
      problem.kv[static_cast<size_t>(64 + i)] = Bf16FromF32(i % 2 == 0 ? 1.0f : -1.0f);
      PutValue(problem, 32 + i, 3.0f);
    }
    ExpectRight(problem, Gated(problem, Place::kApart));
  }
}

TEST(CudaGate, EveryTokenHasItsOwnPlace) {
  Random random(12);
  const Problem problem = RandomProblem(random, 3, 2, 24, HighwayType::kF32);
  const Result expected = Gated(problem, Place::kApart);
  // Token 2 first, without gates; token 0 in memory of its own.
  std::vector<uint8_t> out(problem.highway.size(), 0xFF);
  std::vector<Bf16> kv_of_0(problem.kv.begin(), problem.kv.begin() + 72);
  std::vector<float> gates(2, -7.0f);
  const std::vector<GateToken> tokens = {
      {problem.kv.data() + 144, problem.highway.data() + 2 * problem.token_bytes(), out.data(), nullptr, 1},
      {kv_of_0.data(), problem.highway.data(), out.data() + problem.token_bytes(), gates.data(), 1}};
  ASSERT_EQ(ApplyGate(problem.weights(), {tokens.data(), 2, problem.type}, nullptr), cudaSuccess);
  const auto bytes = static_cast<size_t>(problem.token_bytes());
  EXPECT_EQ(std::memcmp(out.data(), expected.highway.data() + 2 * bytes, bytes), 0);
  EXPECT_EQ(std::memcmp(out.data() + bytes, expected.highway.data(), bytes), 0);
  EXPECT_EQ(gates, std::vector<float>(expected.gates.begin(), expected.gates.begin() + 2));
}

}  // namespace
}  // namespace engram::kernels::cuda
