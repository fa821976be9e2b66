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
  std::vector<uint8_t> q2k;  // where it is not empty, `weights` are its values

  ProjectionWeights view() const {
    if (q2k.empty()) return {weights.data(), nullptr, outputs, inputs};
    return {nullptr, q2k.data(), outputs, inputs};
  }
};

Problem RandomProblem(Random& random, int64_t tokens, int64_t outputs, int64_t columns) {
  Problem problem = {tokens, outputs, columns * kRowValues, {}, {}, {}};
  for (int64_t i = 0; i < outputs * problem.inputs; ++i) problem.weights.push_back(Bf16FromF32(Normal(random) * 0.1f));
  for (int64_t i = 0; i < tokens * problem.inputs; ++i) problem.x.push_back(Bf16FromF32(Normal(random)));
  return problem;
}

Problem RandomQ2KProblem(Random& random, int64_t tokens, int64_t outputs, int64_t columns) {
  Problem problem = RandomProblem(random, tokens, outputs, columns);
  problem.q2k = RandomQ2K(random, outputs * columns);
  for (int64_t b = 0; b < outputs * columns; ++b) {
    float values[kRowValues];
    DecodeQ2K(problem.q2k.data() + b * kQ2KBlockBytes, values);
    for (int64_t i = 0; i < kRowValues; ++i) {
      problem.weights[static_cast<size_t>(b * kRowValues + i)] = Bf16FromF32(values[i]);
    }
  }
  return problem;
}

// 64-byte aligned, as packed weights are, and `offset` elements further.
template <typename T>
struct Aligned {
  Aligned(size_t size, size_t offset) : memory(size + offset + 64 / sizeof(T)) {
    data = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64) + offset;
  }
  std::vector<T> memory;
  T* data;
};

std::vector<Bf16> Project(const Kernels& kernels, const Problem& problem, int threads, size_t misaligned = 0) {
  Workers workers(threads);
  ProjectionWeights weights = problem.view();
  const Aligned<uint8_t> packed(static_cast<size_t>(kernels.packed_bytes(weights)), 0);
  kernels.pack(weights, packed.data, workers);
  if (kernels.packed_bytes(weights) > 0) weights.bf16 = nullptr;  // q2k stays: it says what was packed
  weights.packed = packed.data;
  const Aligned<Bf16> x(problem.x.size(), misaligned);
  std::copy(problem.x.begin(), problem.x.end(), x.data);
  const Aligned<Bf16> scratch(problem.x.size() + 1, misaligned);
  scratch.data[problem.x.size()] = 0xABCD;
  const auto results = static_cast<size_t>(problem.tokens * problem.outputs);
  const Aligned<Bf16> kv(results + 1, misaligned);
  kv.data[results] = 0xABCD;
  kernels.project(weights, x.data, problem.tokens, kv.data, scratch.data, workers);
  EXPECT_EQ(kv.data[results], 0xABCD) << "written behind the end of kv";
  EXPECT_EQ(scratch.data[problem.x.size()], 0xABCD) << "written behind the end of scratch";
  return {kv.data, kv.data + results};
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
    for (const int64_t outputs : {1, 3, 16, 37, 131}) {
      if (tokens * outputs > 9000) continue;  // what a larger one could show, 33 tokens do
      const Problem problem = RandomProblem(random, tokens, outputs, 1 + tokens % 6);
      const std::vector<Bf16> expected = Project(ReferenceKernels(), problem, 1);
      ExpectNearExact(problem, expected);
      for (const CpuTwin& twin : SupportedCpuTwins()) {
        ASSERT_EQ(Project(*twin.kernels, problem, 2), expected)
            << twin.instructions << ", " << tokens << " x " << outputs;
      }
    }
  }
}

// f16 scales of every size and sign: subnormal ones, and products that cancel.
TEST(Projection, Q2KWeightsAreTheirValuesAsBf16InEveryTwin) {
  Random random(12);
  for (const int64_t tokens : TokenCounts()) {
    for (const int64_t outputs : {1, 17, 130}) {
      if (tokens * outputs > 9000) continue;
      const Problem blocks = RandomQ2KProblem(random, tokens, outputs, 1 + tokens % 6);
      Problem values = blocks;
      values.q2k.clear();
      const std::vector<Bf16> expected = Project(ReferenceKernels(), values, 1);
      ASSERT_EQ(Project(ReferenceKernels(), blocks, 1), expected);
      for (const CpuTwin& twin : SupportedCpuTwins()) {
        ASSERT_EQ(Project(*twin.kernels, blocks, 2), expected)
            << twin.instructions << ", " << tokens << " x " << outputs;
        ASSERT_EQ(Project(*twin.kernels, values, 2), expected) << twin.instructions;
      }
    }
  }
}

// Products and sums around 2^-126: zero in all twins where the order says so.
TEST(Projection, SubnormalsAreZeroEverywhere) {
  Random random(13);
  Problem problem = RandomProblem(random, 7, 21, 5);
  const auto tiny = [&] {
    // Exponents 0..100 of bf16: products from far below the subnormals to just above.
    return static_cast<Bf16>((random() & 0x807Fu) | (static_cast<uint64_t>(40 + Below(random, 50)) << 7));
  };
  for (Bf16& value : problem.weights) value = tiny();
  for (Bf16& value : problem.x) value = Below(random, 8) == 0 ? static_cast<Bf16>(random() & 0x807Fu) : tiny();
  const std::vector<Bf16> expected = Project(ReferenceKernels(), problem, 1);
  int64_t zeros = 0, subnormal = 0;
  for (const Bf16 value : expected) {
    zeros += (value & 0x7FFF) == 0;
    subnormal += (value & 0x7FFF) != 0 && (value & 0x7F80) == 0;
  }
  EXPECT_EQ(subnormal, 0);
  EXPECT_LT(zeros, static_cast<int64_t>(expected.size()));
  for (const CpuTwin& twin : SupportedCpuTwins()) {
    EXPECT_EQ(Project(*twin.kernels, problem, 2), expected) << twin.instructions;
  }
}

TEST(Projection, ATokenAloneHasTheBitsItHasInABatch) {
  Random random(7);
  const Problem batch = RandomProblem(random, 70, 67, 2);
  for (const NamedTwin& twin : AllTwins()) {
    const std::vector<Bf16> together = Project(*twin.kernels, batch, 2);
    for (int64_t t = 0; t < batch.tokens; ++t) {
      Problem alone = batch;  // its first tile has another size
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

// The written order, on values that come out otherwise in any other.
TEST(Projection, SumsInTheWrittenOrder) {
  Problem problem = {1, 1, 2 * kProjectionChunk, {}, {}, {}};
  problem.weights.assign(static_cast<size_t>(problem.inputs), Bf16FromF32(1));
  problem.x.assign(static_cast<size_t>(problem.inputs), 0);
  const auto set = [&](int64_t k, float value) { problem.x[static_cast<size_t>(k)] = Bf16FromF32(value); };
  set(1, 0x1p24f);  // first, though k = 0 stands before it:
  set(0, 1);        // lost in 2^24, to even
  set(2, -0x1p24f);
  set(3, 1);  // lost too, since it is added before -2^24
  set(4, 3);  // stays
  set(kProjectionChunk,
      0x1p24f);  // a chunk of its own: 2^24 + 1 is even again, and 3 from the first chunk is added last
  set(kProjectionChunk + 2, 1);
  for (const NamedTwin& twin : AllTwins()) {
    EXPECT_EQ(F32FromBf16(Project(*twin.kernels, problem, 1)[0]), 0x1p24f) << twin.name;
  }
  set(kProjectionChunk + 4, -0x1p24f);
  for (const NamedTwin& twin : AllTwins()) {
    EXPECT_EQ(F32FromBf16(Project(*twin.kernels, problem, 1)[0]), 3.0f) << twin.name;
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
  for (const int64_t tokens : {1, 6}) {
    const Problem problem = RandomQ2KProblem(random, tokens, 21, 1);
    const std::vector<Bf16> expected = Project(ReferenceKernels(), problem, 1);
    for (const NamedTwin& twin : AllTwins()) EXPECT_EQ(Project(*twin.kernels, problem, 1, 1), expected) << twin.name;
  }
}

TEST(Projection, NoTokensWriteNothing) {
  Random random(11);
  const Problem problem = RandomProblem(random, 0, 3, 1);
  for (const NamedTwin& twin : AllTwins()) EXPECT_TRUE(Project(*twin.kernels, problem, 2).empty());
}

}  // namespace
}  // namespace engram::kernels
