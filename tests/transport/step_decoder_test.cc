// Hostile and odd requests against the decoders; the ordinary refusals are in tests/e2e/apply_refusals_test.cc.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "server/engine/cpu_backend.h"
#include "server/refusal/refusal.h"
#include "server/transport/step_call.h"
#include "server/transport/step_reply.h"

namespace engram {
namespace {

std::vector<int64_t> HighwayBytesOf(const v1::ApplyRequest& request) {
  std::vector<int64_t> bytes;
  for (const v1::LayerInput& layer : request.layers()) bytes.push_back(static_cast<int64_t>(layer.highway().size()));
  return bytes;
}

class StepDecoderTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf", {});
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = new std::shared_ptr<const EngramModel>(*model);
    shape_ = ShapeOf(**model);
  }
  static void TearDownTestSuite() { delete model_; }

  static const EngramModel& model() { return **model_; }
  DecodeContext context() const { return {model(), shape_, limits_, tickets_, "p"}; }

  static StepShape shape_;
  const CallLimits limits_;
  TicketStore tickets_{TicketOptions{}};

  static std::shared_ptr<const EngramModel>* model_;
};

std::shared_ptr<const EngramModel>* StepDecoderTest::model_ = nullptr;
StepShape StepDecoderTest::shape_;

TEST_F(StepDecoderTest, IdsAreCompressedMaskedAndLookbackTurnedAround) {
  v1::ApplyRequest request;
  request.set_form(v1::FORM_KV);
  v1::Sequence& sequence = *request.add_sequences();
  sequence.set_start_pos(2);
  for (const int token : {10, 11, 12}) sequence.add_token_ids(token);
  sequence.set_token_mask(std::string("\x01\x00\xff", 3));
  for (const int token : {20, 21, -1}) sequence.add_lookback_token_ids(token);
  request.add_layers()->set_layer_id(14);
  const absl::StatusOr<StepCall> call = DecodeApply(request, HighwayBytesOf(request), context());
  ASSERT_TRUE(call.ok()) << call.status();
  const absl::Span<const int32_t> map = model().token_map();
  ASSERT_EQ(call->claims.size(), 1);
  EXPECT_EQ(call->claims[0].ids, (std::vector<int32_t>{map[10], kMasked, map[12]}));
  EXPECT_EQ(call->claims[0].lookback, (std::vector<int32_t>{kernels::kDead, map[21], map[20]}));
  EXPECT_EQ(call->token_mask, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(call->layers, std::vector<int>{1});
  EXPECT_EQ(call->tokens, 3);
  EXPECT_EQ(call->reply_bytes, 3 * 64 * 5 * 2);
}

TEST_F(StepDecoderTest, AMaskOfOneSequenceLeavesTheOthersLive) {
  v1::ApplyRequest request;
  request.set_form(v1::FORM_KV);
  request.add_sequences()->add_token_ids(1);
  v1::Sequence& masked = *request.add_sequences();
  masked.add_token_ids(2);
  masked.set_token_mask(std::string(1, '\0'));
  request.add_layers()->set_layer_id(1);
  const absl::StatusOr<StepCall> call = DecodeApply(request, HighwayBytesOf(request), context());
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_EQ(call->token_mask, (std::vector<uint8_t>{1, 0}));
}

// proto3 lets any number through. A value of tomorrow's proto is refused by field, value and what would be right.
TEST_F(StepDecoderTest, UnknownEnumValuesAreRefusedByName) {
  const auto expect = [](const absl::Status& status, Reason reason, const std::string& field, const std::string& value,
                         const std::string& known) {
    const RefusalDetail detail = DetailOf(status);
    ASSERT_EQ(detail.total, 1) << status;
    const Offender& offender = detail.offenders[0];
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(offender.reason, reason);
    EXPECT_EQ(offender.field, field);
    EXPECT_EQ(offender.value, value);
    EXPECT_NE(offender.text.find(value), std::string::npos) << offender.text;
    EXPECT_NE(offender.bound.find(known), std::string::npos) << offender.bound;
  };
  for (const int unknown : {99, -1, 7}) {
    const std::string value = std::to_string(unknown);
    const auto priority = static_cast<v1::Priority>(unknown);
    v1::ApplyRequest apply;
    apply.set_form(v1::FORM_KV);
    apply.add_sequences()->add_token_ids(1);
    apply.add_layers()->set_layer_id(1);
    ASSERT_TRUE(DecodeApply(apply, HighwayBytesOf(apply), context()).ok());
    v1::ApplyRequest spoiled = apply;
    spoiled.set_priority(priority);
    expect(DecodeApply(spoiled, HighwayBytesOf(spoiled), context()).status(), Reason::kForm, "priority", value,
           "PRIORITY_DECODE (1)");
    spoiled = apply;
    spoiled.set_highway_dtype(static_cast<v1::HighwayDtype>(unknown));
    expect(DecodeApply(spoiled, HighwayBytesOf(spoiled), context()).status(), Reason::kDtype, "highway_dtype", value,
           "HIGHWAY_DTYPE_BF16 (2)");
    spoiled = apply;
    spoiled.mutable_layers(0)->set_highway(std::string(1024, '\0'));  // of the default form, so that only one is wrong
    spoiled.set_form(static_cast<v1::Form>(unknown));
    expect(DecodeApply(spoiled, HighwayBytesOf(spoiled), context()).status(), Reason::kForm, "form", value,
           "FORM_HIGHWAY (1)");

    v1::PrepareRequest prepare;
    prepare.add_sequences()->add_token_ids(1);
    prepare.add_layer_ids(1);
    prepare.set_priority(priority);
    expect(DecodePrepare(prepare, context()).status(), Reason::kForm, "priority", value, "PRIORITY_PREFILL (2)");

    v1::LookupRequest lookup;
    lookup.add_sequences()->add_token_ids(1);
    lookup.add_layer_ids(1);
    lookup.set_priority(priority);
    expect(DecodeLookup(lookup, context()).status(), Reason::kForm, "priority", value, "PRIORITY_PREFILL (2)");
    lookup.clear_priority();
    lookup.set_form(static_cast<v1::Form>(unknown));
    expect(DecodeLookup(lookup, context()).status(), Reason::kForm, "form", value, "FORM_ROWS_BF16 (4)");
  }
}

// A form that another RPC has is named like one that nobody knows.
TEST_F(StepDecoderTest, FormsOfAnotherRpcAreRefused) {
  v1::ApplyRequest apply;
  apply.set_form(v1::FORM_ROWS_NATIVE);
  apply.add_sequences()->add_token_ids(1);
  apply.add_layers()->set_layer_id(1);
  EXPECT_EQ(DetailOf(DecodeApply(apply, HighwayBytesOf(apply), context()).status()).offenders.at(0).value, "3");
  v1::LookupRequest lookup;
  lookup.set_form(v1::FORM_GATE);
  lookup.add_sequences()->add_token_ids(1);
  lookup.add_layer_ids(1);
  EXPECT_EQ(DetailOf(DecodeLookup(lookup, context()).status()).offenders.at(0).value, "6");
}

// Any bytes that parse as a request are decoded or refused with a reason; nothing else.
TEST_F(StepDecoderTest, MutatedRequestsAreDecodedOrRefusedWithAReason) {
  std::mt19937 random(17);
  StagingPool staging(1 << 20);
  int decoded = 0, refused = 0, unparsed = 0;
  for (int i = 0; i < 20000; ++i) {
    v1::ApplyRequest request;
    const int sequences = 1 + static_cast<int>(random() % 3);
    int64_t tokens = 0;
    for (int s = 0; s < sequences; ++s) {
      v1::Sequence& sequence = *request.add_sequences();
      sequence.set_session(std::string(random() % 4, static_cast<char>('a' + s)));
      const int count = static_cast<int>(random() % 5);
      for (int t = 0; t < count; ++t) sequence.add_token_ids(static_cast<int32_t>(random() % 512));
      tokens += count;
      if (random() % 3 == 0) sequence.set_token_mask(std::string(static_cast<size_t>(count), '\x01'));
    }
    v1::LayerInput& layer = *request.add_layers();
    layer.set_layer_id(1);
    layer.set_highway(std::string(static_cast<size_t>(tokens) * 1024, 'h'));
    std::string bytes = request.SerializeAsString();
    for (int flips = static_cast<int>(random() % 4); flips > 0; --flips) {
      bytes[random() % std::min<size_t>(bytes.size(), 120)] = static_cast<char>(random());
    }
    v1::ApplyRequest mutated;
    if (!mutated.ParseFromString(bytes)) {
      ++unparsed;
      continue;
    }
    const absl::StatusOr<StepCall> call = DecodeApply(mutated, HighwayBytesOf(mutated), context());
    if (call.ok()) {
      ++decoded;
      for (size_t index = 0; index < call->layers.size(); ++index) {
        const StagingMemory highway = ReadsHighway(call->form) ? staging.Take(1) : nullptr;
        LayerResult result;
        const absl::StatusOr<CallLayer> out = LayOut(*call, index, model(), shape_, staging, highway, result);
        ASSERT_TRUE(out.ok()) << out.status();
        ASSERT_TRUE(out->out != nullptr || out->gates != nullptr);
      }
    } else {
      ++refused;
      ASSERT_FALSE(DetailOf(call.status()).offenders.empty()) << call.status();
    }
  }
  EXPECT_GT(decoded, 500);
  EXPECT_GT(refused, 500);
  EXPECT_GT(unparsed, 500);
}

}  // namespace
}  // namespace engram
