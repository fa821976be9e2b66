#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "tests/kernels/twins.h"

namespace engram::kernels {
namespace {

// Owns what a HashTables points at.
struct Constants {
  int max_ngram = 4;
  int heads = 8;
  int layers = 2;
  int32_t pad_id = 2;
  std::vector<int64_t> multipliers, primes, offsets;
  std::vector<uint64_t> reciprocals;

  HashTables view() const {
    return {max_ngram, heads, layers, pad_id, multipliers.data(), primes.data(), offsets.data(), reciprocals.data()};
  }
  int64_t columns() const { return static_cast<int64_t>(max_ngram - 1) * heads; }

  // What follows from the primes: each layer's running sum, and the reciprocals.
  void SetOffsets() {
    offsets.clear();
    reciprocals.clear();
    for (const int64_t prime : primes) reciprocals.push_back(ReciprocalOf(prime));
    int64_t sum = 0;
    for (size_t i = 0; i < primes.size(); ++i) {
      if (i % static_cast<size_t>(columns()) == 0) sum = 0;
      offsets.push_back(sum);
      sum += primes[i];
    }
  }
};

Constants Released() {
  Constants constants;
  constants.multipliers = {76632096046245, 4839876093313,  35959672319349, 73987337458391,
                           67716810739261, 51510806800915, 30921347202721, 82619226485591};
  constants.primes = {16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
                      16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321,
                      16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463,
                      16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627,
                      16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769,
                      16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889};
  constants.SetOffsets();
  return constants;
}

std::vector<int64_t> Hash(const Kernels& kernels, const Constants& constants, const std::vector<int32_t>& window,
                          int threads) {
  const auto tokens = static_cast<int64_t>(window.size()) - constants.max_ngram + 1;
  // One more id, to see that nothing is written behind the end.
  std::vector<int64_t> ids(static_cast<size_t>(tokens * constants.layers * constants.columns() + 1), -77);
  Workers workers(threads);
  kernels.hash_window(constants.view(), window.data(), tokens, ids.data(), workers);
  EXPECT_EQ(ids.back(), -77);
  ids.pop_back();
  return ids;
}

std::string Sha256OfInt32(const std::vector<int64_t>& ids) {
  std::vector<uint8_t> bytes;
  for (const int64_t id : ids) {
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<uint8_t>(id >> shift));
  }
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(bytes.data(), bytes.size(), digest);
  std::string hex;
  for (const unsigned char byte : digest) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", byte);
    hex += digits;
  }
  return hex;
}

// The published vector: token_map [0,1,2,3,3,5,6,7,99091,2] applied to tokens 0 1 2 3 4 5 6 9, before them nothing.
std::vector<int32_t> PublishedWindow() { return {kDead, kDead, kDead, 0, 1, 2, 3, 3, 5, 6, 2}; }

TEST(Hash, PublishedVector) {
  for (const NamedTwin& twin : AllTwins()) {
    const std::vector<int64_t> ids = Hash(*twin.kernels, Released(), PublishedWindow(), 2);
    EXPECT_EQ(std::vector<int64_t>(ids.begin(), ids.begin() + 4),
              (std::vector<int64_t>{5702652, 24393184, 39183301, 61503783}));
    EXPECT_EQ(Sha256OfInt32(ids), "66db30d48c026b2023f77501eecdfc11e75cd578ad151595b8cea1941d6c3d96") << twin.name;
  }
}

TEST(Hash, PublishedVectorWithPositionThreeMaskedDiffersAtThreeToSixOnly) {
  std::vector<int32_t> window = PublishedWindow();
  window[3 + 3] = kDead;
  for (const NamedTwin& twin : AllTwins()) {
    const std::vector<int64_t> plain = Hash(*twin.kernels, Released(), PublishedWindow(), 1);
    const std::vector<int64_t> masked = Hash(*twin.kernels, Released(), window, 1);
    EXPECT_EQ(Sha256OfInt32(masked), "dca3cc49fa6a1ae4223d37ffe0f35ae48406bd36a471dde66d143ecd1903f5b3") << twin.name;
    for (int64_t t = 0; t < 8; ++t) {
      const bool differs = !std::equal(plain.begin() + 48 * t, plain.begin() + 48 * (t + 1), masked.begin() + 48 * t);
      EXPECT_EQ(differs, t >= 3 && t <= 6) << "position " << t;
    }
  }
}

// A second implementation in other terms: absolute positions from the start of a sequence, one function per id, and
// exact 128-bit arithmetic brought back to 64 bits by remainder instead of by wrapping.
int64_t WrapTo64(__int128 value) {
  const __int128 two64 = static_cast<__int128>(1) << 64;
  __int128 rest = value % two64;
  if (rest < 0) rest += two64;
  if (rest >= two64 / 2) rest -= two64;
  return static_cast<int64_t>(rest);
}

int64_t RowId(const Constants& c, const std::vector<int32_t>& sequence, int64_t position, int64_t layer,
              int64_t column) {
  const int64_t top = column / c.heads + 1;  // the oldest shift that takes part
  int64_t roll = 0;
  for (int64_t shift = 0; shift <= top; ++shift) {
    int64_t id = 0;
    bool dead = false;
    for (int64_t back = 0; back <= shift; ++back) {
      dead = dead || back > position || sequence[static_cast<size_t>(position - back)] == kDead;
    }
    id = dead ? c.pad_id : sequence[static_cast<size_t>(position - shift)];
    const int64_t product =
        WrapTo64(static_cast<__int128>(id) * c.multipliers[static_cast<size_t>(layer * c.max_ngram + shift)]);
    roll = shift == 0 ? product : roll ^ product;
  }
  const auto at = static_cast<size_t>(layer * c.columns() + column);
  const int64_t prime = c.primes[at];
  return static_cast<int64_t>(((static_cast<__int128>(roll) % prime) + prime) % prime) + c.offsets[at];
}

TEST(Hash, EqualsAnIndependentImplementationOverRandomGeometries) {
  Random random(1);
  for (int round = 0; round < 300; ++round) {
    Constants constants;
    constants.max_ngram = 2 + round % 7;
    constants.heads = 1 + static_cast<int>(Below(random, 9));
    constants.layers = 1 + static_cast<int>(Below(random, 3));
    // Every third round wraps: multipliers of 63 bits times ids of 31.
    const bool wraps = round % 3 == 0;
    const int64_t vocab = wraps ? INT32_MAX : 1 + Below(random, 100'000);
    constants.pad_id = static_cast<int32_t>(Below(random, vocab));
    for (int64_t i = 0; i < constants.layers * constants.max_ngram; ++i) {
      constants.multipliers.push_back(Below(random, wraps ? INT64_MAX : INT64_MAX / vocab) | 1);
    }
    for (int64_t i = 0; i < constants.layers * constants.columns(); ++i) {
      constants.primes.push_back(i % 5 == 0 ? 2 : 2 + Below(random, i % 2 == 0 ? 20'000'000 : int64_t{1} << 40));
    }
    constants.SetOffsets();

    const int64_t tokens = 1 + Below(random, 70);
    const int64_t dead_percent = (round % 4) * 25;
    std::vector<int32_t> window(static_cast<size_t>(constants.max_ngram - 1), kDead);
    std::vector<int32_t> sequence;
    for (int64_t t = 0; t < tokens; ++t) {
      const bool dead = Below(random, 100) < dead_percent;
      sequence.push_back(dead ? kDead : static_cast<int32_t>(Below(random, vocab)));
    }
    window.insert(window.end(), sequence.begin(), sequence.end());

    std::vector<int64_t> expected;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t layer = 0; layer < constants.layers; ++layer) {
        for (int64_t column = 0; column < constants.columns(); ++column) {
          expected.push_back(RowId(constants, sequence, t, layer, column));
        }
      }
    }
    for (const NamedTwin& twin : AllTwins()) {
      ASSERT_EQ(Hash(*twin.kernels, constants, window, 1 + round % 3), expected) << twin.name << ", round " << round;
    }
  }
}

TEST(Hash, AWindowCutIntoPiecesGivesTheSameIds) {
  Random random(2);
  const Constants constants = Released();
  std::vector<int32_t> window(3 + 100);
  for (int32_t& id : window) id = random() % 10 == 0 ? kDead : static_cast<int32_t>(Below(random, 99'092));
  const std::vector<int64_t> whole = Hash(CpuKernels(), constants, window, 3);
  for (size_t cut = 1; cut < 100; cut += 13) {
    std::vector<int64_t> pieces =
        Hash(CpuKernels(), constants, {window.begin(), window.begin() + static_cast<std::ptrdiff_t>(3 + cut)}, 2);
    const std::vector<int64_t> rest =
        Hash(CpuKernels(), constants, {window.begin() + static_cast<std::ptrdiff_t>(cut), window.end()}, 2);
    pieces.insert(pieces.end(), rest.begin(), rest.end());
    EXPECT_EQ(pieces, whole) << cut;
  }
}

TEST(Hash, NoTokensWriteNothing) {
  for (const NamedTwin& twin : AllTwins()) {
    EXPECT_TRUE(Hash(*twin.kernels, Released(), {kDead, kDead, kDead}, 2).empty());
  }
}

// Without a division: quotients that are one too small, moduli from 2 to the largest, dividends up to 2^63 - 1.
TEST(Hash, EveryModulusIsExactUpToTheLargestDividend) {
  Random random(14);
  Constants constants;
  constants.max_ngram = 2;
  constants.heads = 24;
  constants.layers = 1;
  for (int i = 0; i < 400; ++i) {
    constants.primes = {2, 3, 5, 7, 255, 256, 257, (int64_t{1} << 31) - 1, int64_t{1} << 31, (int64_t{1} << 32) + 1};
    while (constants.primes.size() < 24) {
      constants.primes.push_back(2 + static_cast<int64_t>(random() >> (1 + Below(random, 61))));
    }
    // Not SetOffsets(): the sum of such moduli is beyond 64 bits.
    constants.offsets.assign(constants.primes.size(), 0);
    constants.reciprocals.clear();
    for (const int64_t prime : constants.primes) constants.reciprocals.push_back(ReciprocalOf(prime));
    // Ids 0 and 1, so that the roll of a token is one multiplier or the two of them, up to 2^63 - 1.
    const auto any = [&] { return static_cast<int64_t>(random() >> (1 + Below(random, 20))) | 1; };
    constants.multipliers = {i == 0 ? INT64_MAX : any(), any()};
    if (i > 0 && i <= 24) {  // a multiple of a modulus, one below and one above
      const int64_t prime = constants.primes[static_cast<size_t>(i) % 24];
      constants.multipliers[0] = INT64_MAX / prime * prime - static_cast<int64_t>(random() % 2);
    }
    const std::vector<int32_t> window = {0, 1, 1, 0, 1};
    const std::vector<int64_t> expected = Hash(ReferenceKernels(), constants, window, 1);
    for (const CpuTwin& twin : SupportedCpuTwins()) ASSERT_EQ(Hash(*twin.kernels, constants, window, 1), expected) << i;
  }
}

}  // namespace
}  // namespace engram::kernels
