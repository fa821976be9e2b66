// Requests against protobuf's own bytes of the same message.
#include "client/request_writer.h"

#include <cstdint>
#include <string>
#include <vector>

#include "engram/v1/engram.pb.h"
#include "gmock/gmock.h"
#include "grpcpp/support/slice.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::string Flat(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

class RequestWriterTest : public testing::Test {
 protected:
  RequestWriterTest() {
    for (size_t i = 0; i < highway_.size(); ++i) highway_[i] = static_cast<char>(i);
    call_.sequences = {{.start_pos = 9, .token_ids = ids_, .token_mask = mask_, .session = "s", .lookback = before_}};
    call_.sequences[0].step = 7;
    call_.layers = {{.layer_id = 1, .highway = highway_, .out = absl::MakeSpan(out_)},
                    {.layer_id = 14, .highway = highway_, .out = absl::MakeSpan(out_)}};
  }

  template <typename Request>
  std::vector<Request> Requests(const absl::StatusOr<CheckedCall>& checked, bool by_ids = false) {
    EXPECT_TRUE(checked.ok()) << checked.status();
    const CallPlan plan = PlanCall(model_, limits_, *checked).value();
    std::vector<Request> requests;
    for (const Part& part : plan.parts) {
      const std::string bytes = Flat(WriteRequest(model_, *checked, plan, part, by_ids));
      Request& request = requests.emplace_back();
      EXPECT_TRUE(request.ParseFromString(bytes));
      EXPECT_EQ(request.SerializeAsString(), bytes) << "protobuf would write the same";
    }
    return requests;
  }

  const ModelInfo model_ = SampleModel();
  PlanLimits limits_{.max_message_bytes = 64 << 20, .max_call_tokens = 64, .stripe_bytes = 0};
  const std::vector<int32_t> ids_ = {5, 6, 7, 8};
  const std::vector<uint8_t> mask_ = {1, 0, 1, 1};
  const std::vector<int32_t> before_ = {4, 3, -1};
  std::string highway_ = std::string(128, 'i');
  std::string out_ = std::string(128, 'o');
  ApplyCall call_;
};

TEST_F(RequestWriterTest, AnApplyIsWhatProtobufWouldWrite) {
  call_.priority = Priority::kDecode;
  call_.partial_ok = true;
  v1::ApplyRequest expected;
  v1::Sequence& sequence = *expected.add_sequences();
  sequence.set_session("s");
  sequence.set_start_pos(9);
  for (const int32_t id : ids_) sequence.add_token_ids(id);
  sequence.set_token_mask(std::string("\1\0\1\1", 4));
  for (const int32_t id : before_) sequence.add_lookback_token_ids(id);
  sequence.set_step(7);
  for (const int32_t id : {1, 14}) {
    v1::LayerInput& layer = *expected.add_layers();
    layer.set_layer_id(id);
    layer.set_highway(highway_);
  }
  expected.set_form(v1::FORM_HIGHWAY);
  expected.set_highway_dtype(v1::HIGHWAY_DTYPE_F32);
  expected.set_model_key(model_.config_digest);
  expected.set_priority(v1::PRIORITY_DECODE);
  expected.set_partial_ok(true);
  const auto requests = Requests<v1::ApplyRequest>(CheckApply(model_, call_));
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].SerializeAsString(), expected.SerializeAsString());
}

TEST_F(RequestWriterTest, PartsCarryTheirTokensTheirHighwayAndTheIdsBefore) {
  limits_.max_message_bytes = 2 * 64;  // two tokens of two layers
  const auto requests = Requests<v1::ApplyRequest>(CheckApply(model_, call_));
  ASSERT_EQ(requests.size(), 2u);
  const v1::Sequence& later = requests[1].sequences(0);
  EXPECT_EQ(later.start_pos(), 11);
  EXPECT_THAT(later.token_ids(), ElementsAre(7, 8));
  EXPECT_THAT(later.lookback_token_ids(), ElementsAre(-1, 5, 4));
  EXPECT_EQ(requests[1].layers(1).highway(), highway_.substr(64));
  EXPECT_EQ(requests[1].priority(), v1::PRIORITY_DECODE);
}

TEST_F(RequestWriterTest, ASessionWithoutLookbackIsContinuedAndForkedOnce) {
  call_.sequences[0].lookback = {};
  call_.sequences[0].fork_from = "parent";
  limits_.max_message_bytes = 2 * 64;
  const auto requests = Requests<v1::ApplyRequest>(CheckApply(model_, call_));
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[0].sequences(0).fork_from().session(), "parent");
  EXPECT_FALSE(requests[1].sequences(0).has_fork_from());
  EXPECT_THAT(requests[1].sequences(0).lookback_token_ids(), IsEmpty());
  EXPECT_EQ(requests[1].sequences(0).session(), "s");
}

TEST_F(RequestWriterTest, KvSendsNoHighway) {
  std::string kv(96, ' ');
  call_.form = Form::kKv;
  call_.layers = {{.layer_id = 14, .out = absl::MakeSpan(kv)}};
  const auto requests = Requests<v1::ApplyRequest>(CheckApply(model_, call_));
  EXPECT_EQ(requests[0].form(), v1::FORM_KV);
  EXPECT_EQ(requests[0].layers(0).highway(), "");
}

TEST_F(RequestWriterTest, APreparedPartGoesByTicketOrByItsIdsWithoutASession) {
  auto state = std::make_shared<PreparedState>();
  state->tokens = 6;
  state->sequences = {{.start_pos = 40, .token_ids = {1, 2, 3, 4, 5, 6}, .lookback = {}}};
  state->parts = {{"r", std::string(24, 't'), 0, 6, 1}};
  const Prepared prepared(state);
  call_.sequences.clear();
  call_.prepared = &prepared;
  call_.token_slice = Range{1, 5};
  const auto by_ticket = Requests<v1::ApplyRequest>(CheckApply(model_, call_));
  EXPECT_EQ(by_ticket[0].ticket(), std::string(24, 't'));
  EXPECT_EQ(by_ticket[0].token_slice().begin(), 1);
  EXPECT_EQ(by_ticket[0].token_slice().end(), 5);
  EXPECT_EQ(by_ticket[0].sequences_size(), 0);

  call_.token_slice = Range{3, 6};
  for (LayerRun& layer : call_.layers) {
    layer.highway = layer.highway.subspan(0, 96);
    layer.out = layer.out.subspan(0, 96);
  }
  const auto stateless = Requests<v1::ApplyRequest>(CheckApply(model_, call_), true);
  EXPECT_EQ(stateless[0].sequences(0).session(), "");
  EXPECT_THAT(stateless[0].sequences(0).lookback_token_ids(), ElementsAre(3, 2, 1));
}

TEST_F(RequestWriterTest, RowIdsAreThoseOfThePartsLayers) {
  std::vector<int32_t> rows(2 * 2 * 24);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i) - 1;
  std::string out(2 * 24 * 84, ' ');
  LookupCall call;
  call.row_ids = rows;
  call.layers = {{.layer_id = 1, .out = absl::MakeSpan(out)}, {.layer_id = 14, .out = absl::MakeSpan(out)}};
  const auto whole = Requests<v1::LookupRequest>(CheckLookup(model_, call));
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_THAT(whole[0].row_ids(), testing::ElementsAreArray(rows));
  limits_.max_message_bytes = 24 * 84;
  const auto cut = Requests<v1::LookupRequest>(CheckLookup(model_, call));
  ASSERT_EQ(cut.size(), 4u);
  EXPECT_THAT(cut[3].row_ids(), testing::ElementsAreArray(std::vector<int32_t>(rows.begin() + 72, rows.end())));
  EXPECT_THAT(cut[3].layer_ids(), ElementsAre(14));
}

TEST_F(RequestWriterTest, PrepareAndLookupAreWhatProtobufWouldWrite) {
  std::vector<uint16_t> value(16);
  PrepareCall prepare;
  prepare.sequences = call_.sequences;
  prepare.layer_ids = {14};
  prepare.values = {absl::MakeSpan(value)};
  const auto prepares = Requests<v1::PrepareRequest>(CheckPrepare(model_, prepare));
  EXPECT_TRUE(prepares[0].return_values());
  EXPECT_THAT(prepares[0].layer_ids(), ElementsAre(14));
  EXPECT_EQ(prepares[0].model_key(), model_.config_digest);
  std::string out(4 * 10 * 2, ' ');
  LookupCall lookup;
  lookup.sequences = call_.sequences;
  lookup.layers = {{.layer_id = 1, .out = absl::MakeSpan(out)}};
  lookup.form = Form::kKv;
  lookup.slice = Range{2, 12};
  const auto lookups = Requests<v1::LookupRequest>(CheckLookup(model_, lookup));
  EXPECT_EQ(lookups[0].form(), v1::FORM_KV);
  EXPECT_EQ(lookups[0].slice().begin(), 2);
  EXPECT_EQ(lookups[0].slice().end(), 12);
  EXPECT_THAT(lookups[0].sequences(0).token_ids(), ElementsAre(5, 6, 7, 8));
}

}  // namespace
}  // namespace engram::client
