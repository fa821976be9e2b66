#include "client/bench/worker/machine_share.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engram::bench {
namespace {

using testing::HasSubstr;

TEST(EngineSeconds, IsTheSumOfTheStagesThatCompute) {
  const std::string text =
      "# TYPE engram_stage_duration_seconds histogram\n"
      "engram_stage_duration_seconds_count{stage=\"queue\"} 7\n"
      "engram_stage_duration_seconds_sum{stage=\"queue\"} 100\n"
      "engram_stage_duration_seconds_sum{stage=\"hash\"} 0.5\n"
      "engram_stage_duration_seconds_sum{stage=\"gather\"} 1.25\n"
      "engram_stage_duration_seconds_sum{stage=\"project\"} 8e0\n"
      "engram_stage_duration_seconds_sum{stage=\"gate\"} 0.25\n";
  const absl::StatusOr<double> seconds = EngineSeconds(text);
  ASSERT_TRUE(seconds.ok()) << seconds.status();
  EXPECT_EQ(*seconds, 10);
  EXPECT_THAT(std::string(EngineSeconds("engram_up 1\n").status().message()), HasSubstr("stage=\"hash\""));
}

TEST(BusyShare, SaysWhyTheEngineIsNotKnown) {
  BusyShare unread("");
  unread.Begin();
  unread.End();
  EXPECT_FALSE(unread.engine().has_value());
  EXPECT_EQ(unread.fault(), "");
  BusyShare wrong("nonsense");
  wrong.Begin();
  wrong.End();
  EXPECT_FALSE(wrong.engine().has_value());
  EXPECT_THAT(wrong.fault(), HasSubstr("nonsense"));
}

}  // namespace
}  // namespace engram::bench
