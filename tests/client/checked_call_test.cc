#include "client/checked_call.h"

#include <cstdint>
#include <memory>
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

// Two tokens at the start of a sequence, layer 1, HIGHWAY f32: 2 * 2 * 4 * 4 = 64 bytes each way.
class CheckedCallTest : public testing::Test {
 protected:
  CheckedCallTest() {
    call_.sequences = {SequenceRun{.history = &history_, .token_ids = ids_}};
    call_.layers = {LayerRun{.layer_id = 1, .highway = in_, .out = absl::MakeSpan(out_)}};
  }

  // The reason and the field as the server gives them, and what the text says.
  void ExpectRefusal(Reason reason, const std::string& field, const std::string& text) {
    const absl::Status status = CheckApply(model_, call_).status();
    EXPECT_EQ(status.code(), ReasonCode(reason)) << status;
    EXPECT_EQ(ErrorReason(status), ReasonName(reason)) << status;
    EXPECT_EQ(ErrorMetadata(status)["field"], field);
    EXPECT_THAT(ErrorOffenders(status), SizeIs(1));
    EXPECT_THAT(std::string(status.message()),
                AllOf(StartsWith(absl::StrCat(ReasonName(reason), ": ", field, ": ")), HasSubstr(text)));
  }

  // A mistake that no request can hold.
  void ExpectMisuse(const std::string& text) {
    const absl::Status status = CheckApply(model_, call_).status();
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

TEST_F(CheckedCallTest, ALookbackIsMadeOfWhateverIsKnown) {
  EXPECT_THAT(CheckApply(model_, call_)->sequences[0].lookback, ElementsAre(-1, -1, -1)) << "a history's start";
  ASSERT_TRUE(history_.Write(0, std::vector<int32_t>{1, 2, 3, 4}, {}).ok());
  call_.sequences[0].start_pos = 4;
  EXPECT_THAT(CheckApply(model_, call_)->sequences[0].lookback, ElementsAre(4, 3, 2));
  EXPECT_EQ(history_.length(), 4) << "a check must not move the history";
  call_.sequences[0] = {.token_ids = ids_};
  EXPECT_THAT(CheckApply(model_, call_)->sequences[0].lookback, ElementsAre(-1, -1, -1)) << "a stateless start";
  call_.sequences[0].session = "s";
  EXPECT_TRUE(CheckApply(model_, call_)->sequences[0].by_session()) << "its server knows";
}

TEST_F(CheckedCallTest, RefusesBeforeSendingAsTheServerWould) {
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
  ExpectRefusal(Reason::kLayerUnknown, "layers[1].layer_id", "layer 1 stands in the call more than once");
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

TEST_F(CheckedCallTest, PositionsAreRefusedAsTheServerWould) {
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

TEST_F(CheckedCallTest, WhatNoServerCanSeeIsAMisuseWithoutAReason) {
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

TEST_F(CheckedCallTest, SequencesThatCannotBeSentAreRefusedByName) {
  const ApplyCall good = call_;
  call_.sequences[0] = {.start_pos = 3, .token_ids = ids_};
  ExpectRefusal(Reason::kLookbackLength, "sequences[0].lookback_token_ids", "does not start at 0 has exactly 3 ids");
  call_.sequences[0].fork_from = "parent";
  ExpectRefusal(Reason::kSessionLength, "sequences[0].session", "a stateless sequence cannot fork");
  call_ = good;
  call_.sequences[0].session = "s";
  call_.sequences[0].fork_from = "parent";
  ExpectMisuse("fork_from: given besides a history");
  call_.sequences = {{.token_ids = ids_, .session = "s"}, {.token_ids = ids_}, {.token_ids = ids_, .session = "s"}};
  ExpectRefusal(Reason::kDuplicateSession, "sequences[2].session", "more than once");
}

TEST_F(CheckedCallTest, APartialCallKeepsTheRefusalOfOneSequenceToItself) {
  const std::vector<int32_t> placeholder = {-1};
  SequenceHistory other(4);
  call_.sequences.insert(call_.sequences.begin(), SequenceRun{.history = &other, .token_ids = placeholder});
  std::string in(96, 'i');
  call_.layers[0] = {.layer_id = 1, .highway = in, .out = absl::MakeSpan(in)};
  ExpectRefusal(Reason::kTokenOutOfRange, "sequences[0].token_ids[0]", "token id -1 is below 0");
  call_.partial_ok = true;
  const CheckedCall checked = CheckApply(model_, call_).value();
  EXPECT_EQ(ErrorReason(checked.sequences[0].refused), "TOKEN_OUT_OF_RANGE");
  EXPECT_TRUE(checked.sequences[1].refused.ok());
  EXPECT_EQ(checked.sequences[1].at, 1) << "its tokens keep their place";
  call_.sequences[1].lookback = ids_;
  ExpectMisuse("sequences[1].lookback: given besides a history");
}

TEST_F(CheckedCallTest, EveryFormHasItsOwnResults) {
  const ApplyCall good = call_;
  std::vector<float> gates(4);
  std::vector<uint16_t> value(8);
  call_.form = Form::kUpdate;
  ExpectMisuse("layers[0].out: room for 64 bytes, expected 0");
  call_.layers[0].out = {};
  ExpectMisuse("layers[0].gates: room for 0 bytes, expected 16");
  call_.layers[0].gates = absl::MakeSpan(gates);
  ExpectMisuse("layers[0].value: room for 0 bytes, expected 16");
  call_.layers[0].value = absl::MakeSpan(value);
  EXPECT_TRUE(CheckApply(model_, call_).ok());
  call_.form = Form::kGate;
  ExpectMisuse("layers[0].value: room for 16 bytes, expected 0");
  call_.form = Form::kRowsBf16;
  ExpectRefusal(Reason::kForm, "form", "Apply has no form rows-bf16; those are highway, kv, update, gate, auto");
  call_ = good;
  call_.form = Form::kAuto;
  EXPECT_EQ(CheckApply(model_, call_)->form, Form::kHighway) << "what the server suggests";
  ModelInfo over_tcp = model_;
  over_tcp.suggested_form = Form::kUpdate;
  const CheckedCall checked = CheckApply(over_tcp, call_).value();
  EXPECT_EQ(checked.form, Form::kUpdate);
  EXPECT_EQ(checked.layers[0].updated, out_.data());
  call_.form = Form::kKv;
  call_.on_failure = OnFailure::kSkip;
  ExpectMisuse("form kv cannot say \"nothing\"");
}

TEST_F(CheckedCallTest, LookupsAreMeasuredByTheirSliceAndRowIds) {
  std::string out(2 * 4 * 84, ' ');
  LookupCall call;
  call.sequences = {{.token_ids = ids_}};
  call.layers = {{.layer_id = 14, .out = absl::MakeSpan(out)}};
  call.slice = Range{20, 24};
  EXPECT_TRUE(CheckLookup(model_, call).ok());
  call.slice = Range{20, 25};
  EXPECT_EQ(ErrorReason(CheckLookup(model_, call).status()), "SLICE");
  call.slice.reset();
  EXPECT_THAT(std::string(CheckLookup(model_, call).status().message()),
              HasSubstr("layers[0].out: room for 672 bytes, expected 4032"));
  std::vector<int32_t> rows(48, 999);
  call.row_ids = rows;
  EXPECT_EQ(ErrorReason(CheckLookup(model_, call).status()), "FORM");
  call.sequences.clear();
  call.slice = Range{20, 24};
  EXPECT_TRUE(CheckLookup(model_, call).ok());
  rows[30] = 1000;
  EXPECT_THAT(std::string(CheckLookup(model_, call).status().message()),
              HasSubstr("ROW_OUT_OF_RANGE: row_ids[30]: row 1000 is outside [-1, 1000) of layer 14"));
  call.row_ids.remove_suffix(1);
  EXPECT_THAT(std::string(CheckLookup(model_, call).status().message()),
              HasSubstr("row_ids is [T, 1, 24], got 47 ids"));
  call.form = Form::kUpdate;
  EXPECT_EQ(ErrorReason(CheckLookup(model_, call).status()), "FORM");
}

TEST_F(CheckedCallTest, NothingPreparedAndASliceBeyondItAreRefused) {
  const Prepared nothing;
  EXPECT_TRUE(nothing.layer_ids().empty());
  call_.prepared = &nothing;
  ExpectRefusal(Reason::kForm, "prepared", "stands for its tokens");
  call_.sequences.clear();
  ExpectRefusal(Reason::kEmptyCall, "prepared", "nothing is prepared");
  auto state = std::make_shared<PreparedState>();
  state->tokens = 5;
  state->sequences = {{.start_pos = 0, .token_ids = {1, 2, 3, 4, 5}, .lookback = {-1, -1, -1}}};
  const Prepared prepared(state);
  call_.prepared = &prepared;
  call_.token_slice = Range{4, 6};
  ExpectRefusal(Reason::kSlice, "token_slice", "[4, 6) is no part of [0, 5)");
  call_.token_slice = Range{2, 4};
  EXPECT_EQ(CheckApply(model_, call_)->tokens, 2);
}

}  // namespace
}  // namespace engram::client
