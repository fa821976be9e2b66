#include "server/engine/step.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace engram {
namespace {

constexpr StepShape kShape{.max_ngram = 3, .layers = 3, .columns = 4, .copies = 2, .dim = 5};
constexpr int32_t kDead = kernels::kDead;

TEST(StepTest, APieceInTheMiddleOfACallTakesTheRightWindowsAndPointers) {
  // Sequences of 3, 2 and 4 tokens; windows of 2 + T ids each, numbered so that a mistake shows.
  Call call;
  call.sequences = {{.tokens = 3}, {.tokens = 2}, {.tokens = 4}};
  call.tokens = 9;
  call.token_mask = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  std::vector<char> highway(9 * 40), out(9 * 40);
  call.layers = {{.layer = 1, .highway = highway.data(), .out = out.data()}};
  call.windows = {kDead, kDead, 100, 101,   102,  //
                  10,    11,    200, kDead,       //
                  20,    21,    300, 301,   302, 303};
  const std::vector<int32_t>& windows = call.windows;
  const Step step = BuildStep({{&call, 2, 7}}, kShape);
  EXPECT_EQ(step.hashed_tokens, 5);
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
  std::vector<char> bytes(100);
  Call both, one;
  for (Call* call : {&both, &one}) {
    call->sequences = {{.tokens = 1}};
    call->windows = {kDead, kDead, 1};
    call->tokens = 1;
    call->form = Form::kKv;
  }
  both.layers = {{.layer = 2, .highway = nullptr, .out = bytes.data()},
                 {.layer = 0, .highway = nullptr, .out = bytes.data()}};
  one.layers = {{.layer = 2, .highway = nullptr, .out = bytes.data()}};
  const Step step = BuildStep({{&both, 0, 1}, {&one, 0, 1}}, kShape);
  ASSERT_EQ(step.layers.size(), 2);
  EXPECT_EQ(step.layers[0].layer, 0);
  EXPECT_EQ(step.layers[0].slices.size(), 1);
  EXPECT_EQ(step.layers[1].layer, 2);
  ASSERT_EQ(step.layers[1].slices.size(), 2);
  EXPECT_EQ(step.layers[1].slices[1].first, 1);
  EXPECT_EQ(step.layers[1].slices[0].highway, nullptr);
}

TEST(StepTest, ARefusedSequenceIsLeftOutAndTheOthersKeepTheirPlaces) {
  Call call;
  call.sequences = {{.tokens = 2}, {.tokens = 3, .refused = true}, {.tokens = 1}};
  call.tokens = 6;
  call.windows.assign(6 + 3 * 2, 7);
  std::vector<char> out(6 * 30);
  call.form = Form::kKv;
  call.layers = {{.layer = 0, .highway = nullptr, .out = out.data()}};
  const Step step = BuildStep({{&call, 0, 6}}, kShape);
  EXPECT_EQ(step.hashed_tokens, 3);
  ASSERT_EQ(step.layers.at(0).slices.size(), 2);
  EXPECT_EQ(step.layers[0].slices[0].out, out.data());
  EXPECT_EQ(step.layers[0].slices[0].tokens, 2);
  EXPECT_EQ(step.layers[0].slices[1].out, out.data() + 5 * 30);
  EXPECT_EQ(step.layers[0].slices[1].first, 2);
}

TEST(StepTest, ATicketsTokensAreNotHashedAndReadWhatWasPrepared) {
  auto prepared = std::make_shared<Prepared>();
  prepared->tokens = 8;
  prepared->ids.resize(8 * 3 * 4);
  StagingPool staging(0);
  prepared->layers = {{.layer = 1, .memory = staging.Take(8 * 15 * 2)}};
  Call call;
  call.sequences = {{.tokens = 4}};
  call.tokens = 4;
  call.prepared = prepared;
  call.prepared_first = 2;
  call.form = Form::kKv;
  std::vector<char> out(4 * 30);
  call.layers = {{.layer = 1, .highway = nullptr, .out = out.data()},
                 {.layer = 2, .highway = nullptr, .out = out.data()}};
  const Step step = BuildStep({{&call, 1, 4}}, kShape);
  EXPECT_EQ(step.hashed_tokens, 0);
  EXPECT_TRUE(step.runs.empty());
  ASSERT_EQ(step.layers.size(), 2);
  EXPECT_EQ(step.layers[0].slices[0].kv, prepared->layers[0].kv() + 3 * 15);
  EXPECT_EQ(step.layers[1].slices[0].kv, nullptr) << "not prepared: computed from the ids kept";
  EXPECT_EQ(step.layers[1].slices[0].ids, prepared->ids.data() + 3 * 12 + 2 * 4);
  EXPECT_EQ(step.layers[1].slices[0].id_stride, 12);
}

TEST(StepTest, BytesPerTokenFollowFormAndType) {
  const auto bytes = [](Form form, kernels::HighwayType type, OutputSlice slice = {}) {
    return OutBytes(kShape, form, type, slice);
  };
  EXPECT_EQ(bytes(Form::kHighway, kernels::HighwayType::kF32), 40);
  EXPECT_EQ(bytes(Form::kHighway, kernels::HighwayType::kBf16), 20);
  EXPECT_EQ(bytes(Form::kKv, kernels::HighwayType::kF32), 30);
  EXPECT_EQ(bytes(Form::kKv, kernels::HighwayType::kF32, {3, 8}), 10);
  EXPECT_EQ(bytes(Form::kRowsNative, kernels::HighwayType::kF32), 4 * 84);
  EXPECT_EQ(bytes(Form::kRowsBf16, kernels::HighwayType::kF32, {1, 3}), 2 * 512);
  EXPECT_EQ(bytes(Form::kGate, kernels::HighwayType::kF32), 0);
}

}  // namespace
}  // namespace engram
