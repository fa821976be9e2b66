// Project of the CUDA kernels and the tiles it reads, run by the executor of tests/simt.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cuda/kernels.h"
#include "kernels/kernels.h"
#include "kernels/scalar.h"
#include "tests/kernels/twins.h"
#include "tests/simt/executor.h"

namespace engram::kernels::cuda {
namespace {

// wkv as the file's Q2_K blocks and as their values in bf16, and tiles of both.
struct Weights {
  int64_t outputs, inputs;
  std::vector<uint8_t> q2k;
  std::vector<Bf16> bf16;
  std::vector<uint8_t> q2k_tiles, bf16_tiles;

  TiledWeights tiled(TileSource source) const {
    return {source, (source == TileSource::kQ2K ? q2k_tiles : bf16_tiles).data(), outputs, inputs};
  }
};

// Blocks of scales as a model has them: values of about 0.1.
Weights RandomWeights(Random& random, int64_t outputs, int64_t blocks) {
  Weights weights = {outputs, blocks * kRowValues, RandomQ2K(random, outputs * blocks), {}, {}, {}};
  for (int64_t b = 0; b < outputs * blocks; ++b) {
    uint8_t* const block = &weights.q2k[static_cast<size_t>(b * kQ2KBlockBytes)];
    StoreUnaligned(block + 80, static_cast<uint16_t>(0x2000 + Below(random, 0x400)));  // 0.0078 .. 0.0156
    StoreUnaligned(block + 82, static_cast<uint16_t>(0x2000 + Below(random, 0x400)));
    float values[kRowValues];
    DecodeQ2K(block, values);
    for (const float value : values) weights.bf16.push_back(Bf16FromF32(value));
  }
  weights.q2k_tiles.assign(static_cast<size_t>(TiledBytes(TileSource::kQ2K, outputs, weights.inputs)), 0xFF);
  weights.bf16_tiles.assign(static_cast<size_t>(TiledBytes(TileSource::kBf16, outputs, weights.inputs)), 0xFF);
  // In two parts, as the loader does with its buffers.
  const int64_t first_part = outputs / 32 * 16;
  for (const auto& [first, count] : {std::pair{int64_t{0}, first_part}, std::pair{first_part, outputs - first_part}}) {
    EXPECT_EQ(TileQ2K(weights.q2k.data() + first * blocks * kQ2KBlockBytes, first, count,
                      weights.tiled(TileSource::kQ2K), weights.q2k_tiles.data(), nullptr),
              cudaSuccess);
    EXPECT_EQ(TileBf16(weights.bf16.data() + first * weights.inputs, first, count, weights.tiled(TileSource::kBf16),
                       weights.bf16_tiles.data(), nullptr),
              cudaSuccess);
  }
  return weights;
}

std::vector<Bf16> RandomX(Random& random, int64_t values) {
  std::vector<Bf16> x;
  for (int64_t i = 0; i < values; ++i) x.push_back(Bf16FromF32(Normal(random)));
  return x;
}

std::vector<Bf16> Kv(const Weights& weights, TileSource source, const Bf16* x, int64_t tokens,
                     int multiprocessors = 3) {
  // Exactly as long as it has to be: the sanitizer sees a byte more.
  const std::vector<Bf16> input(x, x + tokens * weights.inputs);
  std::vector<Bf16> kv(static_cast<size_t>(tokens * weights.outputs), 0xFFFF);
  EXPECT_EQ(Project(weights.tiled(source), input.data(), tokens, kv.data(), multiprocessors, nullptr), cudaSuccess);
  return kv;
}

// Within one bf16 ulp of the exact value, or 2^-8 of the token's rms where terms cancel (docs/numerics.md).
void ExpectNearExact(const Weights& weights, const std::vector<Bf16>& x, const std::vector<Bf16>& kv) {
  const auto tokens = static_cast<int64_t>(x.size()) / weights.inputs;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<double> exact;
    double squares = 0;
    for (int64_t o = 0; o < weights.outputs; ++o) {
      double sum = 0;
      for (int64_t k = 0; k < weights.inputs; ++k) {
        sum += static_cast<double>(F32FromBf16(weights.bf16[static_cast<size_t>(o * weights.inputs + k)])) *
               F32FromBf16(x[static_cast<size_t>(t * weights.inputs + k)]);
      }
      exact.push_back(sum);
      squares += sum * sum;
    }
    const double rms = std::sqrt(squares / static_cast<double>(weights.outputs));
    for (int64_t o = 0; o < weights.outputs; ++o) {
      const double want = exact[static_cast<size_t>(o)];
      ASSERT_NEAR(F32FromBf16(kv[static_cast<size_t>(t * weights.outputs + o)]), want,
                  std::max(std::ldexp(1.0, std::ilogb(want) - 7), rms / 256))
          << "token " << t << ", output " << o;
    }
  }
}

std::vector<int64_t> TokenCounts() {
  std::vector<int64_t> counts;
  for (int64_t t = 1; t <= 17; ++t) counts.push_back(t);
  for (const int64_t t : {24, 32, 33, 63, 64, 65}) counts.push_back(t);
  return counts;
}

// Every T gives the bits that T = 65 gives, both sources alike, and they are right.
TEST(CudaProject, NearExactAndTheSameBitsForEveryNumberOfTokensAndBothSources) {
  Random random(5);
  for (const auto& [outputs, blocks] : {std::pair{1, 1}, std::pair{16, 2}, std::pair{40, 3}, std::pair{70, 9}}) {
    const Weights weights = RandomWeights(random, outputs, blocks);
    const std::vector<Bf16> x = RandomX(random, 65 * weights.inputs);
    const std::vector<Bf16> all = Kv(weights, TileSource::kQ2K, x.data(), 65);
    ExpectNearExact(weights, x, all);
    for (const int64_t tokens : TokenCounts()) {
      if (outputs * blocks > 300 && tokens > 3 && tokens != 17 && tokens != 33) continue;
      const std::vector<Bf16> expected(all.begin(), all.begin() + tokens * outputs);
      ASSERT_EQ(Kv(weights, TileSource::kQ2K, x.data(), tokens), expected) << tokens << " tokens of Q2_K";
      ASSERT_EQ(Kv(weights, TileSource::kBf16, x.data(), tokens), expected) << tokens << " tokens of bf16";
    }
  }
}

TEST(CudaProject, NeitherTheGridNorTheOrderOfThreadsChangesABit) {
  Random random(6);
  const Weights weights = RandomWeights(random, 100, 2);
  for (const int64_t tokens : {3, 12, 20, 40}) {
    const std::vector<Bf16> x = RandomX(random, tokens * weights.inputs);
    const std::vector<Bf16> expected = Kv(weights, TileSource::kQ2K, x.data(), tokens, 1);
    simt::ForEachOrder([&] {
      for (const int multiprocessors : {1, 2, 7, 200}) {
        ASSERT_EQ(Kv(weights, TileSource::kQ2K, x.data(), tokens, multiprocessors), expected)
            << tokens << " tokens on " << multiprocessors;
      }
    });
  }
}

TEST(CudaProject, ANanInOneTokenStaysInIt) {
  Random random(7);
  const Weights weights = RandomWeights(random, 20, 1);
  for (const int64_t tokens : {5, 20}) {
    std::vector<Bf16> x = RandomX(random, tokens * weights.inputs);
    const std::vector<Bf16> clean = Kv(weights, TileSource::kQ2K, x.data(), tokens);
    x[static_cast<size_t>(2 * weights.inputs + 100)] = 0x7FC0;
    const std::vector<Bf16> kv = Kv(weights, TileSource::kQ2K, x.data(), tokens);
    for (int64_t i = 0; i < tokens * weights.outputs; ++i) {
      const Bf16 value = kv[static_cast<size_t>(i)];
      if (i / weights.outputs == 2) {
        EXPECT_GT(value & 0x7FFF, 0x7F80) << "output " << i % weights.outputs;
      } else {
        EXPECT_EQ(value, clean[static_cast<size_t>(i)]) << "token " << i / weights.outputs;
      }
    }
  }
}

TEST(CudaProject, ShapesThatItDoesNotTake) {
  const TiledWeights odd = {TileSource::kQ2K, nullptr, 16, 255};
  EXPECT_EQ(Project(odd, nullptr, 1, nullptr, 1, nullptr), cudaErrorInvalidValue);
  const TiledWeights good = {TileSource::kQ2K, nullptr, 40, 256};
  EXPECT_EQ(Project(good, nullptr, -1, nullptr, 1, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(Project(good, nullptr, 0, nullptr, 1, nullptr), cudaSuccess);
  // Tiling begins at whole tiles and ends at one, or with the last output.
  EXPECT_EQ(TileQ2K(nullptr, 8, 16, good, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(TileQ2K(nullptr, 0, 8, good, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(TileQ2K(nullptr, 32, 9, good, nullptr, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace engram::kernels::cuda
