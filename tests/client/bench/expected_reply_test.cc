#include "client/bench/expected_reply.h"

#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::bench {
namespace {

using client::Form;
using testing::HasSubstr;

std::string F32(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

std::string Bf16(const std::vector<float>& values) {
  std::string bytes;
  for (const float value : values) bytes.append(reinterpret_cast<const char*>(&value) + 2, 2);
  return bytes;
}

// Three tokens of two sequences, of a model with dim 4 and hc 2.
class ExpectedReplyTest : public testing::Test {
 protected:
  ExpectedReplyTest() {
    step_.sequences = {{"", 10, {1, 2}, {}}, {"chat", 70, {3}, {}}};
    rules_.model = &model_;
    rules_.highways = {highway_.data()};
    expected_[0].layer_id = 14;
    expected_[0].kv = Bf16(std::vector<float>(3 * 12, 0.5f));
  }

  // With `reply` in the field that the form has it in.
  std::string Check(Form form, const std::string& expected, const std::string& reply) {
    step_.form = form;
    expected_[0].out = expected;
    google::protobuf::RepeatedPtrField<v1::LayerOutput> layers;
    v1::LayerOutput* layer = layers.Add();
    layer->set_layer_id(14);
    if (form == Form::kHighway) layer->set_highway(reply);
    if (form == Form::kKv) layer->set_kv(reply);
    if (form == Form::kRowsNative || form == Form::kRowsBf16) layer->set_rows(reply);
    return FirstMismatch(rules_, step_, expected_, layers);
  }

  const client::ModelInfo model_ = client::SampleModel();
  const std::string highway_ = F32(std::vector<float>(3 * 8, 1.0f));
  Step step_;
  ReplyRules rules_;
  std::vector<ExpectedLayer> expected_ = std::vector<ExpectedLayer>(1);
};

TEST_F(ExpectedReplyTest, EqualBytesAreRightInEveryForm) {
  EXPECT_EQ(Check(Form::kHighway, highway_, highway_), "");
  EXPECT_EQ(Check(Form::kKv, expected_[0].kv, expected_[0].kv), "");
  const std::string rows(3 * 24 * 84, 'r');
  EXPECT_EQ(Check(Form::kRowsNative, rows, rows), "");
}

TEST_F(ExpectedReplyTest, AMismatchIsNamedBySequencePositionLayerAndElement) {
  std::vector<float> values(3 * 8, 1.0f);
  values[1 * 8 + 5] = 1.25f;
  EXPECT_EQ(Check(Form::kHighway, highway_, F32(values)),
            "sequences[0], position 11, layer 14: highway[5] of the token is 1.25, expected 1");
  values[1 * 8 + 5] = 1;
  values[2 * 8] = -1;
  EXPECT_EQ(Check(Form::kHighway, highway_, F32(values)),
            "session \"chat\", position 70, layer 14: highway[0] of the token is -1, expected 1");
  std::string rows(3 * 24 * 84, 'r');
  const std::string good = rows;
  rows[24 * 84 * 2 + 3] = 's';
  EXPECT_THAT(Check(Form::kRowsNative, good, rows), HasSubstr("position 70, layer 14: rows[3] of the token is 115"));
}

TEST_F(ExpectedReplyTest, SizesLayersAndFieldsMustBeThoseOfTheForm) {
  EXPECT_EQ(Check(Form::kHighway, highway_, highway_.substr(4)), "layer 14: highway has 92 bytes, expected 96");
  google::protobuf::RepeatedPtrField<v1::LayerOutput> layers;
  EXPECT_EQ(FirstMismatch(rules_, step_, expected_, layers), "the reply has 0 layers, expected 1");
  layers.Add()->set_layer_id(1);
  EXPECT_EQ(FirstMismatch(rules_, step_, expected_, layers), "layers[0] is layer 1, expected 14");
  // A highway where gates were asked for is as wrong as none.
  step_.form = Form::kGate;
  layers[0].set_layer_id(14);
  layers[0].set_highway(highway_);
  EXPECT_EQ(FirstMismatch(rules_, step_, expected_, layers), "layer 14: highway has 96 bytes, expected 0");
}

TEST_F(ExpectedReplyTest, OneBitIsAMissWithinOneNumericsIdAndNoneAcrossTwo) {
  std::string kv = expected_[0].kv;
  kv[0] = static_cast<char>(kv[0] ^ 1);  // 2^-8 of 0.5, relatively
  EXPECT_NE(Check(Form::kKv, expected_[0].kv, kv), "");
  rules_.same_numerics = false;
  EXPECT_EQ(Check(Form::kKv, expected_[0].kv, kv), "");
  const std::string rows = Bf16(std::vector<float>(3 * 24 * 256, 1.0f));
  std::string other = rows;
  other[0] = static_cast<char>(other[0] ^ 1);
  EXPECT_NE(Check(Form::kRowsBf16, rows, other), "") << "rows are the same bits everywhere";
}

TEST_F(ExpectedReplyTest, AcrossNumericsIdsWrongValuesAndNanAreStillMisses) {
  rules_.same_numerics = false;
  std::vector<float> values(3 * 12, 0.5f);
  values[20] = 0.53f;
  EXPECT_THAT(Check(Form::kKv, expected_[0].kv, Bf16(values)), HasSubstr("position 11, layer 14: kv[8]"));
  std::vector<float> highway(3 * 8, 1.0f);
  highway[3] = 1.02f;  // value 0.5, so a gate may move it by 1/32
  EXPECT_EQ(Check(Form::kHighway, highway_, F32(highway)), "");
  highway[3] = 1.2f;
  EXPECT_NE(Check(Form::kHighway, highway_, F32(highway)), "");
  highway[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(Check(Form::kHighway, highway_, F32(highway)), "");
}

}  // namespace
}  // namespace engram::bench
