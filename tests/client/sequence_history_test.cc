#include "client/sequence_history.h"

#include <cstdint>
#include <vector>

#include "client/error_details.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

using Ids = std::vector<int32_t>;
using Mask = std::vector<uint8_t>;

// The reference: every position's id in a plain array, -1 where dead.
Ids NaiveLookback(const Ids& ids, int64_t start, int n) {
  Ids lookback;
  for (int i = 1; i < n; ++i) lookback.push_back(start - i >= 0 ? ids[start - i] : kDeadToken);
  return lookback;
}

TEST(SequenceHistory, LookbackIsNewestFirstAtEveryPositionForEveryN) {
  for (int n = 2; n <= 8; ++n) {
    SequenceHistory history(n);
    Ids ids;
    Mask mask;
    for (int i = 0; i < 20; ++i) {
      ids.push_back(10 + i);
      mask.push_back(i % 5 != 3);
    }
    ASSERT_TRUE(history.Write(0, ids, mask).ok());
    for (int i = 0; i < 20; ++i) {
      if (mask[i] == 0) ids[i] = kDeadToken;
    }
    for (int64_t start = 0; start <= 20; ++start) {
      EXPECT_EQ(history.Lookback(start).value(), NaiveLookback(ids, start, n)) << "n " << n << ", start " << start;
    }
  }
}

TEST(SequenceHistory, AtPositionZeroEverythingBeforeIsDead) {
  EXPECT_THAT(SequenceHistory(4).Lookback(0).value(), ElementsAre(-1, -1, -1));
}

TEST(SequenceHistory, RejectedDraftTokensDoNotStayBehindARollback) {
  SequenceHistory history(4);
  ASSERT_TRUE(history.Write(0, Ids{1, 2, 3, 4, 5}, {}).ok());
  ASSERT_TRUE(history.Write(5, Ids{60, 61, 62}, {}).ok());
  ASSERT_TRUE(history.Write(5, Ids{7}, {}).ok());
  EXPECT_EQ(history.length(), 6);
  EXPECT_THAT(history.Lookback(6).value(), ElementsAre(7, 5, 4));
  EXPECT_EQ(history.Lookback(7).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SequenceHistory, RewritingAMaskedPositionMakesItLive) {
  SequenceHistory history(3);
  ASSERT_TRUE(history.Write(0, Ids{1, 2}, Mask{1, 0}).ok());
  EXPECT_THAT(history.Lookback(2).value(), ElementsAre(-1, 1));
  ASSERT_TRUE(history.Write(1, Ids{2}, {}).ok());
  EXPECT_THAT(history.Lookback(2).value(), ElementsAre(2, 1));
}

TEST(SequenceHistory, AGapIsAnErrorNotAPad) {
  SequenceHistory history(4);
  ASSERT_TRUE(history.Write(0, Ids{1, 2}, {}).ok());
  const absl::Status status = history.Write(3, Ids{5}, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(status), "POSITION_GAP");
  EXPECT_EQ(ErrorMetadata(status)["bound"], "[0, 2]");
  EXPECT_THAT(std::string(status.message()), HasSubstr("position 3"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("[0, 2)"));
  EXPECT_EQ(history.length(), 2);
}

TEST(SequenceHistory, SeedIsTheHandOffFromPrefillToDecode) {
  SequenceHistory history = SequenceHistory::Seeded(4, 100, Ids{99, -1, 97}).value();
  EXPECT_EQ(history.base(), 97);
  EXPECT_EQ(history.length(), 100);
  EXPECT_THAT(history.Lookback(100).value(), ElementsAre(99, -1, 97));
  ASSERT_TRUE(history.Write(100, Ids{5, 6}, {}).ok());
  EXPECT_THAT(history.Lookback(101).value(), ElementsAre(5, 99, -1));
  EXPECT_THAT(history.Lookback(102).value(), ElementsAre(6, 5, 99));
}

TEST(SequenceHistory, RewindIntoTheUnknownPastOfASeedIsAGapNotAPad) {
  SequenceHistory history = SequenceHistory::Seeded(4, 100, Ids{99, 98, 97}).value();
  EXPECT_EQ(history.Lookback(99).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorMetadata(history.Lookback(99).status())["bound"], "[100, 100]");
  EXPECT_EQ(history.Write(0, Ids{1}, {}).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SequenceHistory, SeedNearTheStartKnowsThatTheSequenceBeginsThere) {
  SequenceHistory history = SequenceHistory::Seeded(4, 1, Ids{50, -1, -1}).value();
  EXPECT_EQ(history.base(), 0);
  EXPECT_EQ(history.length(), 1);
  EXPECT_THAT(history.Lookback(1).value(), ElementsAre(50, -1, -1));
  EXPECT_THAT(history.Lookback(0).value(), ElementsAre(-1, -1, -1));
}

TEST(SequenceHistory, SeedRefusesWrongLengthsIdsAndLivePositionsBeforeTheStart) {
  EXPECT_THAT(std::string(SequenceHistory::Seeded(4, 9, Ids{1, 2}).status().message()), HasSubstr("2 ids"));
  EXPECT_THAT(std::string(SequenceHistory::Seeded(4, 9, Ids{1, -2, 3}).status().message()), HasSubstr("lookback[1]"));
  EXPECT_THAT(std::string(SequenceHistory::Seeded(4, 1, Ids{1, 2, -1}).status().message()), HasSubstr("lookback[1]"));
  EXPECT_EQ(ErrorReason(SequenceHistory::Seeded(4, -1, Ids{-1, -1, -1}).status()), "POSITION_GAP");
  EXPECT_EQ(ErrorReason(SequenceHistory::Seeded(4, 9, Ids{1, 2}).status()), "LOOKBACK_LENGTH");
}

TEST(SequenceHistory, PlaceholderIdsAndWrongMasksChangeNothing) {
  SequenceHistory history(4);
  EXPECT_THAT(std::string(history.Write(0, Ids{1, -1}, {}).message()), HasSubstr("token_ids[1]: token id -1"));
  EXPECT_THAT(std::string(history.Write(0, Ids{1, 2}, Mask{1}).message()), HasSubstr("token_mask has 1"));
  EXPECT_EQ(ErrorReason(history.Write(0, Ids{}, {})), "EMPTY_CALL");
  const absl::Status negative = history.Write(-1, Ids{1}, {});
  EXPECT_EQ(negative.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ErrorReason(negative), "POSITION_GAP");
  EXPECT_EQ(history.length(), 0);
}

TEST(SequenceHistory, ACopyIsAForkWithItsOwnFuture) {
  SequenceHistory parent(4);
  ASSERT_TRUE(parent.Write(0, Ids{1, 2, 3}, {}).ok());
  SequenceHistory child = parent;
  ASSERT_TRUE(child.Write(3, Ids{40}, {}).ok());
  ASSERT_TRUE(parent.Write(3, Ids{50}, {}).ok());
  EXPECT_THAT(child.Lookback(4).value(), ElementsAre(40, 3, 2));
  EXPECT_THAT(parent.Lookback(4).value(), ElementsAre(50, 3, 2));
}

}  // namespace
}  // namespace engram::client
