// The step API over a real server's socket, unary calls and pipelined streams mixed, against the plain model.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/api_model/network_driver.h"
#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/model/small_synth.h"

namespace engram {
namespace {

class NetworkModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = WriteSmallSynth(dir_.path());
    auto model = EngramModel::Load(path_, {});
    ASSERT_TRUE(model.ok()) << model.status();
    compute_ = std::make_unique<PlainCompute>(*model);
  }

  void WalkThrough(uint32_t seed, int64_t steps, Tally& tally) {
    const WalkOptions options;
    auto server =
        e2e::ServerProcess::Start(path_, {"--max-batch-tokens", std::to_string(3 + seed * 7 % 19), "--session-window",
                                          std::to_string(options.plain.session_window), "--position-limit",
                                          std::to_string(options.calls.position_limit), "--session-ttl-secs", "86400",
                                          "--ticket-ttl-ms", "86400000", "--threads", "2"});
    ASSERT_TRUE(server.ok()) << server.status();
    NetworkDriver driver((*server)->unix_address());
    Walk walk(seed, *compute_, options, driver, tally);
    for (int64_t step = 0; step < steps; ++step) {
      walk.Step();
      if (HasFatalFailure()) FAIL() << "seed " << seed << " step " << step;
    }
    const std::string& metrics = (*server)->metrics_address();
    EXPECT_EQ(e2e::MetricOf(metrics, "engram_sessions"), static_cast<double>(walk.plain().sessions().size()));
    EXPECT_EQ(e2e::MetricOf(metrics, "engram_tickets"), static_cast<double>(walk.plain().tickets().alive()));
    EXPECT_EQ(e2e::MetricOf(metrics, "engram_prepare_bytes"), static_cast<double>(walk.plain().tickets().held()));

    v1::StreamRequest close, release;
    for (char name = 'a'; name <= 'f'; ++name) close.mutable_close_sessions()->add_sessions(std::string(1, name));
    EXPECT_EQ(driver.Unary(close).closed, static_cast<int32_t>(walk.plain().sessions().size()));
    for (const PlainTicket& ticket : walk.plain().tickets().all()) release.mutable_release()->add_tickets(ticket.name);
    driver.Unary(release);
    for (const char* gauge : {"engram_sessions", "engram_session_bytes", "engram_tickets", "engram_prepare_bytes"}) {
      EXPECT_EQ(e2e::MetricOf(metrics, gauge), 0) << gauge;
    }
    EXPECT_TRUE(e2e::AwaitMetric(metrics, "engram_queue_tokens", 0));
  }

  const e2e::TempDir dir_;
  std::string path_;
  std::unique_ptr<PlainCompute> compute_;
};

TEST_F(NetworkModelTest, EveryAnswerIsThePlainModelsBitForBit) {
  Tally tally;
  const bool judged = WalkSeeds(2, 1500, [&](uint32_t seed, int64_t steps) { WalkThrough(seed, steps, tally); });
  if (judged && !HasFailure()) ExpectWellTravelled(tally);
}

}  // namespace
}  // namespace engram
