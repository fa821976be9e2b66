// Bits do not depend on how tokens travel: cut, mixed, stateless or through a session, over a unix socket or TCP.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

constexpr int64_t kSeed = 11;

struct Fixture {
  const char* name;
  const char* path;
};

class ApplyBitsTest : public ::testing::TestWithParam<Fixture> {
 protected:
  void SetUp() override {
    // A batch of 16 tokens, so that a call of 40 is cut into three.
    auto server = ServerProcess::Start(std::string(ENGRAM_TEST_DATA) + GetParam().path, {"--max-batch-tokens", "16"});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    rpc_ = std::make_unique<Rpc>(server_->unix_address());
    model_ = rpc_->Model();
    ASSERT_GT(model_.layers_size(), 0);
    values_ = model_.geometry().dim() * model_.geometry().hc();
    before_ = model_.geometry().max_ngram() - 1;
    std::mt19937 random(7);
    for (int i = 0; i < 40; ++i) tokens_.push_back(static_cast<int32_t>(random() % model_.geometry().vocab()));
  }

  std::vector<int32_t> Slice(int64_t begin, int64_t end) const {
    return {tokens_.begin() + begin, tokens_.begin() + end};
  }

  // The N-1 tokens before `pos`, newest first, -1 where masked or before the start.
  std::vector<int32_t> LookbackAt(int64_t pos, const std::vector<uint8_t>& mask = {}) const {
    std::vector<int32_t> ids;
    for (int64_t p = pos - 1; p >= pos - before_; --p) {
      const bool live = p >= 0 && (mask.empty() || mask[static_cast<size_t>(p)] != 0);
      ids.push_back(live ? tokens_[static_cast<size_t>(p)] : -1);
    }
    return ids;
  }

  // A call over all layers. Token i of the call takes the highway of number numbers[i].
  v1::ApplyRequest Request(const std::vector<Seq>& seqs, const std::vector<int64_t>& numbers, v1::Form form,
                           v1::HighwayDtype dtype) const {
    v1::ApplyRequest request;
    request.set_form(form);
    request.set_highway_dtype(dtype);
    for (const Seq& seq : seqs) AddSequence(request, seq);
    for (const v1::Layer& layer : model_.layers()) {
      v1::LayerInput& input = *request.add_layers();
      input.set_layer_id(layer.layer_id());
      if (form == v1::FORM_KV) continue;
      for (const int64_t number : numbers) input.mutable_highway()->append(HighwayOf(kSeed, number, 1, values_, dtype));
    }
    return request;
  }

  static std::vector<int64_t> Numbers(int64_t begin, int64_t end) {
    std::vector<int64_t> numbers;
    for (int64_t i = begin; i < end; ++i) numbers.push_back(i);
    return numbers;
  }

  // Per layer, the bytes of the answer; a test failure when the call fails.
  std::vector<std::string> Bytes(Rpc& rpc, const v1::ApplyRequest& request) {
    const Answer answer = rpc.Apply(request);
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
    std::vector<std::string> layers;
    for (const v1::LayerOutput& layer : answer.response.layers()) {
      layers.push_back(request.form() == v1::FORM_KV ? layer.kv() : layer.highway());
    }
    layers.resize(static_cast<size_t>(model_.layers_size()));
    return layers;
  }

  static std::vector<std::string> Joined(std::vector<std::string> a, const std::vector<std::string>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Rpc> rpc_;
  v1::GetModelResponse model_;
  std::vector<int32_t> tokens_;
  int64_t values_ = 0;
  int64_t before_ = 0;
};

constexpr struct {
  v1::Form form;
  v1::HighwayDtype dtype;
} kForms[] = {{v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32},
              {v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_BF16},
              {v1::FORM_KV, v1::HIGHWAY_DTYPE_UNSPECIFIED}};

TEST_P(ApplyBitsTest, ChunkedIsOneShotWhereverItIsCut) {
  for (const auto& [form, dtype] : kForms) {
    const auto whole = Bytes(*rpc_, Request({{"one", 0, tokens_, {}, {}}}, Numbers(0, 40), form, dtype));
    for (const int64_t cut : {1, 2, 3, 15, 16, 17, 39}) {
      const auto head = Bytes(*rpc_, Request({{"cut", 0, Slice(0, cut), {}, {}}}, Numbers(0, cut), form, dtype));
      const auto by_session =
          Bytes(*rpc_, Request({{"cut", cut, Slice(cut, 40), {}, {}}}, Numbers(cut, 40), form, dtype));
      const auto by_lookback =
          Bytes(*rpc_, Request({{"", cut, Slice(cut, 40), {}, LookbackAt(cut)}}, Numbers(cut, 40), form, dtype));
      EXPECT_EQ(Joined(head, by_session), whole) << "cut at " << cut;
      EXPECT_EQ(Joined(head, by_lookback), whole) << "cut at " << cut;
    }
  }
}

TEST_P(ApplyBitsTest, TokenByTokenIsOneShot) {
  const auto whole =
      Bytes(*rpc_, Request({{"one", 0, tokens_, {}, {}}}, Numbers(0, 40), v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32));
  std::vector<std::string> steps(static_cast<size_t>(model_.layers_size()));
  for (int64_t p = 0; p < 40; ++p) {
    steps = Joined(steps, Bytes(*rpc_, Request({{"step", p, Slice(p, p + 1), {}, {}}}, {p}, v1::FORM_HIGHWAY,
                                               v1::HIGHWAY_DTYPE_F32)));
  }
  EXPECT_EQ(steps, whole);
}

TEST_P(ApplyBitsTest, TwoSequencesInOneCallAreTwoCalls) {
  for (const auto& [form, dtype] : kForms) {
    const auto a = Bytes(*rpc_, Request({{"", 0, Slice(0, 7), {}, {}}}, Numbers(0, 7), form, dtype));
    const auto b = Bytes(*rpc_, Request({{"", 0, Slice(20, 33), {}, {}}}, Numbers(20, 33), form, dtype));
    std::vector<int64_t> numbers = Numbers(0, 7);
    for (const int64_t n : Numbers(20, 33)) numbers.push_back(n);
    const auto both =
        Bytes(*rpc_, Request({{"", 0, Slice(0, 7), {}, {}}, {"", 0, Slice(20, 33), {}, {}}}, numbers, form, dtype));
    EXPECT_EQ(both, Joined(a, b));
  }
}

TEST_P(ApplyBitsTest, OneLayerAloneIsThatLayerOfAll) {
  const auto all =
      Bytes(*rpc_, Request({{"", 0, tokens_, {}, {}}}, Numbers(0, 40), v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32));
  for (int i = model_.layers_size() - 1; i >= 0; --i) {
    v1::ApplyRequest request =
        Request({{"", 0, tokens_, {}, {}}}, Numbers(0, 40), v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32);
    const v1::LayerInput input = request.layers(i);
    request.clear_layers();
    *request.add_layers() = input;
    const Answer answer = rpc_->Apply(request);
    ASSERT_EQ(answer.response.layers_size(), 1) << answer.status.error_message();
    EXPECT_EQ(answer.response.layers(0).layer_id(), model_.layers(i).layer_id());
    EXPECT_EQ(answer.response.layers(0).highway(), all[static_cast<size_t>(i)]);
  }
}

TEST_P(ApplyBitsTest, LayersComeBackInTheOrderAskedFor) {
  v1::ApplyRequest request =
      Request({{"", 0, tokens_, {}, {}}}, Numbers(0, 40), v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32);
  const auto straight = Bytes(*rpc_, request);
  std::reverse(request.mutable_layers()->begin(), request.mutable_layers()->end());
  auto reversed = Bytes(*rpc_, request);
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_EQ(reversed, straight);
}

TEST_P(ApplyBitsTest, RollbackForgetsRejectedDrafts) {
  const auto straight = Bytes(
      *rpc_, Request({{"straight", 0, Slice(0, 12), {}, {}}}, Numbers(0, 12), v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32));
  auto drafted = Bytes(
      *rpc_, Request({{"draft", 0, Slice(0, 6), {}, {}}}, Numbers(0, 6), v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32));
  Bytes(*rpc_,
        Request({{"draft", 6, Slice(30, 35), {}, {}}}, Numbers(30, 35), v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32));
  drafted = Joined(drafted, Bytes(*rpc_, Request({{"draft", 6, Slice(6, 12), {}, {}}}, Numbers(6, 12), v1::FORM_HIGHWAY,
                                                 v1::HIGHWAY_DTYPE_F32)));
  EXPECT_EQ(drafted, straight);
}

TEST_P(ApplyBitsTest, MaskAndLookbackMixAsOneSequence) {
  std::vector<uint8_t> mask(40, 1);
  for (const size_t p : {2u, 3u, 9u, 20u, 21u, 22u, 39u}) mask[p] = 0;
  const auto masked = [&mask](int64_t begin, int64_t end) {
    return std::vector<uint8_t>(mask.begin() + begin, mask.begin() + end);
  };
  for (const auto& [form, dtype] : kForms) {
    const auto whole = Bytes(*rpc_, Request({{"m", 0, tokens_, mask, {}}}, Numbers(0, 40), form, dtype));
    for (const int64_t cut : {3, 4, 10, 22, 23}) {
      const auto head =
          Bytes(*rpc_, Request({{"h", 0, Slice(0, cut), masked(0, cut), {}}}, Numbers(0, cut), form, dtype));
      const auto tail = Bytes(*rpc_, Request({{"", cut, Slice(cut, 40), masked(cut, 40), LookbackAt(cut, mask)}},
                                             Numbers(cut, 40), form, dtype));
      const auto session =
          Bytes(*rpc_, Request({{"h", cut, Slice(cut, 40), masked(cut, 40), {}}}, Numbers(cut, 40), form, dtype));
      EXPECT_EQ(Joined(head, tail), whole) << "cut at " << cut;
      EXPECT_EQ(Joined(head, session), whole) << "cut at " << cut;
    }
  }
}

TEST_P(ApplyBitsTest, AMaskedTokensHighwayIsCopiedByteForByte) {
  v1::ApplyRequest request =
      Request({{"", 0, Slice(0, 3), {1, 0, 1}, {}}}, Numbers(0, 3), v1::FORM_HIGHWAY, v1::HIGHWAY_DTYPE_F32);
  // Minus zeros and a NaN with a payload: h + 0 * v would change both.
  std::string odd(static_cast<size_t>(values_) * 4, '\0');
  for (int64_t i = 0; i < values_; ++i) {
    const uint32_t word = i % 2 == 0 ? 0x80000000u : 0x7fa12345u;
    std::memcpy(odd.data() + i * 4, &word, 4);
  }
  request.mutable_layers(0)->mutable_highway()->replace(odd.size(), odd.size(), odd);
  const auto out = Bytes(*rpc_, request);
  EXPECT_EQ(out[0].substr(odd.size(), odd.size()), odd);
  EXPECT_NE(out[0].substr(0, odd.size()), request.layers(0).highway().substr(0, odd.size()));
}

TEST_P(ApplyBitsTest, UnixAndTcpGiveTheSameBits) {
  Rpc tcp(server_->tcp_address());
  for (const auto& [form, dtype] : kForms) {
    const auto request = Request({{"", 0, tokens_, {}, {}}}, Numbers(0, 40), form, dtype);
    EXPECT_EQ(Bytes(tcp, request), Bytes(*rpc_, request));
  }
}

// Calls of eight clients share batches in whatever mix the moment gives; every one must look as if it were alone.
TEST_P(ApplyBitsTest, AnyBatchMixIsAlone) {
  struct Case {
    v1::ApplyRequest request;
    std::vector<std::string> alone;
  };
  std::vector<Case> cases;
  std::mt19937 random(3);
  for (int i = 0; i < 24; ++i) {
    const int64_t begin = random() % 30;
    const int64_t end = begin + 1 + random() % (i % 4 == 0 ? 10 : 2);
    const auto& [form, dtype] = kForms[i % 3];
    Case c{Request({{"", begin, Slice(begin, end), {}, LookbackAt(begin)}}, Numbers(begin, end), form, dtype), {}};
    if (i % 5 == 0 && c.request.layers_size() > 1) c.request.mutable_layers()->RemoveLast();
    c.alone = Bytes(*rpc_, c.request);
    cases.push_back(std::move(c));
  }
  std::vector<std::thread> clients;
  for (int t = 0; t < 8; ++t) {
    clients.emplace_back([&, t] {
      Rpc rpc(t % 2 == 0 ? server_->unix_address() : server_->tcp_address());
      for (int i = 0; i < 60; ++i) {
        const Case& c = cases[static_cast<size_t>(t * 7 + i) % cases.size()];
        EXPECT_EQ(Bytes(rpc, c.request), c.alone);
      }
    });
  }
  for (std::thread& client : clients) client.join();
}

INSTANTIATE_TEST_SUITE_P(Fixtures, ApplyBitsTest,
                         ::testing::Values(Fixture{"tiny", "/tiny/tiny.gguf"},
                                           Fixture{"split", "/split/split-00001-of-00002.gguf"}),
                         [](const auto& fixture) { return fixture.param.name; });

}  // namespace
}  // namespace engram::e2e
