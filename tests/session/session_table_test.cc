// The rules of a session's history, one named test each.
#include "server/session/session_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

constexpr int32_t kDead = kernels::kDead;

class SessionTableTest : public ::testing::Test {
 protected:
  SessionOptions Options() {
    SessionOptions options;
    options.max_ngram = 4;
    options.window = 64;
    options.clock = [this] { return now_; };
    return options;
  }

  // Commits one sequence; its window, or the reason of the refusal.
  absl::StatusOr<Ids> Commit(const std::string& session, int64_t start, Ids ids, Ids lookback = {}) {
    const SequenceClaim claim{session, start, std::move(ids), std::move(lookback)};
    return table_.Commit("p", {claim});
  }

  static Reason ReasonOf(const absl::Status& status) {
    const RefusalDetail detail = DetailOf(status);
    return detail.offenders.empty() ? Reason::kLoading : detail.offenders.front().reason;
  }

  absl::Time now_ = absl::UnixEpoch();
  SessionTable table_{Options()};
};

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
  const absl::Status status = table_.Commit("p", claims).status();
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
  ASSERT_TRUE(table_.Commit("ab", {ab}).ok());
  const SequenceClaim a{"bc", 1, {2}, {}};
  EXPECT_EQ(ReasonOf(table_.Commit("a", {a}).status()), Reason::kSessionLost);
  const SequenceClaim digit{"1c", 1, {2}, {}};
  EXPECT_EQ(ReasonOf(table_.Commit("", {digit}).status()), Reason::kSessionLost);
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

TEST_F(SessionTableTest, IdleSessionsGoAfterTheTtl) {
  ASSERT_TRUE(Commit("old", 0, {1}).ok());
  now_ += absl::Seconds(400);
  ASSERT_TRUE(Commit("young", 0, {1}).ok());
  now_ += absl::Seconds(300);
  ASSERT_TRUE(Commit("young", 1, {1}).ok());
  EXPECT_EQ(table_.stats().sessions, 1);
  EXPECT_EQ(table_.stats().evicted_idle, 1);
  EXPECT_EQ(ReasonOf(Commit("old", 1, {1}).status()), Reason::kSessionLost);
}

TEST(SessionMemoryTest, LeastRecentlyUsedGoFirstAndTheCallAtHandNever) {
  SessionOptions options;
  options.memory_bytes = 3000;
  SessionTable table(options);
  for (int i = 0; i < 100; ++i) {
    const SequenceClaim claim{std::to_string(i), 0, Ids(40, 1), {}};
    ASSERT_TRUE(table.Commit("p", {claim}).ok());
    const SequenceClaim first{"0", 40 + i, {2}, {}};  // keep "0" in use
    ASSERT_TRUE(table.Commit("p", {first}).ok()) << i;
  }
  const SessionStats stats = table.stats();
  EXPECT_LE(stats.bytes, 3000);
  EXPECT_EQ(stats.sessions + stats.evicted_memory, 100);

  // One call larger than all the memory: served, and then it is all there is.
  std::vector<SequenceClaim> claims;
  for (int i = 0; i < 50; ++i) claims.push_back({"big" + std::to_string(i), 0, Ids(40, 1), {}});
  ASSERT_TRUE(table.Commit("p", claims).ok());
  EXPECT_EQ(table.stats().sessions, 50);
}

TEST(SessionThreadsTest, ManyThreadsOnFewSessionsKeepEveryHistoryWhole) {
  SessionTable table(SessionOptions{});
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&table, t] {
      for (int i = 0; i < 500; ++i) {
        const std::string name = std::to_string((t + i) % 4);
        const SequenceClaim claim{name, 0, Ids(static_cast<size_t>(1 + i % 7), t), {}};
        ASSERT_TRUE(table.Commit("p", {claim}).ok());
        table.stats();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(table.stats().sessions, 4);
}

}  // namespace
}  // namespace engram
