// A server that answers from the fixture itself must pass, and each fault put into it must be seen by its stage.

#include "client/verify/replay.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "client/bf16.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_server.h"

namespace engram::client {
namespace {

using testing::HasSubstr;

struct Faults {
  int kv_steps = 0;                      // added to the bits of every kv value of copy 0
  double gate = 0;                       // added to every gate
  bool bf16_truncates = false;           // instead of rounding
  bool masked_is_computed = false;       // h + 0 * v instead of a copy
  const char* refuse_session = nullptr;  // a refusal of calls without look-back
};

class ReplayTest : public testing::Test {
 protected:
  ReplayTest() : fixture_(LoadFixture(std::string(ENGRAM_TEST_DATA) + "/tiny/expected.json").value()) {
    DescribeModel();
    server_.apply = [this](auto&, const v1::ApplyRequest& request, v1::ApplyResponse* response) {
      return Answer(request, response);
    };
    server_.Start();
    client_ = Client::Connect({.replicas = {.targets = {server_.target()}}}).value();
  }

  ReplayReport Run(ReplayMode mode) {
    ReplayReport report;
    const absl::Status status = Replay(*client_, fixture_, mode, "test", absl::Seconds(30), &report);
    EXPECT_TRUE(status.ok()) << status;
    return report;
  }

  Faults faults_;
  Fixture fixture_;
  FakeServer server_;
  std::unique_ptr<Client> client_;

 private:
  void DescribeModel() {
    v1::Geometry* geometry = server_.model.mutable_geometry();
    geometry->set_dim(fixture_.dim);
    geometry->set_hc(static_cast<int32_t>(fixture_.hc));
    geometry->set_vocab(fixture_.vocab);
    geometry->set_pad_id(static_cast<int32_t>(fixture_.pad_id));
    for (size_t l = 0; l < fixture_.layer_ids.size(); ++l) server_.model.mutable_layers(l)->set_rows(fixture_.rows[l]);
  }

  const FixtureCall* Find(const v1::Sequence& sequence) const {
    for (const FixtureCase& fixture_case : fixture_.cases) {
      for (const FixtureCall& call : fixture_case.calls) {
        const std::vector<int32_t> ids(sequence.token_ids().begin(), sequence.token_ids().end());
        if (call.tokens == ids && call.start_pos == sequence.start_pos()) return &call;
      }
    }
    return nullptr;
  }

  grpc::Status Answer(const v1::ApplyRequest& request, v1::ApplyResponse* response) {
    response->clear_layers();
    for (size_t l = 0; l < fixture_.layer_ids.size(); ++l) {
      v1::LayerOutput* output = response->add_layers();
      output->set_layer_id(fixture_.layer_ids[l]);
      size_t at = 0;  // bytes of the highway already used
      for (const v1::Sequence& sequence : request.sequences()) {
        const FixtureCall* call = Find(sequence);
        if (call == nullptr) return {grpc::StatusCode::INTERNAL, "no such call in the fixture"};
        if (faults_.refuse_session != nullptr && sequence.lookback_token_ids().empty()) {
          return {grpc::StatusCode::FAILED_PRECONDITION, faults_.refuse_session};
        }
        if (request.form() == v1::FORM_KV) {
          AppendKv(call->layers[l], output->mutable_kv());
        } else {
          const bool bf16 = request.highway_dtype() == v1::HIGHWAY_DTYPE_BF16;
          at += AppendHighway(*call, call->layers[l], request.layers(l).highway().substr(at), bf16,
                              output->mutable_highway());
        }
      }
    }
    return grpc::Status::OK;
  }

  void AppendKv(const FixtureLayer& layer, std::string* kv) const {
    const int64_t width = (fixture_.hc + 1) * fixture_.dim;
    for (size_t i = 0; i < layer.kv.size(); ++i) {
      uint16_t bits = FloatToBf16(layer.kv[i]);
      if (static_cast<int64_t>(i) % width < fixture_.dim) bits = static_cast<uint16_t>(bits + faults_.kv_steps);
      kv->append(reinterpret_cast<const char*>(&bits), 2);
    }
  }

  // Returns the bytes it used of `in`.
  size_t AppendHighway(const FixtureCall& call, const FixtureLayer& layer, const std::string& in, bool bf16,
                       std::string* out) const {
    const int64_t dim = fixture_.dim, hc = fixture_.hc;
    const size_t element = bf16 ? 2 : 4;
    const auto tokens = static_cast<int64_t>(call.tokens.size());
    for (int64_t i = 0; i < tokens * hc * dim; ++i) {
      const int64_t token = i / (hc * dim), copy = i / dim % hc;
      const char* bytes = in.data() + i * element;
      if (!call.Live(token) && !faults_.masked_is_computed) {
        out->append(bytes, element);
        continue;
      }
      float h = 0;
      uint16_t bits = 0;
      std::memcpy(bf16 ? static_cast<void*>(&bits) : &h, bytes, element);
      if (bf16) h = Bf16ToFloat(bits);
      const float value = layer.kv[token * (hc + 1) * dim + hc * dim + i % dim];
      const float gate = call.Live(token) ? static_cast<float>(layer.gate[token * hc + copy] + faults_.gate) : 0;
      const float change = gate * value;
      const float sum = h + change;
      if (!bf16) {
        out->append(reinterpret_cast<const char*>(&sum), 4);
        continue;
      }
      uint32_t whole = 0;
      std::memcpy(&whole, &sum, 4);
      // Truncating twice: once would still be within 2^-8 of the sum.
      bits = faults_.bf16_truncates ? static_cast<uint16_t>((whole >> 16) - 1) : FloatToBf16(sum);
      out->append(reinterpret_cast<const char*>(&bits), 2);
    }
    return tokens * hc * dim * element;
  }
};

TEST_F(ReplayTest, AServerThatAnswersAsTheFixturePassesInEveryMode) {
  ASSERT_TRUE(CheckSameModel(client_->model(), fixture_).ok()) << CheckSameModel(client_->model(), fixture_);
  for (ReplayMode mode : {ReplayMode::kLookback, ReplayMode::kSession, ReplayMode::kTogether}) {
    const ReplayReport report = Run(mode);
    EXPECT_TRUE(report.passed());
    EXPECT_EQ(report.bounded_gates, 0);
    EXPECT_GT(report.exact_gates, 0);
    EXPECT_GT(report.masked.values(), 0);
  }
}

TEST_F(ReplayTest, AKeyOneUlpOffIsBoundedNotSkippedAndThreeUlpsMiss) {
  faults_.kv_steps = 1;
  const ReplayReport near = Run(ReplayMode::kLookback);
  EXPECT_GT(near.bounded_gates, 0);
  EXPECT_EQ(near.f32.values(), near.f32_rounded.values());
  faults_.kv_steps = 3;
  const ReplayReport far = Run(ReplayMode::kLookback);
  EXPECT_GT(far.kv.misses(), 0);
  EXPECT_FALSE(far.passed());
}

TEST_F(ReplayTest, AGateALittleOffMisses) {
  faults_.gate = 1e-5;
  const ReplayReport report = Run(ReplayMode::kLookback);
  EXPECT_EQ(report.kv.misses(), 0);
  EXPECT_GT(report.f32.misses(), 0);
  EXPECT_FALSE(report.passed());
}

TEST_F(ReplayTest, ABf16StepTooLowMisses) {
  faults_.bf16_truncates = true;
  const ReplayReport report = Run(ReplayMode::kLookback);
  EXPECT_EQ(report.f32.misses(), 0);
  EXPECT_GT(report.bf16.misses(), 0);
}

TEST_F(ReplayTest, AMaskedTokenThatWasComputedMisses) {
  faults_.masked_is_computed = true;
  const ReplayReport report = Run(ReplayMode::kTogether);
  EXPECT_GT(report.masked.misses(), 0) << "-0 + 0 is +0";
  EXPECT_FALSE(report.passed());
}

TEST_F(ReplayTest, ARefusalStopsAndNamesTheCall) {
  faults_.refuse_session = "a gap";
  ReplayReport report;
  const absl::Status status = Replay(*client_, fixture_, ReplayMode::kSession, "test", absl::Seconds(30), &report);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("prefill_then_decode, call 0, form kv: a gap"));
}

TEST_F(ReplayTest, AnotherModelIsNamedBeforeAnythingIsSent) {
  fixture_.rows[1] += 1;
  const absl::Status status = CheckSameModel(client_->model(), fixture_);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layers[1].rows is 10150, the fixture's is 10151; "
                                                       "serve the fixture's own, which lies beside it: tiny.gguf"));
}

}  // namespace
}  // namespace engram::client
