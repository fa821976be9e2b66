#include <utility>
#include <vector>

#include "client/bench/worker/wire_fetch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engram::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

std::vector<std::pair<int64_t, int64_t>> Parts(int64_t all, int ranks, Fanout fanout = Fanout::kSlice) {
  WireFetchOptions options;
  options.ranks = ranks;
  options.fanout = fanout;
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (const client::Range& part : PartsOf(all, options)) parts.emplace_back(part.begin, part.end);
  return parts;
}

TEST(PartsOf, CoverAllInNearlyEqualParts) {
  EXPECT_THAT(Parts(24, 1), ElementsAre(Pair(0, 24)));
  EXPECT_THAT(Parts(24, 4), ElementsAre(Pair(0, 6), Pair(6, 12), Pair(12, 18), Pair(18, 24)));
  EXPECT_THAT(Parts(10, 4), ElementsAre(Pair(0, 2), Pair(2, 5), Pair(5, 7), Pair(7, 10)));
  EXPECT_THAT(Parts(2, 8), ElementsAre(Pair(0, 1), Pair(1, 2)));
  EXPECT_THAT(Parts(24, 8, Fanout::kBroadcast), ElementsAre(Pair(0, 24)));
}

TEST(SameBytes, NamesTheFirstThatDiffers) {
  const std::vector<char> a = {1, 2, 3}, b = {1, 2, 4};
  EXPECT_TRUE(SameBytes(14, a, a).ok());
  EXPECT_THAT(std::string(SameBytes(14, a, b).message()), HasSubstr("layer 14: from byte 2 of 3"));
  EXPECT_FALSE(SameBytes(14, absl::MakeSpan(a).first(2), a).ok());
}

}  // namespace
}  // namespace engram::bench
