#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/projection_order.h"
#include "kernels/scalar.h"
#include "tests/kernels/twins.h"

namespace engram::kernels {
namespace {

struct Problem {
  int64_t tokens, outputs, inputs;
  std::vector<Bf16> weights, x;

  ProjectionWeights view() const { return {weights.data(), nullptr, outputs, inputs}; }
};

Problem RandomProblem(Random& random, int64_t tokens, int64_t outputs, int64_t columns) {
  Problem problem = {tokens, outputs, columns * kRowValues, {}, {}};
  for (int64_t i = 0; i < outputs * problem.inputs; ++i) problem.weights.push_back(Bf16FromF32(Normal(random) * 0.1f));
  for (int64_t i = 0; i < tokens * problem.inputs; ++i) problem.x.push_back(Bf16FromF32(Normal(random)));
  return problem;
}

std::vector<Bf16> Project(const Kernels& kernels, const Problem& problem, int threads) {
  std::vector<Bf16> kv(static_cast<size_t>(problem.tokens * problem.outputs + 1), 0xABCD);
  Workers workers(threads);
  kernels.project(problem.view(), problem.x.data(), problem.tokens, kv.data(), workers);
  EXPECT_EQ(kv.back(), 0xABCD) << "written behind the end";
  kv.pop_back();
  return kv;
}

// Within one bf16 ulp of the exact value, or 2^-8 of the token's rms where terms cancel.
void ExpectNearExact(const Problem& problem, const std::vector<Bf16>& kv) {
  for (int64_t t = 0; t < problem.tokens; ++t) {
    std::vector<double> exact;
    double squares = 0;
    for (int64_t o = 0; o < problem.outputs; ++o) {
      double sum = 0;
      for (int64_t k = 0; k < problem.inputs; ++k) {
        sum += static_cast<double>(F32FromBf16(problem.weights[static_cast<size_t>(o * problem.inputs + k)])) *
               F32FromBf16(problem.x[static_cast<size_t>(t * problem.inputs + k)]);
      }
      exact.push_back(sum);
      squares += sum * sum;
    }
    const double rms = std::sqrt(squares / static_cast<double>(problem.outputs));
    for (int64_t o = 0; o < problem.outputs; ++o) {
      const double want = exact[static_cast<size_t>(o)];
      const double ulp = std::ldexp(1.0, std::ilogb(want) - 7);
      ASSERT_NEAR(F32FromBf16(kv[static_cast<size_t>(t * problem.outputs + o)]), want, std::max(ulp, rms / 256))
          << "token " << t << ", output " << o;
    }
  }
}

std::vector<int64_t> TokenCounts() {
  std::vector<int64_t> counts;
  for (int64_t t = 1; t <= 17; ++t) counts.push_back(t);
  for (const int64_t t : {31, 32, 33, 64, 255, 256, 257}) counts.push_back(t);
  return counts;
}

TEST(Projection, EveryTwinHasTheReferencesBitsAndTheyAreNearExact) {
  Random random(6);
  for (const int64_t tokens : TokenCounts()) {
    for (const int64_t outputs : {1, 3, 8, 37}) {
      const Problem problem = RandomProblem(random, tokens, outputs, 1 + tokens % 3);
      const std::vector<Bf16> expected = Project(ReferenceKernels(), problem, 1);
      ExpectNearExact(problem, expected);
      for (const CpuTwin& twin : SupportedCpuTwins()) {
        ASSERT_EQ(Project(*twin.kernels, problem, 2), expected)
            << twin.instructions << ", " << tokens << " x " << outputs;
      }
    }
  }
}

TEST(Projection, ATokenAloneHasTheBitsItHasInABatch) {
  Random random(7);
  const Problem batch = RandomProblem(random, 70, 67, 2);
  for (const NamedTwin& twin : AllTwins()) {
    const std::vector<Bf16> together = Project(*twin.kernels, batch, 2);
    for (int64_t t = 0; t < batch.tokens; ++t) {
      Problem alone = batch;
      alone.tokens = 1;
      alone.x.assign(batch.x.begin() + t * batch.inputs, batch.x.begin() + (t + 1) * batch.inputs);
      const std::vector<Bf16> kv = Project(*twin.kernels, alone, 1);
      ASSERT_TRUE(std::equal(kv.begin(), kv.end(), together.begin() + t * batch.outputs)) << twin.name << ", " << t;
    }
  }
}

TEST(Projection, TheNumberOfThreadsChangesNothing) {
  Random random(8);
  for (const int64_t tokens : {1, 6, 66}) {
    const Problem problem = RandomProblem(random, tokens, 129, 1);
    const std::vector<Bf16> expected = Project(CpuKernels(), problem, 1);
    for (const int threads : {2, 3, 5}) EXPECT_EQ(Project(CpuKernels(), problem, threads), expected) << threads;
  }
}

// The written order, on values that come out otherwise in any other: lane 5 loses seven ones to 2^24, lane 4 cancels
// lane 5 as its neighbour, and the ones of lanes 6 and 7 meet each other before they meet anything large.
TEST(Projection, SumsInTheWrittenOrder) {
  Problem problem = {1, 1, kRowValues, std::vector<Bf16>(kRowValues, Bf16FromF32(1)), std::vector<Bf16>(kRowValues, 0)};
  const auto set = [&](int64_t k, float value) { problem.x[static_cast<size_t>(k)] = Bf16FromF32(value); };
  set(4, -0x1p24f);
  set(5, 0x1p24f);
  for (int64_t k = 5 + kProjectionLanes; k < kRowValues; k += kProjectionLanes) set(k, 1);
  set(6, 1);
  set(7, 1);
  for (const NamedTwin& twin : AllTwins()) {
    EXPECT_EQ(F32FromBf16(Project(*twin.kernels, problem, 1)[0]), 2.0f) << twin.name;
  }
}

TEST(Projection, ANanReachesItsOwnTokenOnly) {
  Random random(9);
  Problem problem = RandomProblem(random, 5, 9, 1);
  problem.x[static_cast<size_t>(2 * problem.inputs + 100)] = 0x7FC1;
  for (const NamedTwin& twin : AllTwins()) {
    const std::vector<Bf16> kv = Project(*twin.kernels, problem, 2);
    for (int64_t i = 0; i < problem.tokens * problem.outputs; ++i) {
      EXPECT_EQ(std::isnan(F32FromBf16(kv[static_cast<size_t>(i)])), i / problem.outputs == 2) << twin.name;
    }
  }
}

TEST(Projection, PointersNeedTheAlignmentOfABf16AndNoMore) {
  Random random(10);
  const Problem problem = RandomProblem(random, 6, 5, 1);
  const std::vector<Bf16> expected = Project(ReferenceKernels(), problem, 1);
  std::vector<Bf16> weights = problem.weights;
  std::vector<Bf16> x = problem.x;
  weights.insert(weights.begin(), 0x7FFF);
  x.insert(x.begin(), 0x7FFF);
  Workers workers(1);
  for (const NamedTwin& twin : AllTwins()) {
    std::vector<Bf16> kv(expected.size() + 1);
    twin.kernels->project({weights.data() + 1, nullptr, problem.outputs, problem.inputs}, x.data() + 1, problem.tokens,
                          kv.data() + 1, workers);
    kv.erase(kv.begin());
    EXPECT_EQ(kv, expected) << twin.name;
  }
}

TEST(Projection, NoTokensWriteNothing) {
  Random random(11);
  const Problem problem = RandomProblem(random, 0, 3, 1);
  for (const NamedTwin& twin : AllTwins()) EXPECT_TRUE(Project(*twin.kernels, problem, 2).empty());
}

}  // namespace
}  // namespace engram::kernels
