#include <string>

#include "absl/strings/str_cat.h"
#include "client/bench/worker/worker_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace engram::bench {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr absl::Duration kStep = absl::Milliseconds(10);

// 100 steps of 10 ms, each of them 2 ms longer; 5 ms of fetching a step.
WorkerRun SlowRun() {
  WorkerRun run;
  run.workers = 2;
  run.figures.steps = 100;
  run.figures.tokens = 1200;
  run.figures.emitted = 240;
  run.figures.realised = absl::Milliseconds(1200);
  run.figures.exposed = absl::Milliseconds(200);
  run.figures.fetched = absl::Milliseconds(500);
  run.figures.waits.resize(2);
  run.figures.fetches.resize(2);
  for (int i = 0; i < 100; ++i) run.figures.waits[0].Add(absl::Milliseconds(2));
  for (int i = 0; i < 100; ++i) run.figures.waits[1].Add(absl::ZeroDuration());
  run.figures.totals.bytes_down = 770000 * 100;
  return run;
}

TEST(PlayFigures, SlowdownAndWhatWasHidden) {
  const PlayFigures figures = SlowRun().figures;
  EXPECT_NEAR(figures.slowdown(kStep), 0.2, 1e-12);
  EXPECT_NEAR(figures.hidden(), 0.6, 1e-12);
  PlayFigures twice;
  twice.Merge(figures);
  twice.Merge(figures);
  EXPECT_EQ(twice.steps, 200);
  EXPECT_NEAR(twice.slowdown(kStep), 0.2, 1e-12);
  EXPECT_EQ(twice.waits[0].count(), 200);
}

TEST(BoundOf, FollowsTheEvidence) {
  WorkerRun run = SlowRun();
  run.engine_busy = 0.5;  // 6 of a step's 10 ms
  EXPECT_EQ(BoundOf(run, kStep), "");
  run.engine_busy = 0.92;
  EXPECT_EQ(BoundOf(run, kStep), "server-bound");
  // 0.85 of a time 1.2 times as long as it should be: more than there would be.
  run.engine_busy = 0.85;
  EXPECT_EQ(BoundOf(run, kStep), "server-bound");
  // Much longer steps than its computing explains: something else holds them up.
  WorkerRun starved = run;
  starved.figures.realised *= 10;
  starved.engine_busy = 0.4;
  EXPECT_EQ(BoundOf(starved, kStep), "");
  starved.engine_busy = 0.6;
  EXPECT_EQ(BoundOf(starved, kStep), "server-bound");
  run.engine_busy = 0.5;
  run.machine_busy = 0.95;
  EXPECT_EQ(BoundOf(run, kStep), "machine-bound");
  run.machine_busy = 0.5;
  run.engine_busy.reset();
  EXPECT_EQ(BoundOf(run, kStep), "saturated");
  run.local = true;
  EXPECT_EQ(BoundOf(run, kStep), "");
}

TEST(WorkerReport, SaysTheSameInTextAndJson) {
  WorkerReport report;
  report.options.step_ms = 10;
  report.layer_ids = {1, 14};
  report.server = "engram-server x";
  report.loopback = true;
  report.runs = {SlowRun()};
  report.runs[0].figures.totals.errors["RESOURCE_EXHAUSTED QUEUE_FULL"] = 3;
  report.runs[0].figures.failed_steps = 2;
  const std::string text = ReportText(report);
  EXPECT_THAT(text, HasSubstr("loopback: server and workers share this machine"));
  EXPECT_THAT(text, HasSubstr("wait L14 p50/p99 ms"));
  EXPECT_THAT(text, HasSubstr("20.0 %"));
  EXPECT_THAT(text, HasSubstr("770.0 kB"));
  EXPECT_THAT(text, HasSubstr("rows-native, 2 workers: 3 calls failed with RESOURCE_EXHAUSTED QUEUE_FULL"));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("rows-native, 2 workers: 2 of ", report.runs[0].figures.steps,
                                           " steps went on without")));
  EXPECT_THAT(text, Not(HasSubstr("WRONG")));
  EXPECT_THAT(text, Not(HasSubstr("verified"))) << "nothing was asked to be";
  WorkerReport verified = report;
  verified.options.verify_every = 2;
  verified.runs[0].figures.totals.verified = 12;
  EXPECT_THAT(ReportText(verified), HasSubstr("verified 12 layers, 0 wrong\n"));
  const auto json = nlohmann::json::parse(ReportJson(report));
  EXPECT_EQ(json["loopback"], true);
  const auto& run = json["runs"][0];
  EXPECT_NEAR(run["slowdown"].get<double>(), 0.2, 1e-12);
  // 2 workers, 12 tokens a step of 12 ms.
  EXPECT_NEAR(run["tokens_per_second"].get<double>(), 2000, 1e-9);
  EXPECT_EQ(run["layers"][1]["layer"], 14);
  EXPECT_NEAR(run["layers"][0]["exposed_ms"]["p50"].get<double>(), 2, 0.02);
  EXPECT_EQ(run["errors"]["RESOURCE_EXHAUSTED QUEUE_FULL"], 3);
  EXPECT_FALSE(run.contains("engine_busy"));
}

}  // namespace
}  // namespace engram::bench
