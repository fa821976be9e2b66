#include "server/refusal/refusal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace engram {
namespace {

using ::testing::HasSubstr;

constexpr Reason kLast = Reason::kLoading;

TEST(ReasonTest, EveryReasonHasARowOfItsOwn) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(kLast); ++i) {
    const auto reason = static_cast<Reason>(i);
    EXPECT_TRUE(names.insert(std::string(ReasonName(reason))).second) << ReasonName(reason) << " names two reasons";
    EXPECT_NE(ReasonCode(reason), absl::StatusCode::kOk);
  }
}

TEST(ReasonTest, OnlyShortagesAreWorthARetryAndOnlyTooLargeCallsNeverAre) {
  EXPECT_TRUE(WorthRetry(Reason::kQueueFull));
  EXPECT_TRUE(WorthRetry(Reason::kDraining));
  EXPECT_FALSE(WorthRetry(Reason::kTooManyTokens));
  EXPECT_FALSE(WorthRetry(Reason::kTokenOutOfRange));
  EXPECT_TRUE(NeverRetry(Reason::kTooManyTokens));
  EXPECT_TRUE(NeverRetry(Reason::kMessageBytes));
  EXPECT_FALSE(NeverRetry(Reason::kQueueFull));
}

TEST(RefusalsTest, NoOffenderIsOk) { EXPECT_TRUE(Refusals().ToStatus().ok()); }

TEST(RefusalsTest, TheFirstOffenderGivesTheCodeAndTheMessageAndAllAreListed) {
  Refusals refusals;
  refusals.Add({Reason::kPositionGap, "sequences[1].start_pos", "9", "[0, 4]", "text with \0 and \xff"});
  refusals.Add({Reason::kTokenOutOfRange, "sequences[2].token_ids[0]", "-1", "[0, 512)", "negative"});
  const absl::Status status = refusals.ToStatus();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("POSITION_GAP: sequences[1].start_pos: "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("(and 1 more)"));
  const RefusalDetail detail = DetailOf(status);
  ASSERT_EQ(detail.offenders.size(), 2);
  EXPECT_EQ(detail.total, 2);
  EXPECT_EQ(detail.offenders[1].reason, Reason::kTokenOutOfRange);
  EXPECT_EQ(detail.offenders[1].field, "sequences[2].token_ids[0]");
  EXPECT_EQ(detail.offenders[1].value, "-1");
  EXPECT_EQ(detail.offenders[1].bound, "[0, 512)");
}

TEST(RefusalsTest, ListsAtMost64ButCountsAll) {
  Refusals refusals;
  for (int i = 0; i < 1000; ++i) refusals.Add({Reason::kTokenOutOfRange, std::to_string(i), "", "", ""});
  const RefusalDetail detail = DetailOf(refusals.ToStatus());
  ASSERT_EQ(detail.offenders.size(), 64);
  EXPECT_EQ(detail.offenders.back().field, "63");
  EXPECT_EQ(detail.total, 1000);
}

TEST(RefusalsTest, AStatusThatIsNoRefusalHasNoOffenders) {
  EXPECT_TRUE(DetailOf(absl::InternalError("x")).offenders.empty());
  EXPECT_TRUE(DetailOf(absl::OkStatus()).offenders.empty());
}

}  // namespace
}  // namespace engram
