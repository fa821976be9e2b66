#include "client/apply_call.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/error_details.h"
#include "client/refusal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;
using testing::StartsWith;

constexpr int64_t kRoom = 64 << 20;

// Two tokens at the start of a sequence, layer 1, HIGHWAY f32: 2 * 2 * 4 * 4 = 64 bytes each way.
class ApplyCallTest : public testing::Test {
 protected:
  ApplyCallTest() {
    call_.sequences = {SequenceRun{.history = &history_, .token_ids = ids_}};
    call_.layers = {LayerRun{.layer_id = 1, .highway = in_, .out = absl::MakeSpan(out_)}};
  }

  // The reason and the field as the server gives them, and what the text says.
  void ExpectRefusal(Reason reason, const std::string& field, const std::string& text, int64_t room = kRoom) {
    const absl::Status status = EncodeApply(model_, room, call_).status();
    EXPECT_EQ(status.code(), ReasonCode(reason)) << status;
    EXPECT_EQ(ErrorReason(status), ReasonName(reason)) << status;
    EXPECT_EQ(ErrorMetadata(status)["field"], field);
    EXPECT_THAT(ErrorOffenders(status), SizeIs(1));
    EXPECT_THAT(std::string(status.message()),
                AllOf(StartsWith(absl::StrCat(ReasonName(reason), ": ", field, ": ")), HasSubstr(text)));
  }

  // A mistake that no request can hold.
  void ExpectMisuse(const std::string& text) {
    const absl::Status status = EncodeApply(model_, kRoom, call_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ErrorReason(status), "");
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }

  const ModelInfo model_ = SampleModel();
  SequenceHistory history_{4};
  std::vector<int32_t> ids_ = {5, 6};
  std::string in_ = std::string(64, 'i');
  std::string out_ = std::string(64, 'o');
  ApplyCall call_;
};

TEST_F(ApplyCallTest, EncodesLookbackMaskModelKeyAndTensors) {
  ASSERT_TRUE(history_.Write(0, std::vector<int32_t>{1, 2, 3, 4}, {}).ok());
  const std::vector<uint8_t> mask = {1, 0};
  call_.sequences[0].start_pos = 4;
  call_.sequences[0].token_mask = mask;
  call_.sequences[0].session = "s";
  const v1::ApplyRequest request = EncodeApply(model_, kRoom, call_).value();
  ASSERT_EQ(request.sequences_size(), 1);
  const v1::Sequence& sequence = request.sequences(0);
  EXPECT_EQ(sequence.session(), "s");
  EXPECT_EQ(sequence.start_pos(), 4);
  EXPECT_THAT(sequence.token_ids(), ElementsAre(5, 6));
  EXPECT_EQ(sequence.token_mask(), std::string("\1\0", 2));
  EXPECT_THAT(sequence.lookback_token_ids(), ElementsAre(4, 3, 2));
  EXPECT_EQ(request.model_key(), model_.config_digest);
  EXPECT_EQ(request.layers(0).highway(), in_);
  EXPECT_EQ(history_.length(), 4) << "encoding must not move the history";
}

TEST_F(ApplyCallTest, LookbackIsSentAtPositionZeroToo) {
  EXPECT_THAT(EncodeApply(model_, kRoom, call_)->sequences(0).lookback_token_ids(), ElementsAre(-1, -1, -1));
}

TEST_F(ApplyCallTest, RefusesBeforeSendingAsTheServerWould) {
  const ApplyCall good = call_;
  const auto again = [&] { call_ = good; };
  call_.sequences.clear();
  ExpectRefusal(Reason::kEmptyCall, "sequences", "at least one sequence");
  again();
  call_.layers.clear();
  ExpectRefusal(Reason::kEmptyCall, "layers", "at least one layer");
  again();
  call_.layers[0].layer_id = 2;
  ExpectRefusal(Reason::kLayerUnknown, "layers[0].layer_id",
                "layer 2 is no engram layer of this model; those are 1, 14");
  again();
  call_.layers.push_back(call_.layers[0]);
  ExpectRefusal(Reason::kLayerUnknown, "layers[1].layer_id", "layer 1 is also layers[0]");
  again();
  call_.layers[0].highway.remove_suffix(1);
  ExpectRefusal(Reason::kHighwaySize, "layers[0].highway", "[2, 2, 4] f32 has 64 bytes, got 63");
  again();
  call_.form = Form::kKv;
  ExpectRefusal(Reason::kHighwaySize, "layers[0].highway", "takes no highway, got 64 bytes");
  again();
  call_.sequences[0].token_ids = {};
  ExpectRefusal(Reason::kEmptyCall, "sequences[0].token_ids", "at least one token");
  again();
  const std::vector<int32_t> placeholder = {5, -1};
  call_.sequences[0].token_ids = placeholder;
  ExpectRefusal(Reason::kTokenOutOfRange, "sequences[0].token_ids[1]", "token id -1 is below 0");
  again();
  const std::vector<uint8_t> mask = {1};
  call_.sequences[0].token_mask = mask;
  ExpectRefusal(Reason::kTokenMaskLength, "sequences[0].token_mask", "token_mask has 1 bytes for 2 tokens");
  again();
  call_.sequences[0].session = std::string(65, 'x');
  ExpectRefusal(Reason::kSessionLength, "sequences[0].session", "at most 64 bytes, this one has 65");
  again();
  const std::vector<int32_t> lookback = {1, 2};
  call_.sequences[0].history = nullptr;
  call_.sequences[0].lookback = lookback;
  ExpectRefusal(Reason::kLookbackLength, "sequences[0].lookback_token_ids", "exactly 3 ids");
}

TEST_F(ApplyCallTest, PositionsAreRefusedAsTheServerWould) {
  call_.sequences[0].start_pos = -1;
  ExpectRefusal(Reason::kPositionGap, "sequences[0].start_pos", "position -1 lies before the sequence's start, 0");
  call_.sequences[0].history = nullptr;
  ExpectRefusal(Reason::kPositionGap, "sequences[0].start_pos", "position -1 lies before the sequence's start, 0");
  call_.sequences[0].start_pos = model_.limits.position_limit - 1;
  ExpectRefusal(Reason::kPositionLimit, "sequences[0].start_pos", "pass the position limit of 1048576");
  call_.sequences[0].history = &history_;
  call_.sequences[0].start_pos = 1;
  ExpectRefusal(Reason::kPositionGap, "sequences[0].start_pos",
                "position 1 needs the 3 ids before it, but the history knows positions [0, 0)");
}

TEST_F(ApplyCallTest, WhatNoServerCanSeeIsAMisuseWithoutAReason) {
  const ApplyCall good = call_;
  call_.layers[0].out = call_.layers[0].out.subspan(4);
  ExpectMisuse("layers[0].out: room for 60 bytes, expected 64");
  call_ = good;
  const std::vector<int32_t> lookback = {1, 2, 3};
  call_.sequences[0].lookback = lookback;
  ExpectMisuse("sequences[0].lookback: given besides a history");
  call_ = good;
  SequenceHistory trigrams(3);
  call_.sequences[0].history = &trigrams;
  ExpectMisuse("3-grams");
  call_ = good;
  call_.sequences.push_back(call_.sequences[0]);
  ExpectMisuse("share one history");
}

TEST_F(ApplyCallTest, OversizedMessagesAreRefusedWithBytesAndLimit) {
  ExpectRefusal(Reason::kMessageBytes, "layers", "the request would have 64 bytes of tensors, a message may have 63",
                63);
  call_.form = Form::kKv;
  std::string kv(48, ' ');
  call_.layers[0].highway = {};
  call_.layers[0].out = absl::MakeSpan(kv);
  ExpectRefusal(Reason::kMessageBytes, "layers", "the reply would have 48 bytes of tensors, a message may have 47", 47);
  EXPECT_TRUE(EncodeApply(model_, 48, call_).ok());
  const std::vector<int32_t> many(65, 1);
  call_.sequences[0].token_ids = many;
  ExpectRefusal(Reason::kTooManyTokens, "sequences", "a call may have 64 tokens, this one has 65");
}

TEST_F(ApplyCallTest, AReplyThatIsNotWhatWasAskedForWritesNothing) {
  std::string out2(64, 'p');
  call_.layers.push_back(LayerRun{.layer_id = 14, .highway = in_, .out = absl::MakeSpan(out2)});
  v1::ApplyResponse good;
  for (int layer_id : {1, 14}) {
    good.add_layers()->set_layer_id(layer_id);
    good.mutable_layers()->rbegin()->set_highway(std::string(64, 'r'));
  }
  const auto expect_refusal = [&](const v1::ApplyResponse& response, absl::string_view text) {
    const absl::Status status = DecodeApply(model_, response, call_);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(text)));
    EXPECT_EQ(out_, std::string(64, 'o'));
    EXPECT_EQ(out2, std::string(64, 'p'));
  };
  v1::ApplyResponse bad = good;
  bad.mutable_layers()->RemoveLast();
  expect_refusal(bad, "has 1 layers, 2 were asked for");
  bad = good;
  bad.mutable_layers()->SwapElements(0, 1);
  expect_refusal(bad, "layers[0].layer_id 14, expected 1");
  bad = good;
  bad.mutable_layers(1)->set_highway(std::string(63, 'r'));
  expect_refusal(bad, "63 bytes in layers[1].highway, expected 64");
  bad = good;
  bad.mutable_layers(1)->clear_highway();
  bad.mutable_layers(1)->set_kv(std::string(64, 'r'));
  expect_refusal(bad, "0 bytes in layers[1].highway, expected 64");

  ASSERT_TRUE(DecodeApply(model_, good, call_).ok());
  EXPECT_EQ(out_, std::string(64, 'r'));
  EXPECT_EQ(out2, std::string(64, 'r'));
}

}  // namespace
}  // namespace engram::client
