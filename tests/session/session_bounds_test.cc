// What bounds the table: the TTL, the memory, and what a call may cost when many sessions are held.
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/session/session_fixture.h"

namespace engram {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

std::string Key(const std::string& session) { return SessionTable::KeyOf("p", session); }

TEST_F(SessionTableTest, IdleSessionsGoAfterTheTtlAndAreNamed) {
  ASSERT_TRUE(Commit("old", 0, {1}).ok());
  ASSERT_TRUE(Commit("older by use", 0, {1}).ok());
  ASSERT_TRUE(Commit("old", 1, {1}).ok());
  now_ += absl::Seconds(400);
  ASSERT_TRUE(Commit("young", 0, {1}).ok());
  now_ += absl::Seconds(200);
  EXPECT_THAT(Call({{"young", 1, {1}, {}}})->forgotten, IsEmpty()) << "600 s is not over 600 s";
  now_ += absl::Seconds(1);
  EXPECT_THAT(Call({{"young", 1, {1}, {}}})->forgotten, ElementsAre(Key("older by use"), Key("old")));
  EXPECT_EQ(table_.stats().sessions, 1);
  EXPECT_EQ(table_.stats().evicted_idle, 2);
  EXPECT_EQ(ReasonOf(Commit("old", 1, {1}).status()), Reason::kSessionLost);
}

TEST_F(SessionTableTest, AnExpiredSessionIsLostAtOnceAndNamedByTheNextServedCall) {
  ASSERT_TRUE(Commit("s", 0, {1}).ok());
  now_ += absl::Seconds(601);
  EXPECT_EQ(ReasonOf(Commit("s", 1, {1}).status()), Reason::kSessionLost);
  EXPECT_EQ(ReasonOf(WindowOf(Fork("child", "s", 1, {1})).status()), Reason::kSessionLost);
  EXPECT_EQ(table_.stats().sessions, 1) << "a refused call changes nothing, so it can keep no list";
  EXPECT_THAT(Call({{"other", 0, {1}, {}}})->forgotten, ElementsAre(Key("s")));
}

TEST_F(SessionTableTest, AClockThatRunsBackForgetsNobodyAndLosesNobody) {
  now_ += absl::Hours(1);
  ASSERT_TRUE(Commit("a", 0, {1}).ok());
  now_ -= absl::Hours(1);
  ASSERT_TRUE(Commit("b", 0, {1}).ok());
  EXPECT_TRUE(Commit("a", 1, {1}).ok());
  now_ += absl::Hours(1) + absl::Seconds(601);
  EXPECT_THAT(Call({{"c", 0, {1}, {}}})->forgotten, UnorderedElementsAre(Key("a"), Key("b")));
}

TEST(SessionMemoryTest, LeastRecentlyUsedGoFirstAndTheCallAtHandNever) {
  SessionOptions options;
  options.memory_bytes = 5000;
  SessionTable table(options);
  std::vector<std::string> forgotten;
  for (int i = 0; i < 100; ++i) {
    const SequenceClaim claim{std::to_string(i), 0, Ids(40, 1), {}};
    const absl::StatusOr<CommitResult> result = table.Commit("p", {claim}, false);
    ASSERT_TRUE(result.ok());
    forgotten.insert(forgotten.end(), result->forgotten.begin(), result->forgotten.end());
    const SequenceClaim first{"0", 40 + i, {2}, {}};  // keep "0" in use
    const absl::StatusOr<CommitResult> again = table.Commit("p", {first}, false);
    ASSERT_TRUE(again.ok()) << i;
    forgotten.insert(forgotten.end(), again->forgotten.begin(), again->forgotten.end());
  }
  const SessionStats stats = table.stats();
  EXPECT_LE(stats.bytes, 5000);
  EXPECT_EQ(stats.sessions + stats.evicted_memory, 100);
  ASSERT_EQ(static_cast<int64_t>(forgotten.size()), stats.evicted_memory);
  for (size_t i = 0; i < forgotten.size(); ++i) EXPECT_EQ(forgotten[i], Key(std::to_string(i + 1)));

  // One call larger than all the memory: served, and then it is all there is.
  std::vector<SequenceClaim> claims;
  for (int i = 0; i < 50; ++i) claims.push_back({"big" + std::to_string(i), 0, Ids(40, 1), {}});
  ASSERT_TRUE(table.Commit("p", claims, false).ok());
  EXPECT_EQ(table.stats().sessions, 50);
  for (SequenceClaim& claim : claims) claim.start_pos = 40;
  EXPECT_TRUE(table.Commit("p", claims, false).ok()) << "and may go on";
}

TEST(SessionMemoryTest, AForkedParentOutlivesWhatWasUsedBeforeItButNotTheChildren) {
  SessionOptions options;
  options.memory_bytes = 2000;
  SessionTable table(options);
  for (const char* name : {"parent", "other"}) {
    const SequenceClaim claim{name, 0, Ids(100, 1), {}};
    ASSERT_TRUE(table.Commit("p", {claim}, false).ok());
  }
  const absl::StatusOr<CommitResult> result = table.Commit("p", {Fork("child", "parent", 100, {2})}, false);
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(result->forgotten, ElementsAre(Key("other")));
}

TEST_F(SessionTableTest, ALongPrefillDoesNotLeaveItsCapacityBehind) {
  ASSERT_TRUE(Commit("s", 0, Ids(100'000, 5)).ok());
  ASSERT_TRUE(Commit("s", 100'000, {5}).ok());
  EXPECT_LT(table_.stats().bytes, 64 * 9 / 8 * 4 + 400);
}

TEST(SessionMemoryTest, ADeepRewindGivesItsMemoryBack) {
  SessionTable table(SessionOptions{});
  const SequenceClaim deep{"s", 0, Ids(8192, 5), {}};
  ASSERT_TRUE(table.Commit("p", {deep}, false).ok());
  EXPECT_GT(table.stats().bytes, 8192 * 4);
  const SequenceClaim shallow{"s", 10, {5}, {}};
  ASSERT_TRUE(table.Commit("p", {shallow}, false).ok());
  EXPECT_LT(table.stats().bytes, 500);
}

// Budget per session: 4 bytes a position, an eighth of slack, and 384 for the session itself.
TEST(SessionScaleTest, AHundredThousandSessionsKeepTheirBudgetAndNoCallLooksAtTheOthers) {
  constexpr int kSessions = 100'000;
  constexpr int kPrompt = 30;
  constexpr int kDecoded = 10;
  absl::Time now = absl::UnixEpoch();
  SessionOptions options;
  options.clock = [&now] { return now; };
  SessionTable table(options);
  const auto name = [](int i) { return absl::StrCat("worker-0123456789/", i); };  // too long to sit in the string
  for (int i = 0; i < kSessions; ++i) {
    const SequenceClaim claim{name(i), 0, Ids(kPrompt, i), {}};
    ASSERT_TRUE(table.Commit("p", {claim}, false).ok());
  }
  // One decode step of a call's worth of them costs as many visits as when nobody else was there.
  for (int step = 0; step < kDecoded; ++step) {
    for (int first = 0; first < kSessions; first += 1000) {
      std::vector<SequenceClaim> claims;
      for (int i = first; i < first + 1000; ++i) claims.push_back({name(i), kPrompt + step, {step}, {}});
      const int64_t visits = table.stats().visits;
      const absl::StatusOr<CommitResult> result = table.Commit("p", claims, false);
      ASSERT_TRUE(result.ok());
      ASSERT_THAT(result->forgotten, IsEmpty());
      ASSERT_EQ(table.stats().visits - visits, 2 * 1000) << "one to find it, one to move it to the front";
    }
  }
  const SessionStats stats = table.stats();
  EXPECT_EQ(stats.sessions, kSessions);
  constexpr int64_t kPositions = kPrompt + kDecoded;
  const double per_session = static_cast<double>(stats.bytes) / kSessions;
  RecordProperty("bytes_per_session", std::to_string(per_session));
  EXPECT_LE(per_session, 4.0 * kPositions * 9 / 8 + 384);
  EXPECT_GE(per_session, 4.0 * kPositions);

  // Eviction costs what is evicted: all but the last thousand have expired.
  now += absl::Seconds(300);
  std::vector<SequenceClaim> claims;
  for (int i = 0; i < 1000; ++i) claims.push_back({name(i), kPositions, {1}, {}});
  ASSERT_TRUE(table.Commit("p", claims, false).ok());
  now += absl::Seconds(301);
  const int64_t visits = table.stats().visits;
  const SequenceClaim one{name(0), kPositions + 1, {1}, {}};
  const absl::StatusOr<CommitResult> result = table.Commit("p", {one}, false);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->forgotten.size(), static_cast<size_t>(kSessions - 1000));
  EXPECT_EQ(table.stats().visits - visits, kSessions - 1000 + 2);
  const int64_t quiet = table.stats().visits;
  ASSERT_TRUE(table.Commit("p", {one}, false).ok());
  EXPECT_EQ(table.stats().visits - quiet, 2);
}

// 8 threads, 8 sessions each of its own principal's and all of one shared principal, every kind of call. What belongs
// to one thread alone behaves as if nobody else were there; what is shared stays whole.
TEST(SessionThreadsTest, EightThreadsOfMixedCallsKeepEveryHistoryWhole) {
  SessionOptions options;
  options.window = 32;
  options.memory_bytes = 1 << 20;
  SessionTable table(options);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&table, t] {
      const std::string own = absl::StrCat("principal ", t);
      std::vector<int64_t> length(8, 0);
      for (int i = 0; i < 2000; ++i) {
        const int s = (i * 5 + t) % 8;
        const std::string name = std::to_string(s);
        const int64_t start = i % 11 == 0 ? 0 : length[static_cast<size_t>(s)];
        const SequenceClaim mine{name, start, Ids(static_cast<size_t>(1 + i % 5), t), {}, i};
        const absl::StatusOr<CommitResult> result = table.Commit(own, {mine}, false);
        ASSERT_TRUE(result.ok()) << result.status();
        for (const int32_t id : result->windows) ASSERT_TRUE(id == t || id == kDead) << "another thread's id";
        length[static_cast<size_t>(s)] = start + 1 + i % 5;

        // Every session of "shared" holds one thread's ids, the same at all positions, or forks and appends of others.
        const std::string other = std::to_string((s + 1 + i % 7) % 8);
        std::vector<SequenceClaim> claims = {{name, 0, Ids(static_cast<size_t>(3 + i % 7), t), {}, {}}};
        claims.push_back(Fork(other, name, 3, {t}));
        const absl::StatusOr<CommitResult> shared = table.Commit("shared", claims, true);
        ASSERT_TRUE(shared.ok()) << shared.status();
        ASSERT_EQ(shared->windows.size(), static_cast<size_t>(3 + 3 + i % 7 + 3 + 1));
        if (i % 13 == 0) table.Close("shared", {name, other});
        if (i % 17 == 0) table.stats();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(table.stats().sessions, 8 * 8 + 8);
  for (int t = 0; t < 8; ++t) {
    for (int s = 0; s < 8; ++s) {
      EXPECT_EQ(table.Close(absl::StrCat("principal ", t), {std::to_string(s)}).size(), 1);
      table.Close("shared", {std::to_string(s)});
    }
  }
  EXPECT_EQ(table.stats().sessions, 0);
  EXPECT_EQ(table.stats().bytes, 0);
}

}  // namespace
}  // namespace engram
