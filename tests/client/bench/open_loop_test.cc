// The two loops against an echo server that is made to stall: what an open loop is for.
#include <signal.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "client/bench/connections.h"
#include "client/bench/echo_process.h"
#include "client/bench/load_run.h"
#include "client/bench/request_composer.h"
#include "client/bench/step_source.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::bench {
namespace {

constexpr double kRate = 200;
constexpr absl::Duration kStall = absl::Milliseconds(600);
// A fifth of the stall, so that a machine's own pauses do not look like it.
constexpr absl::Duration kLong = absl::Milliseconds(120);

class OpenLoopTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto echo = EchoProcess::Start(ENGRAM_BENCH, GetParam());
    ASSERT_TRUE(echo.ok()) << echo.status();
    echo_ = *std::move(echo);
    connections_ = std::make_unique<Connections>(std::vector<std::string>{echo_->address()}, 2, 2, 1 << 20);
    // Connects, and faults in what the first calls need.
    Run(4, absl::Milliseconds(100));
  }

  // Stops the server for kStall, from 200 ms on.
  std::thread StallLater() {
    return std::thread([pid = echo_->pid()] {
      absl::SleepFor(absl::Milliseconds(200));
      kill(pid, SIGSTOP);
      absl::SleepFor(kStall);
      kill(pid, SIGCONT);
    });
  }

  LoadRunOptions Options(size_t slots, absl::Duration duration) const {
    return {.echo = true, .slots = slots, .duration = duration, .timeout = absl::Seconds(20)};
  }

  Stretch Run(size_t slots, absl::Duration duration) {
    SteadySource steps(model_, {}, slots, composer_.highway_starts());
    return RunClosedLoop(*connections_, composer_, steps, Options(slots, duration));
  }

  Stretch RunOpen(size_t slots, absl::Duration duration) {
    SteadySource steps(model_, {}, slots, composer_.highway_starts());
    Arrivals arrivals(ArrivalKind::kConstant, kRate, 1);
    return RunOpenLoop(*connections_, composer_, steps, arrivals, Options(slots, duration));
  }

  const client::ModelInfo model_ = client::SampleModel();
  const RequestComposer composer_{model_, {1, 14}, client::HighwayDtype::kF32, 4, 1};
  std::unique_ptr<EchoProcess> echo_;
  std::unique_ptr<Connections> connections_;
};

TEST_P(OpenLoopTest, CallsDueDuringAStallAreSlowByWhatTheyWaited) {
  std::thread stall = StallLater();
  const Stretch stretch = RunOpen(1000, absl::Seconds(2));
  stall.join();
  EXPECT_EQ(stretch.tally.failed(), 0);
  EXPECT_EQ(stretch.tally.calls(), 400);
  EXPECT_EQ(stretch.bound_hits, 0);
  EXPECT_EQ(stretch.unsent, 0);
  // 120 calls were due while it stood, 96 of them more than kLong before its end.
  EXPECT_GE(stretch.tally.latency.max(), kStall * 0.9);
  EXPECT_GE(stretch.tally.latency.Quantile(0.8), kLong);
}

TEST_P(OpenLoopTest, ABoundOnCallsUnderWayIsToldAndHidesNoLatency) {
  std::thread stall = StallLater();
  const Stretch stretch = RunOpen(4, absl::Seconds(2));
  stall.join();
  EXPECT_GT(stretch.bound_hits, 0);
  EXPECT_GT(stretch.bound_waits, kLong);
  EXPECT_EQ(stretch.tally.calls() + stretch.unsent, 400);
  EXPECT_GE(stretch.tally.latency.Quantile(0.8), kLong) << "calls that waited in here for a slot were late";
}

TEST_P(OpenLoopTest, WhatIsDueAndCannotBeSentInTimeIsCounted) {
  kill(echo_->pid(), SIGSTOP);
  std::thread later([pid = echo_->pid()] {
    absl::SleepFor(absl::Seconds(1));
    kill(pid, SIGCONT);
  });
  const Stretch stretch = RunOpen(4, absl::Milliseconds(500));
  later.join();
  // Four, and what was under way when the signal took hold.
  EXPECT_GE(stretch.tally.calls(), 4);
  EXPECT_LE(stretch.tally.calls(), 10);
  EXPECT_EQ(stretch.tally.calls() + stretch.unsent, 100);
}

TEST_P(OpenLoopTest, AClosedLoopSeesTheSameStallOnceACaller) {
  std::thread stall = StallLater();
  const Stretch stretch = Run(1, absl::Seconds(2));
  stall.join();
  EXPECT_GE(stretch.tally.latency.max(), kStall * 0.9);
  EXPECT_LT(stretch.tally.latency.Quantile(0.5), kLong);
}

TEST_P(OpenLoopTest, AServerThatIsGoneGivesErrorsByCodeAndAnEnd) {
  kill(echo_->pid(), SIGKILL);
  const Stretch stretch = Run(2, absl::Milliseconds(400));
  ASSERT_EQ(stretch.tally.errors.count("UNAVAILABLE"), 1u);
  // Not a storm of refused connections.
  EXPECT_LT(stretch.tally.failed(), 100);
}

INSTANTIATE_TEST_SUITE_P(Transports, OpenLoopTest, testing::Values("unix:/any", "127.0.0.1:1"),
                         [](const auto& transport) { return transport.index == 0 ? "Unix" : "Tcp"; });

TEST(Arrivals, KeepTheirRateAndAreTheSameForTheSameSeed) {
  for (const ArrivalKind kind : {ArrivalKind::kConstant, ArrivalKind::kPoisson}) {
    Arrivals arrivals(kind, 1000, 5), again(kind, 1000, 5);
    int64_t last = -1;
    int64_t due = 0;
    for (int call = 0; call < 10'000; ++call) {
      due = arrivals.Next();
      EXPECT_EQ(due, again.Next());
      EXPECT_GE(due, last);
      last = due;
    }
    // 10,000 exponential gaps: within 5 standard deviations of 1 %.
    EXPECT_NEAR(static_cast<double>(due), 10e9, 0.5e9) << ArrivalName(kind);
  }
}

TEST(Arrivals, ATraceIsRepeatedWithItsMeanGapBetween) {
  Arrivals arrivals({5'000'000, 7'000'000, 9'000'000});
  for (const int64_t due : {0, 2'000'000, 4'000'000, 6'000'000, 8'000'000, 10'000'000, 12'000'000}) {
    EXPECT_EQ(arrivals.Next(), due);
  }
  Arrivals alone({0});
  alone.Next();
  EXPECT_GT(alone.Next(), 0) << "time goes on";
}

}  // namespace
}  // namespace engram::bench
