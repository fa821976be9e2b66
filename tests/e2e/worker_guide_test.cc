// docs/worker-guide.md, section by section: what a worker is told to send gives what it is told it gives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

using Ids = std::vector<int32_t>;

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";
constexpr int64_t kDim = 64;
constexpr int64_t kCopies = 4;
constexpr int64_t kValues = kDim * kCopies;
constexpr int64_t kColumns = 24;
constexpr int64_t kOutputs = kDim * (kCopies + 1);
constexpr int kLayers[] = {1, 14};

class WorkerGuideTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_ = Start();
    ASSERT_NE(server_, nullptr);
    rpc_ = std::make_unique<Rpc>(server_->unix_address());
    ASSERT_EQ(rpc_->Model().layers_size(), 2);
  }

  static std::unique_ptr<ServerProcess> Start() {
    auto server = ServerProcess::Start(kTiny, {"--ticket-ttl-ms", "60000"});
    EXPECT_TRUE(server.ok()) << server.status();
    return server.ok() ? *std::move(server) : nullptr;
  }

  static Ids Text(size_t count, uint32_t seed) {
    std::mt19937 random(seed);
    Ids ids;
    while (ids.size() < count) ids.push_back(static_cast<int32_t>(random() % 512));
    return ids;
  }

  // Positions [begin, end) of a sequence whose every id is known, with look-back: what a worker with a history sends.
  static Seq Part(const Ids& text, size_t begin, size_t end, std::vector<uint8_t> mask = {}) {
    Seq seq{"", static_cast<int64_t>(begin), Ids(text.begin() + Pos(begin), text.begin() + Pos(end)), {}, {}};
    for (size_t back = 1; back <= 3 && begin > 0; ++back) {
      const bool live = back <= begin && (mask.empty() || mask[begin - back] != 0);
      seq.lookback.push_back(live ? text[begin - back] : -1);
    }
    if (!mask.empty()) seq.mask.assign(mask.begin() + Pos(begin), mask.begin() + Pos(end));
    return seq;
  }

  static std::string Highway(int64_t first, int64_t tokens) {
    return HighwayOf(3, first, tokens, kValues, v1::HIGHWAY_DTYPE_F32);
  }

  // The whole step at once and without a server's memory: what everything else is compared with.
  static v1::ApplyRequest StepOf(const std::vector<Seq>& seqs, v1::Form form = v1::FORM_HIGHWAY) {
    v1::ApplyRequest request;
    request.set_form(form);
    int64_t tokens = 0;
    for (const Seq& seq : seqs) {
      AddSequence(request, seq);
      tokens += static_cast<int64_t>(seq.tokens.size());
    }
    for (const int layer : kLayers) {
      v1::LayerInput& input = *request.add_layers();
      input.set_layer_id(layer);
      if (form != v1::FORM_KV) input.set_highway(Highway(layer * 1000, tokens));
    }
    return request;
  }

  static std::string Highways(Rpc& rpc, const std::vector<Seq>& seqs) {
    const Answer answer = rpc.Apply(StepOf(seqs));
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
    std::string all;
    for (const v1::LayerOutput& layer : answer.response.layers()) all += layer.highway();
    return all;
  }

  // Returns the ticket; `reason` is the refusal's.
  std::string Prepare(const v1::PrepareRequest& request, std::string* reason = nullptr) {
    v1::PrepareResponse response;
    const grpc::Status status = Call(*rpc_, &v1::EngramService::Stub::Prepare, request, response);
    if (reason != nullptr) {
      *reason = ReasonOf(status);
    } else {
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
    return response.ticket();
  }

  static v1::PrepareRequest PrepareOf(const std::vector<Seq>& seqs, uint64_t step = 0) {
    v1::ApplyRequest sequences;
    for (const Seq& seq : seqs) AddSequence(sequences, seq);
    v1::PrepareRequest request;
    *request.mutable_sequences() = sequences.sequences();
    if (step > 0) {
      for (v1::Sequence& sequence : *request.mutable_sequences()) sequence.set_step(step);
    }
    for (const int layer : kLayers) request.add_layer_ids(layer);
    return request;
  }

  // One layer, as the worker comes to it; tokens [first, first + tokens) of the ticket.
  Answer ApplyLayer(Rpc& rpc, const std::string& ticket, int layer, int64_t first, int64_t tokens,
                    bool sliced = false) {
    v1::ApplyRequest request;
    request.set_ticket(ticket);
    v1::LayerInput& input = *request.add_layers();
    input.set_layer_id(layer);
    input.set_highway(Highway(layer * 1000 + first, tokens));
    if (sliced) {
      request.mutable_token_slice()->set_begin(first);
      request.mutable_token_slice()->set_end(first + tokens);
    }
    return rpc.Apply(request);
  }

  std::string LayerByLayer(const std::string& ticket, int64_t tokens) {
    std::string all;
    for (const int layer : kLayers) {
      const Answer answer = ApplyLayer(*rpc_, ticket, layer, 0, tokens);
      EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
      if (answer.response.layers_size() == 1) all += answer.response.layers(0).highway();
    }
    return all;
  }

  template <typename Request, typename Response>
  static grpc::Status Call(Rpc& rpc,
                           grpc::Status (v1::EngramService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                           Response*),
                           const Request& request, Response& response) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    return (rpc.stub().*method)(&context, request, &response);
  }

  static std::ptrdiff_t Pos(size_t n) { return static_cast<std::ptrdiff_t>(n); }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Rpc> rpc_;
};

Seq Named(std::string session, Seq seq) {
  seq.session = std::move(session);
  return seq;
}

// 1. Two sequences decode with three drafts each; one keeps one draft, the other none.
TEST_F(WorkerGuideTest, ADecodeStepWithDraftsRewindsToTheBitsOfAFreshRun) {
  Ids a = Text(40, 1), b = Text(40, 2);
  Prepare(PrepareOf({Named("a", Part(a, 0, 20)), Named("b", Part(b, 0, 9))}, 6));
  const auto decode = [&](int64_t a_at, int64_t b_at) {  // by session alone
    return std::vector<Seq>{{"a", a_at, Ids(a.begin() + a_at, a.begin() + a_at + 4), {}, {}},
                            {"b", b_at, Ids(b.begin() + b_at, b.begin() + b_at + 4), {}, {}}};
  };
  const v1::PrepareRequest step7 = PrepareOf(decode(20, 9), 7);
  const std::string ticket7 = Prepare(step7);
  EXPECT_EQ(LayerByLayer(ticket7, 8), Highways(*rpc_, {Part(a, 20, 24), Part(b, 9, 13)}));

  // Of a the token and its first draft stay; of b the token alone. The rest is other ids now.
  for (const size_t i : {22, 23, 24, 25}) a[i] = (a[i] + 1) % 512;
  for (const size_t i : {10, 11, 12, 13}) b[i] = (b[i] + 1) % 512;
  const std::string ticket8 = Prepare(PrepareOf(decode(22, 10), 8));
  EXPECT_EQ(LayerByLayer(ticket8, 8), Highways(*rpc_, {Part(a, 22, 26), Part(b, 10, 14)}));

  EXPECT_EQ(ApplyLayer(*rpc_, ticket7, 1, 0, 8).error.reason(), "TICKET_EXPIRED") << "its drafts were rejected";
  std::string reason;
  Prepare(step7, &reason);
  EXPECT_EQ(reason, "STALE_STEP") << "a late repetition of step 7 must not bring them back";
  EXPECT_EQ(LayerByLayer(ticket8, 8), Highways(*rpc_, {Part(a, 22, 26), Part(b, 10, 14)}));
}

// 2. The first 16 positions are in the worker's cache already; three of the last four of them are an image.
TEST_F(WorkerGuideTest, APrefixHitGoesOnByLookbackOrAsAFork) {
  const Ids text = Text(32, 3);
  std::vector<uint8_t> mask(32, 1);
  mask[12] = mask[13] = mask[14] = 0;
  std::string hit;
  const Seq tail = Part(text, 16, 32, mask);
  EXPECT_THAT(tail.lookback, ::testing::ElementsAre(text[15], -1, -1));
  hit = Highways(*rpc_, {tail});

  v1::ApplyRequest whole = StepOf({Part(text, 0, 32, mask)}, v1::FORM_KV);
  const Answer all = rpc_->Apply(whole);
  ASSERT_TRUE(all.status.ok()) << all.status.error_message();
  const Answer kv = rpc_->Apply(StepOf({tail}, v1::FORM_KV));
  for (int l = 0; l < 2; ++l)
    EXPECT_EQ(kv.response.layers(l).kv(), all.response.layers(l).kv().substr(16 * kOutputs * 2));

  Highways(*rpc_, {Named("first", Part(text, 0, 20, mask))});  // the parent goes on past the fork
  v1::ApplyRequest fork = StepOf({{"second", 16, tail.tokens, tail.mask, {}}});
  fork.mutable_sequences(0)->mutable_fork_from()->set_session("first");
  const Answer forked = rpc_->Apply(fork);
  ASSERT_TRUE(forked.status.ok()) << forked.status.error_message();
  EXPECT_EQ(forked.response.layers(0).highway() + forked.response.layers(1).highway(), hit);
}

// 3 and 6. A server that has never seen the sequence: the decode node's, a replica's, or the same one restarted.
TEST_F(WorkerGuideTest, AnotherServerGoesOnByLookbackAndThenByItsSession) {
  const Ids text = Text(24, 4);
  Highways(*rpc_, {Named("r", Part(text, 0, 20))});
  const std::string ticket = Prepare(PrepareOf({{"r", 20, {text[20]}, {}, {}}}));

  const std::unique_ptr<ServerProcess> other = Start();
  ASSERT_NE(other, nullptr);
  Rpc decode(other->tcp_address());
  ASSERT_EQ(decode.Model().config_digest(), rpc_->Model().config_digest());
  ASSERT_EQ(decode.Model().numerics_id(), rpc_->Model().numerics_id());
  const Seq by_session{"r", 20, {text[20]}, {}, {}};
  EXPECT_EQ(decode.Apply(StepOf({by_session})).error.reason(), "SESSION_LOST");
  EXPECT_EQ(ApplyLayer(decode, ticket, 1, 0, 1).error.reason(), "TICKET_EXPIRED");

  EXPECT_EQ(Highways(decode, {Named("r", Part(text, 20, 21))}), Highways(*rpc_, {by_session}));
  EXPECT_EQ(Highways(decode, {{"r", 21, {text[21]}, {}, {}}}), Highways(*rpc_, {{"r", 21, {text[21]}, {}, {}}}));
}

// 4. One rank prepares; four ranks, each on a connection of its own, fetch a part each.
TEST_F(WorkerGuideTest, RanksTakeSlicesThatTogetherAreOneCall) {
  const Seq seq = Part(Text(40, 5), 20, 32);
  constexpr int64_t kTokens = 12;
  constexpr int64_t kRanks = 4;
  const std::string ticket = Prepare(PrepareOf({seq}));
  const auto lookup = [&](Rpc& rpc, v1::Form form, int64_t begin, int64_t end) {
    v1::LookupRequest request;
    request.set_ticket(ticket);
    for (const int layer : kLayers) request.add_layer_ids(layer);
    request.set_form(form);
    request.mutable_slice()->set_begin(begin);
    request.mutable_slice()->set_end(end);
    v1::LookupResponse response;
    const grpc::Status status = Call(rpc, &v1::EngramService::Stub::Lookup, request, response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  // [tokens, all] from the ranks' [tokens, all / kRanks].
  const auto joined = [&](v1::Form form, int64_t all, size_t width) {
    std::vector<v1::LookupResponse> parts;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      Rpc rpc(server_->unix_address());
      parts.push_back(lookup(rpc, form, rank * all / kRanks, (rank + 1) * all / kRanks));
    }
    const size_t bytes = static_cast<size_t>(all / kRanks) * width;
    std::string whole;
    for (int l = 0; l < 2; ++l) {
      for (size_t t = 0; t < kTokens; ++t) {
        for (const v1::LookupResponse& part : parts) {
          const std::string& payload = form == v1::FORM_KV ? part.layers(l).kv() : part.layers(l).rows();
          EXPECT_EQ(payload.size(), kTokens * bytes);
          whole += payload.substr(t * bytes, bytes);
        }
      }
    }
    return whole;
  };
  const Answer kv = rpc_->Apply(StepOf({seq}, v1::FORM_KV));
  ASSERT_TRUE(kv.status.ok()) << kv.status.error_message();
  EXPECT_EQ(joined(v1::FORM_KV, kOutputs, 2), kv.response.layers(0).kv() + kv.response.layers(1).kv());
  const v1::LookupResponse rows = lookup(*rpc_, v1::FORM_ROWS_NATIVE, 0, kColumns);
  EXPECT_EQ(joined(v1::FORM_ROWS_NATIVE, kColumns, 84), rows.layers(0).rows() + rows.layers(1).rows());

  std::string by_tokens;
  for (const int layer : kLayers) {
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      Rpc rpc(server_->unix_address());
      const Answer part = ApplyLayer(rpc, ticket, layer, rank * kTokens / kRanks, kTokens / kRanks, true);
      ASSERT_TRUE(part.status.ok()) << part.status.error_message();
      by_tokens += part.response.layers(0).highway();
    }
  }
  EXPECT_EQ(by_tokens, Highways(*rpc_, {seq}));
}

// 4. A layer that was not prepared is looked up when it is asked for.
TEST_F(WorkerGuideTest, ATicketServesLayersThatWereNotPreparedToo) {
  const Seq seq = Part(Text(12, 6), 4, 12);
  v1::PrepareRequest request = PrepareOf({seq});
  request.clear_layer_ids();
  request.add_layer_ids(14);
  EXPECT_EQ(LayerByLayer(Prepare(request), 8), Highways(*rpc_, {seq}));
}

// 5. A batch of a graph's size: the rest of it is not sent, or masked; a negative id is nobody's padding.
TEST_F(WorkerGuideTest, PaddingIsLeftOutOrMaskedAndNeverNegative) {
  const Seq real = Part(Text(8, 7), 5, 8);
  const Seq pad{"", 0, {0, 0}, {0, 0}, {}};
  const Answer padded = rpc_->Apply(StepOf({real, pad}));
  ASSERT_TRUE(padded.status.ok()) << padded.status.error_message();
  const Answer alone = rpc_->Apply(StepOf({real}));
  for (int l = 0; l < 2; ++l) {
    EXPECT_EQ(padded.response.layers(l).highway(),
              alone.response.layers(l).highway() + Highway(kLayers[l] * 1000 + 3, 2))
        << "a masked token's highway comes back as it was";
  }
  EXPECT_EQ(rpc_->Apply(StepOf({real, {"", 0, {-1, -1}, {0, 0}, {}}})).error.reason(), "TOKEN_OUT_OF_RANGE");
}

// 5. What runs ahead of the layers may run in any order: layer 14's part may be fetched before layer 1 is applied.
TEST_F(WorkerGuideTest, ALaterLayersKvIsFetchedWhileAnEarlierOneIsStillToCome) {
  const Seq seq = Part(Text(8, 8), 4, 8);
  const std::string ticket = Prepare(PrepareOf({seq}));
  v1::LookupRequest ahead;
  ahead.set_ticket(ticket);
  ahead.add_layer_ids(14);
  ahead.set_form(v1::FORM_KV);
  v1::LookupResponse fetched;
  ASSERT_TRUE(Call(*rpc_, &v1::EngramService::Stub::Lookup, ahead, fetched).ok());
  EXPECT_EQ(fetched.layers(0).kv(), rpc_->Apply(StepOf({seq}, v1::FORM_KV)).response.layers(1).kv());
  EXPECT_EQ(LayerByLayer(ticket, 4), Highways(*rpc_, {seq}));
}

}  // namespace
}  // namespace engram::e2e
