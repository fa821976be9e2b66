// The constants of the released model, bit for bit, and the published hash of a published sequence.
#include "server/model/hash_constants.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/kernels.h"
#include "server/model/digests.h"
#include "server/model/hash_rules.h"

namespace engram {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kCompressed = 99092;
const std::vector<int64_t> kLayers = {1, 14};

TEST(HashConstants, MultipliersOfTheReleasedModel) {
  EXPECT_THAT(MakeMultipliers(kLayers, 4, kCompressed),
              ElementsAre(76632096046245, 4839876093313, 35959672319349, 73987337458391,  // layer 1
                          67716810739261, 51510806800915, 30921347202721, 82619226485591));
}

TEST(HashConstants, PrimesOffsetsAndRowsOfTheReleasedModel) {
  const std::vector<int64_t> primes = MakePrimes(2, 4, 8, 16'000'000);
  ASSERT_EQ(primes.size(), 48u);
  EXPECT_EQ(primes[0], 16000057);
  EXPECT_EQ(primes[1], 16000079);
  EXPECT_EQ(primes[2], 16000081);
  EXPECT_EQ(primes.back(), 16000889);
  EXPECT_EQ(*std::min_element(primes.begin(), primes.end()), 16000057);
  EXPECT_EQ(*std::max_element(primes.begin(), primes.end()), 16000889);
  EXPECT_EQ(std::set<int64_t>(primes.begin(), primes.end()).size(), 48u);
  EXPECT_EQ(std::accumulate(primes.begin(), primes.begin() + 24, int64_t{0}), 384006168);
  EXPECT_EQ(std::accumulate(primes.begin() + 24, primes.end(), int64_t{0}), 384016682);
  const std::vector<int64_t> offsets = MakeOffsets(primes, 24);
  EXPECT_EQ(offsets[0], 0);
  EXPECT_EQ(offsets[1], 16000057);
  EXPECT_EQ(offsets[23], 384006168 - primes[23]);
  EXPECT_EQ(offsets[24], 0);
  EXPECT_EQ(offsets[47], 384016682 - primes[47]);
}

TEST(HashConstants, PrimesRestartForEachSizeAndNeverRepeat) {
  EXPECT_THAT(MakePrimes(2, 3, 2, 2), ElementsAre(2, 3, 5, 7, 11, 13, 17, 19));
}

TEST(HashConstants, IsPrimeAgreesWithTrialDivision) {
  for (uint64_t n = 0; n < 20000; ++n) {
    bool prime = n >= 2;
    for (uint64_t d = 2; d * d <= n && prime; ++d) prime = n % d != 0;
    EXPECT_EQ(IsPrime(n), prime) << n;
  }
  EXPECT_TRUE(IsPrime(18446744073709551557u));  // the largest below 2^64
  EXPECT_FALSE(IsPrime(3825123056546413051u));  // a strong pseudoprime to the first nine bases
}

std::string HashOf(const std::vector<int32_t>& window, int64_t tokens, std::vector<int64_t>* first) {
  const std::vector<int64_t> multipliers = MakeMultipliers(kLayers, 4, kCompressed);
  const std::vector<int64_t> primes = MakePrimes(2, 4, 8, 16'000'000), offsets = MakeOffsets(primes, 24);
  std::vector<uint64_t> reciprocals;
  for (const int64_t prime : primes) reciprocals.push_back(kernels::ReciprocalOf(prime));
  const kernels::HashTables tables = {
      4, 8, 2, 2, multipliers.data(), primes.data(), offsets.data(), reciprocals.data()};
  std::vector<int64_t> ids(tokens * 48);
  kernels::Workers workers(1);
  kernels::ReferenceKernels().hash_window(tables, window.data(), tokens, ids.data(), workers);
  Sha256 sha;
  sha.AddI32s(std::vector<int32_t>(ids.begin(), ids.end()));
  if (first != nullptr) first->assign(ids.begin(), ids.begin() + 4);
  return DigestHex(sha.Finish());
}

TEST(HashConstants, PublishedVector) {
  const int32_t dead = kernels::kDead;
  // Tokens 0 1 2 3 4 5 6 9 through the map 0 1 2 3 3 5 6 7 99091 2, behind three positions before the start.
  std::vector<int64_t> first;
  EXPECT_EQ(HashOf({dead, dead, dead, 0, 1, 2, 3, 3, 5, 6, 2}, 8, &first),
            "66db30d48c026b2023f77501eecdfc11e75cd578ad151595b8cea1941d6c3d96");
  EXPECT_THAT(first, ElementsAre(5702652, 24393184, 39183301, 61503783));
  EXPECT_EQ(HashOf({dead, dead, dead, 0, 1, 2, dead, 3, 5, 6, 2}, 8, nullptr),
            "dca3cc49fa6a1ae4223d37ffe0f35ae48406bd36a471dde66d143ecd1903f5b3");
}

TEST(HashConstants, TheReleasedModelKeepsAllRules) {
  const std::vector<int64_t> multipliers = MakeMultipliers(kLayers, 4, kCompressed);
  const std::vector<int64_t> primes = MakePrimes(2, 4, 8, 16'000'000), offsets = MakeOffsets(primes, 24);
  const std::vector<int64_t> rows = {384006168, 384016682};
  EXPECT_FALSE(FindHashRuleBreach({kCompressed, 2, 24, kLayers, multipliers, primes, offsets, rows}).has_value());
}

}  // namespace
}  // namespace engram
