#include "server/engine/step.h"

#include <gtest/gtest.h>

#include <vector>

namespace engram {
namespace {

constexpr StepShape kShape{.max_ngram = 3, .highway_values = 10, .kv_values = 15};
constexpr int32_t kDead = kernels::kDead;

TEST(StepTest, APieceInTheMiddleOfACallTakesTheRightWindowsAndPointers) {
  // Sequences of 3, 2 and 4 tokens; windows of 2 + T ids each, numbered so that a mistake shows.
  Call call;
  call.sequence_tokens = {3, 2, 4};
  call.tokens = 9;
  call.token_mask = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  std::vector<char> highway(9 * 40), out(9 * 40);
  call.layers = {{.layer = 1, .highway = highway.data(), .out = out.data()}};
  const std::vector<int32_t> windows = {kDead, kDead, 100, 101,   102,  //
                                        10,    11,    200, kDead,       //
                                        20,    21,    300, 301,   302, 303};
  const Step step = BuildStep({{&call, &windows, 2, 7}}, kShape);
  EXPECT_EQ(step.tokens, 5);
  EXPECT_EQ(step.dead_tokens, 1);
  ASSERT_EQ(step.runs.size(), 3);
  EXPECT_EQ(step.runs[0].window, &windows[2]);  // looks back on 100, 101
  EXPECT_EQ(step.runs[0].tokens, 1);
  EXPECT_EQ(step.runs[1].window, &windows[5]);
  EXPECT_EQ(step.runs[1].tokens, 2);
  EXPECT_EQ(step.runs[2].window, &windows[9]);
  EXPECT_EQ(step.runs[2].tokens, 2);
  ASSERT_EQ(step.layers.size(), 1);
  const StepSlice& slice = step.layers[0].slices.at(0);
  EXPECT_EQ(slice.highway, highway.data() + 2 * 40);
  EXPECT_EQ(slice.out, out.data() + 2 * 40);
  EXPECT_EQ(slice.token_mask, call.token_mask.data() + 2);
}

TEST(StepTest, LayersAscendAndHoldOnlyTheCallsThatWantThem) {
  const std::vector<int32_t> windows = {kDead, kDead, 1};
  std::vector<char> bytes(100);
  Call both, one;
  for (Call* call : {&both, &one}) {
    call->sequence_tokens = {1};
    call->tokens = 1;
    call->form = Form::kKv;
  }
  both.layers = {{.layer = 2, .highway = nullptr, .out = bytes.data()},
                 {.layer = 0, .highway = nullptr, .out = bytes.data()}};
  one.layers = {{.layer = 2, .highway = nullptr, .out = bytes.data()}};
  const Step step = BuildStep({{&both, &windows, 0, 1}, {&one, &windows, 0, 1}}, kShape);
  ASSERT_EQ(step.layers.size(), 2);
  EXPECT_EQ(step.layers[0].layer, 0);
  EXPECT_EQ(step.layers[0].slices.size(), 1);
  EXPECT_EQ(step.layers[1].layer, 2);
  ASSERT_EQ(step.layers[1].slices.size(), 2);
  EXPECT_EQ(step.layers[1].slices[1].first, 1);
  EXPECT_EQ(step.layers[1].slices[0].highway, nullptr);
}

TEST(StepTest, BytesPerTokenFollowFormAndType) {
  EXPECT_EQ(OutBytes(kShape, Form::kHighway, kernels::HighwayType::kF32), 40);
  EXPECT_EQ(OutBytes(kShape, Form::kHighway, kernels::HighwayType::kBf16), 20);
  EXPECT_EQ(OutBytes(kShape, Form::kKv, kernels::HighwayType::kF32), 30);
}

}  // namespace
}  // namespace engram
