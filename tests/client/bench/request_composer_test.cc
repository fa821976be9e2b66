#include "client/bench/request_composer.h"

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "client/bench/step_source.h"
#include "client/bench/token_source.h"
#include "engram/v1/engram.pb.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::bench {
namespace {

using client::Form;
using client::HighwayDtype;

std::string BytesOf(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(message.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

Step TwoSequences(Form form) {
  Step step;
  step.form = form;
  step.highway_at = 5;
  step.sequences = {{"", 7, {3, 99, 0}, {1, -1, -1}}, {"a session", 0, {42}, {-1, -1, -1}}};
  return step;
}

class RequestComposerTest : public testing::TestWithParam<Form> {
 protected:
  const client::ModelInfo model_ = client::SampleModel();
};

// The protobuf library is the judge: what it reads is what was meant, and it would write the same bytes.
TEST_P(RequestComposerTest, MessagesAreWhatProtobufWouldWrite) {
  for (const HighwayDtype dtype : {HighwayDtype::kF32, HighwayDtype::kBf16}) {
    const RequestComposer composer(model_, {1, 14}, dtype, 8, 3);
    for (const std::string& ticket : {std::string(), std::string(24, 't')}) {
      const Step step = TwoSequences(GetParam());
      const Composed composed = composer.Compose(step, ticket);
      const std::string bytes = BytesOf(composed.message);
      google::protobuf::RepeatedPtrField<v1::Sequence> sequences;
      int64_t payload = 0;
      if (std::string(composed.method) == "/engram.v1.EngramService/Lookup") {
        v1::LookupRequest request;
        ASSERT_TRUE(request.ParseFromString(bytes));
        EXPECT_EQ(request.SerializeAsString(), bytes);
        EXPECT_EQ(request.form(), client::WireForm(GetParam()));
        EXPECT_EQ(request.ticket(), ticket);
        EXPECT_EQ(request.model_key(), model_.config_digest);
        EXPECT_EQ(std::vector<int32_t>(request.layer_ids().begin(), request.layer_ids().end()),
                  (std::vector<int32_t>{1, 14}));
        sequences = request.sequences();
      } else {
        ASSERT_STREQ(composed.method, "/engram.v1.EngramService/Apply");
        v1::ApplyRequest request;
        ASSERT_TRUE(request.ParseFromString(bytes));
        EXPECT_EQ(request.SerializeAsString(), bytes);
        EXPECT_EQ(request.form(), client::WireForm(GetParam()));
        EXPECT_EQ(request.ticket(), ticket);
        EXPECT_EQ(request.model_key(), model_.config_digest);
        ASSERT_EQ(request.layers_size(), 2);
        for (int layer = 0; layer < 2; ++layer) {
          EXPECT_EQ(request.layers(layer).layer_id(), layer == 0 ? 1 : 14);
          const std::string& highway = request.layers(layer).highway();
          ASSERT_EQ(highway.size(), SendsHighway(GetParam()) ? 4 * model_.HighwayTokenBytes(dtype) : 0);
          EXPECT_EQ(std::memcmp(highway.data(), composer.HighwayOf(step, static_cast<size_t>(layer)), highway.size()),
                    0);
          payload += static_cast<int64_t>(highway.size());
        }
        sequences = request.sequences();
      }
      if (!ticket.empty()) {
        EXPECT_TRUE(sequences.empty());
        EXPECT_EQ(composed.payload_up, payload);
        continue;
      }
      EXPECT_EQ(composed.payload_up, payload + 4 * 4);
      ASSERT_EQ(sequences.size(), 2);
      EXPECT_EQ(sequences[0].start_pos(), 7);
      EXPECT_EQ(sequences[0].token_ids(1), 99);
      EXPECT_EQ(sequences[0].lookback_token_ids_size(), 3);
      EXPECT_EQ(sequences[0].lookback_token_ids(2), -1);
      EXPECT_EQ(sequences[1].session(), "a session");
      EXPECT_EQ(sequences[1].lookback_token_ids_size(), 0) << "a session's server knows";
    }
  }
}

TEST_P(RequestComposerTest, AnEchoHasTheSameSizeAndAsksForTheAnswersSize) {
  const RequestComposer composer(model_, {1, 14}, HighwayDtype::kF32, 8, 3);
  const Step step = TwoSequences(GetParam());
  const Composed service = composer.Compose(step, "");
  const Composed echo = composer.ComposeEcho(step, "");
  EXPECT_EQ(echo.message.Length(), service.message.Length());
  const std::string bytes = BytesOf(echo.message);
  int64_t asked = 0;
  std::memcpy(&asked, bytes.data() + bytes.size() - sizeof asked, sizeof asked);
  EXPECT_GE(asked, service.payload_down);
  EXPECT_LE(asked, service.payload_down + 64);
}

INSTANTIATE_TEST_SUITE_P(Forms, RequestComposerTest,
                         testing::Values(Form::kHighway, Form::kKv, Form::kUpdate, Form::kGate, Form::kRowsNative,
                                         Form::kRowsBf16));

TEST(TokenSource, IdsAreAFunctionOfSeedSequenceAndPositionAndLookbackAgrees) {
  for (const int64_t pool : {0, 50}) {
    const TokenSource tokens(9, 100, pool);
    std::vector<int32_t> ids, lookback;
    tokens.Fill(4, 2, 5, 3, &ids, &lookback);
    ASSERT_EQ(ids.size(), 5u);
    EXPECT_EQ(lookback, (std::vector<int32_t>{tokens.At(4, 1), tokens.At(4, 0), -1}));
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(ids[static_cast<size_t>(i)], TokenSource(9, 100, pool).At(4, 2 + i));
      EXPECT_GE(ids[static_cast<size_t>(i)], 0);
      EXPECT_LT(ids[static_cast<size_t>(i)], 100);
    }
    std::vector<int32_t> others, ignored;
    TokenSource(10, 100, pool).Fill(4, 2, 5, 3, &others, &ignored);
    EXPECT_NE(ids, others);
  }
}

TEST(TokenSource, LowIdsAreFrequentAndAPoolRepeatsWholeNgrams) {
  const TokenSource single(1, 1000, 0);
  int64_t low = 0;
  for (int64_t position = 0; position < 10'000; ++position) low += single.At(1, position) < 10 ? 1 : 0;
  // log(11) / log(1001) of them: 35 %.
  EXPECT_GT(low, 3000);
  EXPECT_LT(low, 4000);

  const TokenSource pooled(1, 1'000'000, 20);
  std::set<std::vector<int32_t>> phrases;
  for (int64_t position = 0; position < 8000; position += 8) {
    std::vector<int32_t> ids, ignored;
    pooled.Fill(1, position, 8, 0, &ids, &ignored);
    phrases.insert(ids);
  }
  EXPECT_LE(phrases.size(), 20u);
  EXPECT_GT(phrases.size(), 10u);
}

TEST(SteadySource, SlotsGoOnInSequencesOfTheirOwnAndBeginAnewAfterAFailure) {
  const SteadyLoad load = {.tokens_per_call = 5, .sequences_per_call = 2, .sessions = 6, .session_prefix = "s-"};
  SteadySource source(client::SampleModel(), load, 2, 10);
  EXPECT_EQ(source.sessions().size(), 6u);
  Step first, second, third, other;
  source.Next(0, &first);
  source.Next(0, &second);
  source.Next(0, &third);
  source.Next(1, &other);
  ASSERT_EQ(first.sequences.size(), 2u);
  EXPECT_EQ(first.sequences[0].token_ids.size(), 3u);
  EXPECT_EQ(first.sequences[1].token_ids.size(), 2u);
  EXPECT_NE(second.sequences[0].session, first.sequences[0].session) << "six sessions are three groups, two of slot 0";
  EXPECT_EQ(third.sequences[0].session, first.sequences[0].session);
  EXPECT_EQ(third.sequences[0].start_pos, 3);
  EXPECT_EQ(third.sequences[0].lookback[0], first.sequences[0].token_ids[2]);
  EXPECT_NE(other.sequences[0].session, first.sequences[0].session);
  EXPECT_NE(other.sequences[0].session, second.sequences[0].session);
  source.Restart(0);
  source.Next(0, &second);
  source.Next(0, &first);
  EXPECT_EQ(first.sequences[0].start_pos, 0);
  EXPECT_EQ(second.sequences[0].start_pos, 0);
}

}  // namespace
}  // namespace engram::bench
