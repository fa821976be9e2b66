#include "client/bench/worker/population.h"

#include <algorithm>
#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace engram::bench {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

PopulationOptions Small() { return {.batch = 4, .vocab = 1000, .max_ngram = 4, .seed = 7}; }

void ExpectSameRuns(const PlannedStep& a, const PlannedStep& b) {
  ASSERT_EQ(a.runs.size(), b.runs.size());
  for (size_t i = 0; i < a.runs.size(); ++i) {
    EXPECT_EQ(a.runs[i].start_pos, b.runs[i].start_pos);
    EXPECT_EQ(a.runs[i].token_ids, b.runs[i].token_ids);
    EXPECT_EQ(a.runs[i].lookback, b.runs[i].lookback);
  }
}

TEST(Population, ASeedIsReplayedAndAnotherOneIsNot) {
  Population first(Small()), again(Small());
  for (int i = 0; i < 200; ++i) ExpectSameRuns(first.Next(), again.Next());
  PopulationOptions other = Small();
  other.seed = 8;
  EXPECT_NE(Population(other).Next().runs[0].token_ids, Population(Small()).Next().runs[0].token_ids);
}

TEST(Population, AStepVerifiesTheNewestTokenAndItsDraftsOfEverySequence) {
  PopulationOptions options = Small();
  options.spec_k = 5;
  options.output_mean = 1 << 20;
  Population population(options);
  const PlannedStep step = population.Next();
  ASSERT_THAT(step.runs, SizeIs(4));
  for (const StepRun& run : step.runs) {
    EXPECT_THAT(run.token_ids, SizeIs(6));
    EXPECT_THAT(run.lookback, SizeIs(3));
    for (const int32_t id : run.token_ids) EXPECT_TRUE(id >= 0 && id < 1000) << id;
  }
  EXPECT_EQ(step.tokens, 24);
  EXPECT_EQ(step.prefill_tokens, 0);
}

// One sequence, followed: the next step begins behind what settled, over what was rejected, and its look-back is what
// stands there now.
TEST(Population, RejectedDraftsAreWrittenOver) {
  PopulationOptions options = Small();
  options.batch = 1;
  options.accept = 0.5;
  options.output_mean = 1 << 20;
  Population population(options);
  std::map<int64_t, int32_t> ids;
  PlannedStep step = population.Next();
  int rollbacks = 0;
  for (int i = 0; i < 500; ++i) {
    const StepRun& run = step.runs[0];
    const auto tokens = static_cast<int64_t>(run.token_ids.size());
    for (int64_t t = 0; t < tokens; ++t) ids[run.start_pos + t] = run.token_ids[static_cast<size_t>(t)];
    PlannedStep next = population.Next();
    const int64_t settled = next.runs[0].start_pos - run.start_pos;
    EXPECT_EQ(settled, step.emitted);
    EXPECT_GE(settled, 1);
    EXPECT_LE(settled, tokens);
    rollbacks += settled < tokens ? 1 : 0;
    for (int64_t back = 1; back <= 3; ++back) {
      const auto known = ids.find(next.runs[0].start_pos - back);
      if (known == ids.end()) continue;  // from before the run
      EXPECT_EQ(next.runs[0].lookback[static_cast<size_t>(back - 1)], known->second);
    }
    step = std::move(next);
  }
  EXPECT_GT(rollbacks, 400);
}

double MeanEmitted(double accept, int spec_k) {
  PopulationOptions options = Small();
  options.batch = 1;
  options.accept = accept;
  options.spec_k = spec_k;
  options.output_mean = 1 << 20;
  Population population(options);
  int64_t emitted = 0;
  constexpr int kSteps = 20000;
  for (int i = 0; i < kSteps; ++i) emitted += population.Next().emitted;
  return static_cast<double>(emitted) / kSteps;
}

TEST(Population, DraftsAreAcceptedInTurn) {
  EXPECT_EQ(MeanEmitted(0, 5), 1);
  EXPECT_EQ(MeanEmitted(1, 5), 6);
  EXPECT_EQ(MeanEmitted(0.6, 0), 1);
  // 1 + a + a^2 + ... + a^5.
  EXPECT_NEAR(MeanEmitted(0.6, 5), 2.383, 0.03);
}

TEST(Population, NewSequencesBringTheirPromptInChunks) {
  PopulationOptions options = Small();
  options.prompt_mean = 100;
  options.output_mean = 20;
  options.prefill_chunk = 16;
  Population population(options);
  int64_t arrived = 0, prefilled = 0, prefill_steps = 0;
  for (int i = 0; i < 4000; ++i) {
    const PlannedStep step = population.Next();
    int64_t tokens = 0;
    for (const StepRun& run : step.runs) {
      tokens += static_cast<int64_t>(run.token_ids.size());
      if (run.start_pos == 0) {
        EXPECT_THAT(run.lookback, ElementsAre(-1, -1, -1));
      }
    }
    EXPECT_EQ(step.tokens, tokens);
    EXPECT_LE(step.tokens, population.max_step_tokens());
    EXPECT_LE(step.prefill_tokens, 16);
    EXPECT_GE(step.tokens, 1);
    arrived += i == 0 ? 0 : step.arrived;
    prefilled += step.prefill_tokens;
    prefill_steps += step.prefill_tokens > 0 ? 1 : 0;
  }
  EXPECT_GT(arrived, 100);
  EXPECT_GT(prefill_steps, 1000);
  EXPECT_NEAR(static_cast<double>(prefilled) / static_cast<double>(arrived), 100, 20);
}

TEST(Population, WithoutPrefillSequencesArriveReadyToDecode) {
  PopulationOptions options = Small();
  options.output_mean = 5;
  options.prefill_chunk = 0;
  Population population(options);
  int64_t arrived = 0;
  for (int i = 0; i < 300; ++i) {
    const PlannedStep step = population.Next();
    EXPECT_EQ(step.tokens, 24);
    EXPECT_EQ(step.prefill_tokens, 0);
    arrived += step.arrived;
  }
  EXPECT_GT(arrived, 100);
}

TEST(Population, NoPositionReachesTheServersLimit) {
  PopulationOptions options = Small();
  options.position_limit = 40;
  options.prompt_mean = 30;
  options.output_mean = 1000;
  Population population(options);
  for (int i = 0; i < 1000; ++i) {
    for (const StepRun& run : population.Next().runs) {
      EXPECT_LE(run.start_pos + static_cast<int64_t>(run.token_ids.size()), 40);
    }
  }
}

}  // namespace
}  // namespace engram::bench
