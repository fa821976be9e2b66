#include "client/bench/worker/machine_share.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engram::bench {
namespace {

using testing::HasSubstr;

TEST(EngineSeconds, IsTheSumOfTheStagesThatCompute) {
  ServerChange change;
  EXPECT_FALSE(EngineSeconds(change).has_value());
  change.stages["queue"].seconds = 100;
  EXPECT_FALSE(EngineSeconds(change).has_value());
  change.stages["hash"].seconds = 0.5;
  change.stages["gather"].seconds = 1.25;
  change.stages["project"].seconds = 8;
  change.stages["gate"].seconds = 0.25;
  EXPECT_EQ(EngineSeconds(change), 10);
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
