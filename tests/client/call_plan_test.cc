#include "client/call_plan.h"

#include <cstdint>
#include <string>
#include <vector>

#include "client/error_details.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// dim 4, hc 2: an f32 highway has 32 bytes a token and layer, kv 24.
class CallPlanTest : public testing::Test {
 protected:
  // A checked HIGHWAY call of both layers over sequences of these lengths, stateless.
  CheckedCall Call(const std::vector<int64_t>& lengths) {
    CheckedCall call;
    for (const int64_t length : lengths) {
      CheckedSequence sequence;
      sequence.token_ids = absl::MakeConstSpan(ids_).subspan(0, static_cast<size_t>(length));
      sequence.lookback = {-1, -1, -1};
      sequence.at = call.tokens;
      sequence.tokens = length;
      call.tokens += length;
      call.sequences.push_back(sequence);
    }
    for (const int32_t id : {1, 14}) {
      CheckedLayer layer{.layer_id = id, .highway = &byte_, .landings = {{2, 32, &byte_}}, .updated = nullptr};
      call.layers.push_back(layer);
    }
    return call;
  }

  CallPlan Plan(const CheckedCall& call) { return PlanCall(model_, limits_, call).value(); }

  // Every token of every layer of every sequence that is not refused, in exactly one part.
  static void ExpectCover(const CheckedCall& call, const CallPlan& plan) {
    std::vector<int> seen(call.layers.size() * static_cast<size_t>(call.tokens), 0);
    for (const Part& part : plan.parts) {
      int64_t tokens = 0;
      for (const Piece& piece : part.pieces) {
        tokens += piece.tokens;
        for (int64_t t = 0; t < piece.tokens; ++t) {
          for (size_t l = part.first_layer; l < part.first_layer + part.layers; ++l) {
            ++seen[l * static_cast<size_t>(call.tokens) + static_cast<size_t>(PlaceOf(call, piece) + t)];
          }
        }
      }
      EXPECT_EQ(part.tokens, tokens);
    }
    for (size_t l = 0; l < call.layers.size(); ++l) {
      for (const CheckedSequence& sequence : call.sequences) {
        for (int64_t t = 0; t < sequence.tokens; ++t) {
          const int64_t at = sequence.at + t;
          if (at < 0 || at >= call.tokens) continue;
          EXPECT_EQ(seen[l * static_cast<size_t>(call.tokens) + static_cast<size_t>(at)], sequence.refused.ok() ? 1 : 0)
              << "layer " << l << ", token " << at;
        }
      }
    }
  }

  static std::vector<int64_t> Tokens(const CallPlan& plan) {
    std::vector<int64_t> tokens;
    for (const Part& part : plan.parts) tokens.push_back(part.tokens);
    return tokens;
  }

  ModelInfo model_ = SampleModel();
  PlanLimits limits_{.max_message_bytes = 64 << 20, .max_call_tokens = 64, .stripe_bytes = 0};
  const std::vector<int32_t> ids_ = std::vector<int32_t>(1000, 7);
  char byte_ = 0;
};

TEST_F(CallPlanTest, WhatFitsIsOnePart) {
  const CheckedCall call = Call({3, 1, 60});
  const CallPlan plan = Plan(call);
  ExpectCover(call, plan);
  EXPECT_THAT(Tokens(plan), ElementsAre(64));
  EXPECT_EQ(plan.priority, Priority::kAuto) << "the server sees the whole call itself";
}

TEST_F(CallPlanTest, TokensAreCutEvenlyByTheSmallestLimit) {
  CheckedCall call = Call({100, 2, 98});
  EXPECT_THAT(Tokens(Plan(call)), ElementsAre(29, 29, 29, 29, 29, 29, 26)) << "at most half of 64 tokens";
  EXPECT_EQ(Plan(call).tokens_together, 32);
  EXPECT_EQ(Plan(call).parts[6].bytes, 26 * 2 * (32 + 32)) << "up and down";
  limits_.max_message_bytes = 64 * 10;
  EXPECT_EQ(Tokens(Plan(call)).size(), 20u);
  ExpectCover(call, Plan(call));
  limits_.max_message_bytes = 64 * 11 - 1;
  EXPECT_EQ(Tokens(Plan(call)).size(), 20u) << "ten tokens of two layers, not eleven";
  limits_.max_message_bytes = 64 << 20;
  limits_.stripe_bytes = 64 * 25;
  EXPECT_EQ(Tokens(Plan(call)).size(), 8u);
  EXPECT_EQ(Plan(call).priority, Priority::kPrefill) << "as the whole call would be";
  EXPECT_FALSE(Plan(call).ordered);
}

TEST_F(CallPlanTest, LayersAreCutWhereOneTokenOfAllOfThemIsTooLarge) {
  CheckedCall call = Call({2});
  limits_.max_message_bytes = 63;
  const CallPlan plan = Plan(call);
  ExpectCover(call, plan);
  ASSERT_EQ(plan.parts.size(), 4u);
  EXPECT_EQ(plan.parts[1].first_layer, 1u);
  EXPECT_EQ(plan.parts[1].pieces[0].first, 0) << "all layers of a token before the next token";
  limits_.max_message_bytes = 31;
  const absl::Status status = PlanCall(model_, limits_, call).status();
  EXPECT_EQ(ErrorReason(status), "MESSAGE_BYTES");
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("layers[0]: one token of layer 1 takes 32 bytes of the request, a message may have 31"));
}

TEST_F(CallPlanTest, TheEnvelopeIsALimitToo) {
  limits_.max_call_tokens = int64_t{1} << 24;
  limits_.max_message_bytes = int64_t{1} << 30;
  const std::vector<int32_t> many(500'000, 1);
  CheckedCall call = Call({1});
  call.sequences[0].token_ids = many;
  call.sequences[0].tokens = call.tokens = 500'000;
  const CallPlan plan = Plan(call);
  EXPECT_THAT(Tokens(plan), testing::Each(testing::Le((1 << 20) / 5)));
  EXPECT_EQ(plan.parts.size(), 3u);
}

TEST_F(CallPlanTest, PartsOfASessionKeepTheirOrderAndStatelessOnesDoNot) {
  CheckedCall call = Call({100});
  EXPECT_FALSE(Plan(call).ordered);
  call.sequences[0].session = "s";
  EXPECT_TRUE(Plan(call).ordered) << "look-back or not, each part writes the session's history";
  limits_.stripe_bytes = 64;
  EXPECT_EQ(Plan(call).parts.size(), 4u) << "in order there is nothing to win";
  CheckedCall small = Call({2, 2});
  small.sequences[0].session = "a";
  small.sequences[1].session = "b";
  EXPECT_FALSE(Plan(small).ordered);
}

TEST_F(CallPlanTest, SessionsOfTwoServersNeverShareAMessage) {
  CheckedCall call = Call({2, 3, 4});
  call.sequences[0].home = "b";
  call.sequences[1].home = "a";
  call.sequences[2].home = "b";
  const CallPlan plan = Plan(call);
  ExpectCover(call, plan);
  EXPECT_THAT(Tokens(plan), ElementsAre(3, 6));
}

TEST_F(CallPlanTest, RefusedSequencesAreLeftOut) {
  CheckedCall call = Call({2, 3, 4});
  call.partial_ok = true;
  call.sequences[1].refused = absl::InvalidArgumentError("no");
  ExpectCover(call, Plan(call));
  EXPECT_THAT(Tokens(Plan(call)), ElementsAre(6));
  call.sequences[0].refused = call.sequences[2].refused = absl::InvalidArgumentError("no");
  EXPECT_THAT(Plan(call).parts, IsEmpty());
}

TEST_F(CallPlanTest, APreparedSliceIsCutAtTheTicketsAndSaysItsTokensOfEach) {
  auto state = std::make_shared<PreparedState>();
  state->tokens = 10;
  state->parts = {{"r1", "t1", 0, 4, 1}, {"r2", "t2", 4, 6, 1}};
  CheckedCall call = Call({6, 4});
  call.prepared = Prepared(state);
  call.prepared_first = 3;
  call.tokens = 6;  // [3, 9)
  call.sequences[0].at = -3;
  call.sequences[1].at = 3;
  CallPlan plan = Plan(call);
  ExpectCover(call, plan);
  ASSERT_EQ(plan.parts.size(), 2u);
  EXPECT_EQ(plan.parts[0].ticket, 0u);
  EXPECT_EQ(plan.parts[0].ticket_slice.begin, 3);
  EXPECT_EQ(plan.parts[0].ticket_slice.end, 4);
  EXPECT_EQ(plan.parts[1].ticket, 1u);
  EXPECT_EQ(plan.parts[1].ticket_slice.begin, 0);
  EXPECT_EQ(plan.parts[1].ticket_slice.end, 5);
  call.method = Method::kLookup;
  EXPECT_FALSE(Plan(call).parts[1].ticket.has_value()) << "a Lookup takes all of a ticket or goes by ids";
  call.sequences[1].lookback.clear();
  const absl::Status status = PlanCall(model_, limits_, call).status();
  EXPECT_EQ(ErrorReason(status), "MESSAGE_BYTES") << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("only the session knows the ids before them"));
}

TEST_F(CallPlanTest, APrepareBeyondTheServersMemoryIsRefusedAsItWould) {
  CheckedCall call = Call({10});
  call.method = Method::kPrepare;
  // kv of both layers, 48, and row ids of both, 2 * 24 * 8.
  model_.limits.prepare_memory_bytes = 10 * 432;
  EXPECT_TRUE(PlanCall(model_, limits_, call).ok());
  model_.limits.prepare_memory_bytes -= 1;
  const absl::Status status = PlanCall(model_, limits_, call).status();
  EXPECT_EQ(ErrorReason(status), "TOO_MANY_TOKENS");
  EXPECT_THAT(std::string(status.message()), HasSubstr("10 tokens takes 4320 bytes"));
}

TEST_F(CallPlanTest, LookbackOfAPieceIsWhatStandsBeforeIt) {
  const std::vector<int32_t> ids = {10, 11, 12, 13, 14};
  const std::vector<uint8_t> mask = {1, 0, 1, 1, 1};
  CheckedSequence sequence;
  sequence.token_ids = ids;
  sequence.token_mask = mask;
  sequence.lookback = {9, 8, -1};
  EXPECT_THAT(LookbackOf(sequence, 0, 3), ElementsAre(9, 8, -1));
  EXPECT_THAT(LookbackOf(sequence, 2, 3), ElementsAre(-1, 10, 9)) << "a masked token is dead";
  EXPECT_THAT(LookbackOf(sequence, 4, 3), ElementsAre(13, 12, -1));
  sequence.lookback.clear();
  EXPECT_THAT(LookbackOf(sequence, 2, 3), IsEmpty()) << "only the session's server knows";
  EXPECT_THAT(LookbackOf(sequence, 3, 3), ElementsAre(12, -1, 10));
}

}  // namespace
}  // namespace engram::client
