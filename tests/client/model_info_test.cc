#include "client/model_info.h"

#include <cstdint>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/sample_model.h"

namespace engram::client {
namespace {

using testing::HasSubstr;

TEST(ModelInfo, DecodesEveryField) {
  const ModelInfo model = SampleModel();
  EXPECT_EQ(model.dim, 4);
  EXPECT_EQ(model.hc, 2);
  EXPECT_EQ(model.lookback_length(), 3);
  EXPECT_EQ(model.HighwayTokenBytes(HighwayDtype::kF32), 32);
  EXPECT_EQ(model.HighwayTokenBytes(HighwayDtype::kBf16), 16);
  EXPECT_EQ(model.KvTokenBytes(), 24);
  EXPECT_TRUE(model.HasLayer(14));
  EXPECT_FALSE(model.HasLayer(2));
}

// A server that lies about its sizes is refused by the field's name, before any size is computed from it.
TEST(ModelInfo, RefusesFieldsThatCouldOverflowOrCannotBe) {
  struct Fault {
    const char* named;
    void (*spoil)(v1::GetModelResponse*);
  };
  const Fault faults[] = {
      {"geometry.dim", [](auto* r) { r->mutable_geometry()->set_dim(0); }},
      {"geometry.dim", [](auto* r) { r->mutable_geometry()->set_dim(std::numeric_limits<int64_t>::max()); }},
      {"geometry.hc", [](auto* r) { r->mutable_geometry()->set_hc(9); }},
      {"geometry.hc", [](auto* r) { r->mutable_geometry()->set_hc(-1); }},
      {"geometry.max_ngram", [](auto* r) { r->mutable_geometry()->set_max_ngram(1); }},
      {"geometry.heads", [](auto* r) { r->mutable_geometry()->set_heads(1 << 30); }},
      {"geometry.n_hash_cols", [](auto* r) { r->mutable_geometry()->set_n_hash_cols(23); }},
      {"geometry.vocab", [](auto* r) { r->mutable_geometry()->set_vocab(int64_t{1} << 32); }},
      {"geometry.rms_norm_eps",
       [](auto* r) { r->mutable_geometry()->set_rms_norm_eps(std::numeric_limits<float>::quiet_NaN()); }},
      {"number of layers", [](auto* r) { r->clear_layers(); }},
      {"layers[1].layer_id", [](auto* r) { r->mutable_layers(1)->set_layer_id(1); }},
      {"layers[0].layer_id", [](auto* r) { r->mutable_layers(0)->set_layer_id(-1); }},
      {"layers[0].rows", [](auto* r) { r->mutable_layers(0)->set_rows(0); }},
      {"layers[1].row_bytes", [](auto* r) { r->mutable_layers(1)->set_row_bytes(-84); }},
      {"hash_digest", [](auto* r) { r->set_hash_digest("short"); }},
      {"config_digest", [](auto* r) { r->clear_config_digest(); }},
      {"content_digest", [](auto* r) { r->set_content_digest("short"); }},
      {"server_epoch", [](auto* r) { r->clear_server_epoch(); }},
      {"limits.max_call_tokens", [](auto* r) { r->mutable_limits()->set_max_call_tokens(int64_t{1} << 40); }},
      {"limits.max_message_bytes", [](auto* r) { r->mutable_limits()->set_max_message_bytes(0x7fffffff); }},
      {"limits.position_limit", [](auto* r) { r->mutable_limits()->set_position_limit(-5); }},
      {"geometry.dim", [](auto* r) { r->Clear(); }},
  };
  for (const Fault& fault : faults) {
    v1::GetModelResponse response = SampleModelResponse();
    fault.spoil(&response);
    const absl::Status status = DecodeModelInfo(response).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << fault.named;
    EXPECT_THAT(std::string(status.message()), HasSubstr(fault.named));
  }
}

TEST(ModelInfo, FormsOfANewerServerAreSkipped) {
  v1::GetModelResponse response = SampleModelResponse();
  response.add_form_costs()->set_form(static_cast<v1::Form>(77));
  response.add_form_costs()->set_form(v1::FORM_KV);
  EXPECT_EQ(DecodeModelInfo(response)->form_costs.size(), 1u);
}

TEST(ModelInfo, OnlyFormsWithAHighwayHaveItsDtype) {
  v1::GetModelResponse response = SampleModelResponse();
  response.add_form_costs()->set_form(v1::FORM_ROWS_NATIVE);
  response.add_form_costs()->set_form(v1::FORM_UPDATE);
  response.mutable_form_costs(1)->set_highway_dtype(v1::HIGHWAY_DTYPE_BF16);
  const std::vector<ModelInfo::FormCost> costs = DecodeModelInfo(response)->form_costs;
  EXPECT_FALSE(costs[0].dtype.has_value());
  EXPECT_EQ(costs[1].dtype, HighwayDtype::kBf16);
}

}  // namespace
}  // namespace engram::client
