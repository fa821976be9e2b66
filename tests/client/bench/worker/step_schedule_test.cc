#include "client/bench/worker/step_schedule.h"

#include <vector>

#include "gtest/gtest.h"

namespace engram::bench {
namespace {

absl::Duration Ms(double ms) { return absl::Milliseconds(ms); }

const std::vector<int32_t> kLayers = {1, 14};

// A clock that a test sets: steps of 8 ms, 40 layers, from 100 ms on. Layer 1 is reached after 0.2 ms, layer 14
// after 2.8.
TEST(StepSchedule, WhatIsThereInTimeCostsNothing) {
  StepSchedule schedule(Ms(8), 40, kLayers);
  schedule.Begin(Ms(100));
  EXPECT_EQ(schedule.ReachedAt(0), Ms(100.2));
  EXPECT_EQ(schedule.Arrived(0, Ms(100.1)), absl::ZeroDuration());
  EXPECT_EQ(schedule.ReachedAt(1), Ms(102.8));
  EXPECT_EQ(schedule.Arrived(1, Ms(102.8)), absl::ZeroDuration());
  EXPECT_EQ(schedule.end(), Ms(108));
  EXPECT_EQ(schedule.exposed(), absl::ZeroDuration());
}

TEST(StepSchedule, AWaitDelaysEverythingAfterIt) {
  StepSchedule schedule(Ms(8), 40, kLayers);
  schedule.Begin(Ms(100));
  EXPECT_EQ(schedule.Arrived(0, Ms(101.2)), Ms(1));
  // Layer 14 comes 1 ms later: what is there at 103.5 is there in time now.
  EXPECT_EQ(schedule.ReachedAt(1), Ms(103.8));
  EXPECT_EQ(schedule.Arrived(1, Ms(103.5)), absl::ZeroDuration());
  EXPECT_EQ(schedule.end(), Ms(109));
  EXPECT_EQ(schedule.exposed(), Ms(1));
}

TEST(StepSchedule, WaitsAddUpAndTheNextStepBeginsAnew) {
  StepSchedule schedule(Ms(8), 40, kLayers);
  schedule.Begin(Ms(100));
  EXPECT_EQ(schedule.Arrived(0, Ms(100.7)), Ms(0.5));
  EXPECT_EQ(schedule.Arrived(1, Ms(105.3)), Ms(2));
  EXPECT_EQ(schedule.exposed(), Ms(2.5));
  EXPECT_EQ(schedule.end(), Ms(110.5));
  schedule.Begin(schedule.end());
  EXPECT_EQ(schedule.exposed(), absl::ZeroDuration());
  EXPECT_EQ(schedule.ReachedAt(0), Ms(110.7));
  EXPECT_EQ(schedule.end(), Ms(118.5));
}

TEST(StepSchedule, ALayerAtTheTopIsReachedAtOnce) {
  const std::vector<int32_t> layers = {0};
  StepSchedule schedule(Ms(8), 40, layers);
  schedule.Begin(Ms(1));
  EXPECT_EQ(schedule.ReachedAt(0), Ms(1));
  EXPECT_EQ(schedule.Arrived(0, Ms(3)), Ms(2));
  EXPECT_EQ(schedule.end(), Ms(11));
}

}  // namespace
}  // namespace engram::bench
