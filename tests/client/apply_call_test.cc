#include "client/apply_call.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kRoom = 64 << 20;

// Two tokens at the start of a sequence, layer 1, HIGHWAY f32: 2 * 2 * 4 * 4 = 64 bytes each way.
class ApplyCallTest : public testing::Test {
 protected:
  ApplyCallTest() {
    call_.sequences = {SequenceRun{.history = &history_, .token_ids = ids_}};
    call_.layers = {LayerRun{.layer_id = 1, .highway = in_, .out = absl::MakeSpan(out_)}};
  }

  void ExpectRefusal(absl::StatusCode code, absl::string_view text, int64_t room = kRoom) {
    const absl::Status status = EncodeApply(model_, room, call_).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(text)));
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

TEST_F(ApplyCallTest, RefusesBeforeSendingAndNamesTheThing) {
  const ApplyCall good = call_;
  const auto again = [&] { call_ = good; };
  call_.sequences.clear();
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "no sequences");
  again();
  call_.layers.clear();
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "no layers");
  again();
  call_.layers[0].layer_id = 2;
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "layers[0].layer_id is 2");
  again();
  call_.layers.push_back(call_.layers[0]);
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "layers[1].layer_id 1 is also layers[0]");
  again();
  call_.layers[0].highway.remove_suffix(1);
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "layers[0].highway has 63 bytes, expected 64");
  again();
  call_.layers[0].out = call_.layers[0].out.subspan(4);
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "layers[0].out has room for 60 bytes, expected 64");
  again();
  call_.form = Form::kKv;
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "layers[0].highway has 64 bytes, expected 0");
  again();
  call_.sequences[0].token_ids = {};
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "sequences[0]: token_ids is empty");
  again();
  const std::vector<uint8_t> mask = {1};
  call_.sequences[0].token_mask = mask;
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "token_mask has 1 bytes, expected one per token: 2");
  again();
  call_.sequences[0].start_pos = model_.limits.position_limit - 1;
  ExpectRefusal(absl::StatusCode::kOutOfRange, "positions are [0, 1048576)");
  again();
  call_.sequences[0].start_pos = 1;
  ExpectRefusal(absl::StatusCode::kFailedPrecondition, "sequences[0]: start_pos 1 needs the 3 ids before it");
  again();
  call_.sequences[0].session = std::string(65, 'x');
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "session has 65 bytes, at most 64");
  again();
  const std::vector<int32_t> lookback = {1, 2};
  call_.sequences[0].lookback = lookback;
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "both a history and a lookback");
  call_.sequences[0].history = nullptr;
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "lookback has 2 ids, expected N-1 = 3");
  again();
  SequenceHistory trigrams(3);
  call_.sequences[0].history = &trigrams;
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "3-grams");
  again();
  call_.sequences.push_back(call_.sequences[0]);
  ExpectRefusal(absl::StatusCode::kInvalidArgument, "share one history");
}

TEST_F(ApplyCallTest, OversizedMessagesAreRefusedWithBytesAndLimit) {
  ExpectRefusal(absl::StatusCode::kResourceExhausted,
                "the request would carry 64 bytes of tensors, the limit of one message is 63", 63);
  call_.form = Form::kKv;
  std::string kv(48, ' ');
  call_.layers[0].highway = {};
  call_.layers[0].out = absl::MakeSpan(kv);
  ExpectRefusal(absl::StatusCode::kResourceExhausted,
                "the reply would carry 48 bytes of tensors, the limit of one message is 47", 47);
  EXPECT_TRUE(EncodeApply(model_, 48, call_).ok());
  const std::vector<int32_t> many(65, 1);
  call_.sequences[0].token_ids = many;
  ExpectRefusal(absl::StatusCode::kResourceExhausted, "the call has 65 tokens, the limit is 64");
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
