// What a sequence may look back on: one named test a rule.
#include "tests/session/session_fixture.h"

namespace engram {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(SessionTableTest, TheWindowOfAStartIsDeadThenItsOwnIds) {
  EXPECT_THAT(*Commit("s", 0, {7, 8}), ElementsAre(kDead, kDead, kDead, 7, 8));
}

TEST_F(SessionTableTest, AContinuationSeesWhatCameBefore) {
  ASSERT_TRUE(Commit("s", 0, {1, 2}).ok());
  EXPECT_THAT(*Commit("s", 2, {3}), ElementsAre(kDead, 1, 2, 3));
  EXPECT_THAT(*Commit("s", 3, {4, 5}), ElementsAre(1, 2, 3, 4, 5));
}

TEST_F(SessionTableTest, AGapIsRefusedNotPadded) {
  ASSERT_TRUE(Commit("s", 0, {1, 2}).ok());
  const absl::Status gap = Commit("s", 3, {4}).status();
  EXPECT_EQ(ReasonOf(gap), Reason::kPositionGap);
  EXPECT_THAT(std::string(gap.message()), HasSubstr("sequences[0].start_pos: session knows positions [0, 2)"));
  EXPECT_THAT(*Commit("s", 2, {3}), ElementsAre(kDead, 1, 2, 3)) << "a refusal must change nothing";
}

TEST_F(SessionTableTest, ARewindTruncatesRejectedDrafts) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 91, 92}).ok());
  EXPECT_THAT(*Commit("s", 2, {3}), ElementsAre(kDead, 1, 2, 3));
  EXPECT_EQ(ReasonOf(Commit("s", 4, {5}).status()), Reason::kPositionGap) << "92 must be gone";
  EXPECT_THAT(*Commit("s", 3, {4}), ElementsAre(1, 2, 3, 4));
}

TEST_F(SessionTableTest, ARetryOfTheSameCallGivesTheSameWindow) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 3}).ok());
  const Ids first = *Commit("s", 3, {4});
  EXPECT_EQ(*Commit("s", 3, {4}), first);
}

TEST_F(SessionTableTest, StartingAgainAtZeroForgetsTheOldSequence) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 3, 4}).ok());
  EXPECT_THAT(*Commit("s", 0, {9}), ElementsAre(kDead, kDead, kDead, 9));
  EXPECT_EQ(ReasonOf(Commit("s", 4, {5}).status()), Reason::kPositionGap);
}

TEST_F(SessionTableTest, AnUnknownSessionThatDoesNotStartIsLost) {
  const absl::Status lost = Commit("nobody", 5, {1}).status();
  EXPECT_EQ(ReasonOf(lost), Reason::kSessionLost);
  EXPECT_EQ(lost.code(), absl::StatusCode::kNotFound);
}

TEST_F(SessionTableTest, AStatelessSequenceBeyondZeroNeedsLookback) {
  EXPECT_EQ(ReasonOf(Commit("", 5, {1}).status()), Reason::kLookbackLength);
  EXPECT_THAT(*Commit("", 5, {1}, {7, kDead, 9}), ElementsAre(7, kDead, 9, 1));
  EXPECT_THAT(*Commit("", 0, {1}), ElementsAre(kDead, kDead, kDead, 1));
  EXPECT_EQ(table_.stats().sessions, 0);
}

TEST_F(SessionTableTest, LookbackBearsASessionAnywhere) {
  EXPECT_THAT(*Commit("s", 100, {4}, {1, 2, 3}), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(*Commit("s", 101, {5}), ElementsAre(2, 3, 4, 5));
}

TEST_F(SessionTableTest, RewindIntoTheUnknownPastOfALookbackBirthIsAGapNotAPad) {
  ASSERT_TRUE(Commit("s", 100, {4, 5, 6}, {1, 2, 3}).ok());  // knows [97, 103)
  EXPECT_EQ(ReasonOf(Commit("s", 99, {9}).status()), Reason::kPositionGap);
  EXPECT_THAT(*Commit("s", 100, {9}), ElementsAre(1, 2, 3, 9));
}

TEST_F(SessionTableTest, ALookbackBirthThatReachesPositionZeroMayRewindToIt) {
  ASSERT_TRUE(Commit("s", 2, {3}, {kDead, 1, 2}).ok());  // knows [0, 3)
  EXPECT_THAT(*Commit("s", 1, {8}), ElementsAre(kDead, kDead, 1, 8));
}

TEST_F(SessionTableTest, LookbackOverridesWhatIsStored) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 3, 4, 5}).ok());
  EXPECT_THAT(*Commit("s", 5, {6}, {7, 8, 9}), ElementsAre(7, 8, 9, 6));
  EXPECT_THAT(*Commit("s", 6, {10}), ElementsAre(8, 9, 6, 10));
  EXPECT_EQ(ReasonOf(Commit("s", 3, {11}).status()), Reason::kPositionGap)
      << "what is older than a look-back that contradicts it is not this sequence's";
}

TEST_F(SessionTableTest, LookbackThatAgreesKeepsTheOlderHistory) {
  ASSERT_TRUE(Commit("s", 0, {1, 2, 3, 4, 5}).ok());
  EXPECT_THAT(*Commit("s", 5, {6}, {3, 4, 5}), ElementsAre(3, 4, 5, 6));
  EXPECT_THAT(*Commit("s", 2, {9}), ElementsAre(kDead, 1, 2, 9));
}

TEST_F(SessionTableTest, LookbackBeyondTheStoredEndIsABirth) {
  ASSERT_TRUE(Commit("s", 0, {1, 2}).ok());
  EXPECT_THAT(*Commit("s", 50, {6}, {3, 4, 5}), ElementsAre(3, 4, 5, 6));
  EXPECT_EQ(ReasonOf(Commit("s", 2, {9}).status()), Reason::kPositionGap);
}

TEST_F(SessionTableTest, DeadPositionsAreKeptAsDead) {
  ASSERT_TRUE(Commit("s", 0, {1, kDead, 3}).ok());
  EXPECT_THAT(*Commit("s", 3, {4}), ElementsAre(1, kDead, 3, 4));
}

TEST_F(SessionTableTest, OneOffenderRefusesTheCallAndAllAreListedAndNothingIsWritten) {
  ASSERT_TRUE(Commit("good", 0, {1}).ok());
  const std::vector<SequenceClaim> claims = {
      {"good", 1, {2}, {}}, {"good too", 7, {1}, {}}, {"new", 0, {5}, {}}, {"", 9, {1}, {}}};
  const absl::Status status = Call(claims).status();
  const RefusalDetail detail = DetailOf(status);
  ASSERT_EQ(detail.offenders.size(), 2);
  EXPECT_EQ(detail.offenders[0].field, "sequences[1].start_pos");
  EXPECT_EQ(detail.offenders[0].reason, Reason::kSessionLost);
  EXPECT_EQ(detail.offenders[1].field, "sequences[3].lookback_token_ids");
  EXPECT_EQ(table_.stats().sessions, 1);
  EXPECT_EQ(ReasonOf(Commit("good", 2, {3}).status()), Reason::kPositionGap) << "position 1 must not be written";
}

TEST_F(SessionTableTest, TwoPrincipalsNeverMeetEvenWithNamesThatRunTogether) {
  const SequenceClaim ab{"c", 0, {1}, {}};
  ASSERT_TRUE(table_.Commit("ab", {ab}, false).ok());
  const SequenceClaim a{"bc", 1, {2}, {}};
  EXPECT_EQ(ReasonOf(table_.Commit("a", {a}, false).status()), Reason::kSessionLost);
  const SequenceClaim digit{"1c", 1, {2}, {}};
  EXPECT_EQ(ReasonOf(table_.Commit("", {digit}, false).status()), Reason::kSessionLost);
  EXPECT_EQ(ReasonOf(table_.Commit("a", {Fork("child", "bc", 1, {2})}, false).status()), Reason::kSessionLost);
  EXPECT_THAT(table_.Close("a", {"bc", "c"}), IsEmpty());
  EXPECT_THAT(table_.Close("ab", {"c"}), ElementsAre(SessionTable::KeyOf("ab", "c")));
  EXPECT_NE(SessionTable::KeyOf("ab", "c"), SessionTable::KeyOf("a", "bc"));
}

TEST_F(SessionTableTest, KeepsTheLastWindowPositions) {
  for (int64_t p = 0; p < 1000; ++p) ASSERT_TRUE(Commit("s", p, {static_cast<int32_t>(p)}).ok()) << p;
  // [936, 1000) are kept: a start needs the 3 before it.
  EXPECT_EQ(ReasonOf(Commit("s", 938, {1}).status()), Reason::kPositionGap);
  EXPECT_THAT(*Commit("s", 939, {1}), ElementsAre(936, 937, 938, 1));
}

TEST_F(SessionTableTest, ACallLongerThanTheWindowCanBeRepeated) {
  ASSERT_TRUE(Commit("s", 0, Ids(50, 1)).ok());
  for (const size_t tokens : {61u, 62u, 64u, 500u}) {
    const Ids first = *Commit("s", 50, Ids(tokens, 2));
    const absl::StatusOr<Ids> again = Commit("s", 50, Ids(tokens, 2));
    ASSERT_TRUE(again.ok()) << tokens << ": " << again.status();
    EXPECT_EQ(*again, first);
  }
}

TEST_F(SessionTableTest, ALongPrefillDoesNotLeaveItsCapacityBehind) {
  ASSERT_TRUE(Commit("s", 0, Ids(100'000, 5)).ok());
  ASSERT_TRUE(Commit("s", 100'000, {5}).ok());
  EXPECT_LT(table_.stats().bytes, 2000);
}

}  // namespace
}  // namespace engram
