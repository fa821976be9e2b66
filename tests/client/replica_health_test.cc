#include "client/replica_health.h"

#include "gtest/gtest.h"

namespace engram::client {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1000);
constexpr Ejection kEjection = {.failures = 3, .base = absl::Seconds(1), .max = absl::Seconds(5)};

absl::Time At(double seconds) { return kStart + absl::Seconds(seconds); }

ReplicaHealth Serving() {
  ReplicaHealth health(kEjection, kStart);
  health.Asked(Finding::kGood, false, true, kStart);
  return health;
}

TEST(ReplicaHealth, ANewOneIsAskedAtOnceAndGetsNoCallsBefore) {
  ReplicaHealth health(kEjection, kStart);
  EXPECT_FALSE(health.gets_calls());
  EXPECT_EQ(health.ask_at(), kStart);
  health.Asked(Finding::kGood, false, true, kStart);
  EXPECT_EQ(health.state(), ReplicaState::kServing);
  EXPECT_EQ(health.ask_at(), absl::InfiniteFuture());
}

TEST(ReplicaHealth, OneThatNeverAnsweredIsAskedOftenAndNotSlowerThanTheFirstPause) {
  ReplicaHealth health(kEjection, kStart);
  for (double pause : {0.1, 0.2, 0.4, 0.8, 1.0, 1.0}) {
    const absl::Time now = health.ask_at();
    health.Asked(Finding::kUnavailable, false, false, now);
    EXPECT_EQ(health.ask_at(), now + absl::Seconds(pause));
    EXPECT_EQ(health.state(), ReplicaState::kNew);
  }
}

TEST(ReplicaHealth, FailuresInARowEjectAndASuccessBetweenThemForgives) {
  ReplicaHealth health = Serving();
  health.Failed(false, kStart);
  health.Failed(false, kStart);
  health.Answered(false, kStart);
  health.Failed(false, kStart);
  health.Failed(false, kStart);
  EXPECT_TRUE(health.gets_calls());
  health.Failed(false, kStart);
  EXPECT_EQ(health.state(), ReplicaState::kEjected);
  EXPECT_EQ(health.ask_at(), At(1));
}

TEST(ReplicaHealth, AnUnreachableOneIsEjectedAtOnce) {
  ReplicaHealth health = Serving();
  health.Failed(true, kStart);
  EXPECT_EQ(health.state(), ReplicaState::kEjected);
}

TEST(ReplicaHealth, PausesDoubleUpToTheMaximumUntilACallIsAnswered) {
  ReplicaHealth health = Serving();
  health.Failed(true, kStart);
  for (double pause : {1, 2, 4, 5, 5}) {
    const absl::Time now = health.ask_at();
    health.Asked(Finding::kGood, false, false, now);
    ASSERT_TRUE(health.gets_calls());
    health.Failed(true, now);
    EXPECT_EQ(health.ask_at() - now, absl::Seconds(pause == 5 ? 5 : std::min(pause * 2, 5.0)));
  }
  health.Asked(Finding::kGood, false, false, health.ask_at());
  health.Answered(false, At(100));
  health.Failed(true, At(100));
  EXPECT_EQ(health.ask_at(), At(101)) << "an answered call starts the pauses anew";
}

TEST(ReplicaHealth, ManyCallsThatFailAtOnceAreOneEjection) {
  ReplicaHealth health = Serving();
  for (int i = 0; i < 50; ++i) health.Failed(true, kStart);
  EXPECT_EQ(health.ask_at(), At(1));
  health.Answered(false, kStart);
  EXPECT_EQ(health.state(), ReplicaState::kEjected) << "a late answer is of before";
}

TEST(ReplicaHealth, AskedBeforeItsTimeInVainItsPauseStays) {
  ReplicaHealth health = Serving();
  health.Failed(true, kStart);
  for (int i = 0; i < 20; ++i) health.Asked(Finding::kUnavailable, false, false, At(0.5));
  EXPECT_EQ(health.ask_at(), At(1));
  health.Asked(Finding::kUnavailable, false, false, At(1));
  EXPECT_EQ(health.ask_at(), At(3));
}

TEST(ReplicaHealth, TheDrainTrailerTurnsCallsAwayUntilItIsGone) {
  ReplicaHealth health = Serving();
  health.Answered(true, kStart);
  EXPECT_EQ(health.state(), ReplicaState::kDraining);
  EXPECT_TRUE(health.gets_calls()) << "it still serves, where no other does";
  EXPECT_EQ(health.ask_at(), At(1));
  health.Asked(Finding::kGood, true, false, At(1));
  EXPECT_EQ(health.state(), ReplicaState::kDraining);
  EXPECT_EQ(health.ask_at(), At(2));
  health.Asked(Finding::kGood, false, true, At(2));
  EXPECT_EQ(health.state(), ReplicaState::kServing);
}

TEST(ReplicaHealth, OneThatRefusesBecauseItDrainsStaysOutWhileItOnlyAnswersQuestions) {
  ReplicaHealth health = Serving();
  health.RefusedDraining(kStart);
  EXPECT_FALSE(health.gets_calls());
  health.Asked(Finding::kGood, true, false, At(1));
  EXPECT_FALSE(health.gets_calls());
  EXPECT_EQ(health.ask_at(), At(2));
  ReplicaHealth restarted = health;
  restarted.Asked(Finding::kGood, true, true, At(2));
  EXPECT_EQ(restarted.state(), ReplicaState::kDraining) << "another process, which drains too but serves";
  health.Asked(Finding::kGood, false, false, At(2));
  EXPECT_EQ(health.state(), ReplicaState::kServing);
}

TEST(ReplicaHealth, AnotherModelIsAskedAgainSlowerAndSlower) {
  ReplicaHealth health(kEjection, kStart);
  health.Asked(Finding::kOtherModel, false, true, kStart);
  EXPECT_EQ(health.state(), ReplicaState::kOtherModel);
  EXPECT_EQ(health.ask_at(), At(1));
  health.Asked(Finding::kUnavailable, false, false, At(1));
  EXPECT_EQ(health.state(), ReplicaState::kOtherModel);
  EXPECT_EQ(health.ask_at(), At(3));
  health.Asked(Finding::kOtherNumerics, false, true, At(3));
  EXPECT_EQ(health.state(), ReplicaState::kOtherNumerics);
  EXPECT_EQ(health.ask_at(), At(7));
  health.Asked(Finding::kGood, false, true, At(7));
  EXPECT_EQ(health.state(), ReplicaState::kServing);
}

TEST(ReplicaHealth, InDoubtItIsAskedAtOnce) {
  ReplicaHealth health = Serving();
  health.Doubt(At(5));
  EXPECT_FALSE(health.gets_calls());
  EXPECT_EQ(health.ask_at(), At(5));
}

TEST(ReplicaHealth, OneThatVanishedGetsNothingUntilItReturnsAsNew) {
  ReplicaHealth health = Serving();
  health.Vanish();
  EXPECT_FALSE(health.gets_calls());
  health.Asked(Finding::kGood, false, false, kStart);
  EXPECT_EQ(health.state(), ReplicaState::kGone);
  EXPECT_EQ(health.ask_at(), absl::InfiniteFuture());
  health.Return(At(9));
  EXPECT_EQ(health.state(), ReplicaState::kNew);
  EXPECT_EQ(health.ask_at(), At(9));
}

TEST(ReplicaHealth, PausesOfAnyLengthDoNotOverflow) {
  ReplicaHealth health({.failures = 1, .base = absl::Hours(1), .max = absl::InfiniteDuration()}, kStart);
  health.Asked(Finding::kOtherModel, false, true, kStart);
  for (int i = 0; i < 100; ++i) {
    const absl::Time at = health.ask_at();
    health.Asked(Finding::kOtherModel, false, false, at);
    ASSERT_GE(health.ask_at(), at + absl::Hours(1));
  }
}

}  // namespace
}  // namespace engram::client
