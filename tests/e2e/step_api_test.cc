// The step API beyond Apply's first forms: update and gate, prepared results, look-ups, sessions' finer rules, partial
// calls; through a real server, with the stub that protoc made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "server/model/engram_model.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";
constexpr int64_t kDim = 64;
constexpr int64_t kCopies = 4;
constexpr int64_t kValues = kDim * kCopies;
constexpr int64_t kColumns = 24;

class StepApiTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ServerProcess::Start(kTiny, {"--max-batch-tokens", "8", "--ticket-ttl-ms", "60000"});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    rpc_ = std::make_unique<Rpc>(server_->unix_address());
    ASSERT_EQ(rpc_->Model().layers_size(), 2);
  }

  static std::vector<int32_t> Tokens(int64_t count, int32_t seed = 3) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((i * 37 + seed * 101) % 512));
    return tokens;
  }

  // An Apply of both layers; the highway is that of tokens numbered from `first`.
  static v1::ApplyRequest ApplyOf(const std::vector<Seq>& seqs, int64_t tokens, v1::Form form,
                                  v1::HighwayDtype dtype = v1::HIGHWAY_DTYPE_F32, int64_t first = 0) {
    v1::ApplyRequest request;
    request.set_form(form);
    request.set_highway_dtype(dtype);
    for (const Seq& seq : seqs) AddSequence(request, seq);
    for (const int32_t layer : {1, 14}) {
      v1::LayerInput& input = *request.add_layers();
      input.set_layer_id(layer);
      if (form != v1::FORM_KV) input.set_highway(HighwayOf(5, first, tokens, kValues, dtype));
    }
    return request;
  }

  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (v1::EngramService::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response& response, std::string* reason = nullptr) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    const grpc::Status status = (rpc_->stub().*method)(&context, request, &response);
    if (reason != nullptr) *reason = ReasonOf(status);
    return status;
  }

  v1::PrepareResponse Prepare(const std::vector<Seq>& seqs, bool values = false) {
    v1::PrepareRequest request;
    for (const Seq& seq : seqs) {
      v1::ApplyRequest apply;
      AddSequence(apply, seq);
      *request.add_sequences() = apply.sequences(0);
    }
    for (const int32_t layer : {1, 14}) request.add_layer_ids(layer);
    request.set_return_values(values);
    v1::PrepareResponse response;
    const grpc::Status status = Call(&v1::EngramService::Stub::Prepare, request, response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.ticket().size(), 24);
    return response;
  }

  v1::LookupResponse Lookup(const v1::LookupRequest& request, std::string* reason = nullptr) {
    v1::LookupResponse response;
    const grpc::Status status = Call(&v1::EngramService::Stub::Lookup, request, response, reason);
    if (reason == nullptr) {
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
    return response;
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Rpc> rpc_;
};

float F32(const std::string& bytes, size_t index) {
  float value = 0;
  std::memcpy(&value, bytes.data() + index * 4, 4);
  return value;
}

float Bf16(const std::string& bytes, size_t index) {
  uint16_t half = 0;
  std::memcpy(&half, bytes.data() + index * 2, 2);
  const uint32_t word = uint32_t{half} << 16;
  float value = 0;
  std::memcpy(&value, &word, 4);
  return value;
}

void PutRounded(float value, bool bf16, std::string& out) {
  uint32_t word = 0;
  std::memcpy(&word, &value, 4);
  if (!bf16) {
    out.append(reinterpret_cast<const char*>(&word), 4);
    return;
  }
  const auto half =
      static_cast<uint16_t>(std::isnan(value) ? (word >> 16) | 0x40 : (word + 0x7fff + (word >> 16 & 1)) >> 16);
  out.append(reinterpret_cast<const char*>(&half), 2);
}

// The worker's part of FORM_UPDATE, as the proto says it.
std::string Update(const std::string& highway, const std::string& gates, const std::string& value, bool bf16,
                   const std::vector<uint8_t>& mask) {
  std::string out;
  const size_t width = bf16 ? 2 : 4;
  const size_t tokens = gates.size() / (4 * kCopies);
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t c = 0; c < kCopies; ++c) {
      for (size_t i = 0; i < kDim; ++i) {
        const size_t at = (t * kCopies + c) * kDim + i;
        if (!mask.empty() && mask[t] == 0) {
          out.append(highway, at * width, width);
          continue;
        }
        const volatile float step = F32(gates, t * kCopies + c) * Bf16(value, t * kDim + i);
        const float h = bf16 ? Bf16(highway, at) : F32(highway, at);
        PutRounded(h + step, bf16, out);
      }
    }
  }
  return out;
}

TEST_F(StepApiTest, UpdateAndTheWorkersAdditionAreTheBitsOfHighway) {
  for (const auto dtype : {v1::HIGHWAY_DTYPE_F32, v1::HIGHWAY_DTYPE_BF16}) {
    const Seq seq{"", 0, Tokens(21), std::vector<uint8_t>(21, 1), {}};
    Seq masked = seq;
    masked.mask[4] = masked.mask[20] = 0;
    v1::ApplyRequest request = ApplyOf({masked}, 21, v1::FORM_HIGHWAY, dtype);
    // A minus zero everywhere in a masked token, and in a live one.
    const size_t width = dtype == v1::HIGHWAY_DTYPE_BF16 ? 2 : 4;
    for (const size_t token : {4u, 5u}) {
      for (size_t i = 0; i < kValues; ++i) {
        (*request.mutable_layers(0)->mutable_highway())[(token * kValues + i) * width + width - 1] = '\x80';
      }
    }
    const Answer highway = rpc_->Apply(request);
    request.set_form(v1::FORM_UPDATE);
    const Answer update = rpc_->Apply(request);
    request.set_form(v1::FORM_GATE);
    const Answer gate = rpc_->Apply(request);
    ASSERT_TRUE(highway.status.ok() && update.status.ok() && gate.status.ok()) << update.status.error_message();
    for (int l = 0; l < 2; ++l) {
      const v1::LayerOutput& got = update.response.layers(l);
      EXPECT_EQ(Update(request.layers(l).highway(), got.gates(), got.value(), width == 2, masked.mask),
                highway.response.layers(l).highway());
      EXPECT_EQ(gate.response.layers(l).gates(), got.gates());
      EXPECT_EQ(got.gates().substr(4 * 16, 16), std::string(16, '\0')) << "a masked token's gates are 0";
      EXPECT_TRUE(gate.response.layers(l).value().empty());
    }
  }
}

TEST_F(StepApiTest, APreparedApplyIsTheBitsOfAnUnpreparedOneInEveryFormAndSlice) {
  const Seq seq{"", 50, Tokens(19), {}, {7, -1, 9}};
  const v1::PrepareResponse prepared = Prepare({seq}, true);
  for (const auto form : {v1::FORM_HIGHWAY, v1::FORM_UPDATE, v1::FORM_GATE, v1::FORM_KV}) {
    const v1::ApplyRequest request = ApplyOf({seq}, 19, form);
    const Answer direct = rpc_->Apply(request);
    ASSERT_TRUE(direct.status.ok()) << direct.status.error_message();
    v1::ApplyRequest by_ticket = request;
    by_ticket.clear_sequences();
    by_ticket.set_ticket(prepared.ticket());
    const Answer whole = rpc_->Apply(by_ticket);
    ASSERT_TRUE(whole.status.ok()) << whole.status.error_message();
    EXPECT_EQ(whole.response.SerializeAsString(), direct.response.SerializeAsString());

    v1::ApplyRequest part = ApplyOf({}, 6, form, v1::HIGHWAY_DTYPE_F32, 8);
    part.set_ticket(prepared.ticket());
    part.mutable_token_slice()->set_begin(8);
    part.mutable_token_slice()->set_end(14);
    const Answer sliced = rpc_->Apply(part);
    ASSERT_TRUE(sliced.status.ok()) << sliced.status.error_message();
    for (int l = 0; l < 2; ++l) {
      const auto cut = [](const std::string& all, size_t per_token) {
        return all.substr(8 * per_token, 6 * per_token);
      };
      const v1::LayerOutput& all = direct.response.layers(l);
      const v1::LayerOutput& some = sliced.response.layers(l);
      if (form == v1::FORM_HIGHWAY) {
        EXPECT_EQ(some.highway(), cut(all.highway(), kValues * 4));
      }
      if (form == v1::FORM_KV) {
        EXPECT_EQ(some.kv(), cut(all.kv(), kDim * 5 * 2));
      }
      if (form == v1::FORM_UPDATE) {
        EXPECT_EQ(some.value(), cut(all.value(), kDim * 2));
        EXPECT_EQ(prepared.layers(l).value(), all.value()) << "the value that came with Prepare";
      }
    }
  }
}

TEST_F(StepApiTest, LookupGivesTheFilesRowsAndTheirDecodingAndKv) {
  const auto model = EngramModel::Load(kTiny, {});
  ASSERT_TRUE(model.ok());
  const Seq seq{"", 0, Tokens(11), {}, {}};
  v1::ApplyRequest apply;
  AddSequence(apply, seq);
  v1::LookupRequest by_tokens;
  *by_tokens.add_sequences() = apply.sequences(0);
  by_tokens.add_layer_ids(14);
  const std::string native = Lookup(by_tokens).layers(0).rows();
  ASSERT_EQ(native.size(), 11 * kColumns * 84);

  // By row ids: found by searching the table, so that nothing of the hash is taken on trust twice.
  const kernels::TableView& table = (*model)->layers()[1].table;
  v1::LookupRequest by_rows;
  by_rows.add_layer_ids(14);
  for (size_t r = 0; r < 11 * kColumns; ++r) {
    int32_t id = -1;
    for (int64_t row = 0; row < table.rows && id < 0; ++row) {
      if (std::memcmp(table.bytes + row * 84, native.data() + r * 84, 84) == 0) id = static_cast<int32_t>(row);
    }
    ASSERT_GE(id, 0) << "row " << r << " is not in the file";
    by_rows.add_row_ids(id);
  }
  EXPECT_EQ(Lookup(by_rows).layers(0).rows(), native);

  by_tokens.set_form(v1::FORM_ROWS_BF16);
  const std::string decoded = Lookup(by_tokens).layers(0).rows();
  std::string expected;
  for (size_t r = 0; r < 11 * kColumns; ++r) {
    float row[kernels::kRowValues];
    kernels::DecodeQ2K(reinterpret_cast<const uint8_t*>(native.data()) + r * 84, row);
    for (const float value : row) PutRounded(value, true, expected);
  }
  EXPECT_EQ(decoded, expected);

  // Columns [5, 9): what a tensor-parallel rank fetches.
  by_tokens.mutable_slice()->set_begin(5);
  by_tokens.mutable_slice()->set_end(9);
  const std::string columns = Lookup(by_tokens).layers(0).rows();
  std::string cut;
  for (size_t t = 0; t < 11; ++t) cut += decoded.substr((t * kColumns + 5) * 512, 4 * 512);
  EXPECT_EQ(columns, cut);

  by_tokens.clear_slice();
  by_tokens.set_form(v1::FORM_KV);
  const std::string kv = Lookup(by_tokens).layers(0).kv();
  const Answer direct = rpc_->Apply(ApplyOf({seq}, 11, v1::FORM_KV));
  EXPECT_EQ(kv, direct.response.layers(1).kv());
  by_rows.set_form(v1::FORM_KV);
  EXPECT_EQ(Lookup(by_rows).layers(0).kv(), kv);
  by_tokens.mutable_slice()->set_begin(100);
  by_tokens.mutable_slice()->set_end(130);
  std::string outputs;
  for (size_t t = 0; t < 11; ++t) outputs += kv.substr((t * 320 + 100) * 2, 60);
  EXPECT_EQ(Lookup(by_tokens).layers(0).kv(), outputs);

  by_rows.set_form(v1::FORM_ROWS_NATIVE);
  by_rows.set_row_ids(3, -1);
  EXPECT_EQ(Lookup(by_rows).layers(0).rows().substr(3 * 84, 84), std::string(84, '\0')) << "-1 is a row of zeros";
}

TEST_F(StepApiTest, LookupRefusesByName) {
  const auto reason = [this](auto spoil) {
    v1::LookupRequest request;
    request.add_sequences()->add_token_ids(1);
    request.add_layer_ids(1);
    spoil(request);
    std::string got;
    Lookup(request, &got);
    return got;
  };
  EXPECT_EQ(reason([](v1::LookupRequest& r) { r.set_form(v1::FORM_HIGHWAY); }), "FORM");
  EXPECT_EQ(reason([](v1::LookupRequest& r) { r.set_form(static_cast<v1::Form>(99)); }), "FORM");
  EXPECT_EQ(reason([](v1::LookupRequest& r) { r.mutable_slice()->set_end(25); }), "SLICE");
  EXPECT_EQ(reason([](v1::LookupRequest& r) { r.mutable_slice(); }), "SLICE");
  EXPECT_EQ(reason([](v1::LookupRequest& r) { r.set_ticket("x"); }), "FORM");
  EXPECT_EQ(reason([](v1::LookupRequest& r) { r.clear_layer_ids(); }), "EMPTY_CALL");
  EXPECT_EQ(reason([](v1::LookupRequest& r) { r.clear_sequences(); }), "EMPTY_CALL");
  EXPECT_EQ(reason([](v1::LookupRequest& r) {
              r.clear_sequences();
              for (int i = 0; i < 24; ++i) r.add_row_ids(i == 7 ? 6660 : 0);
            }),
            "ROW_OUT_OF_RANGE");
  EXPECT_EQ(reason([](v1::LookupRequest& r) {
              r.clear_sequences();
              for (int i = 0; i < 23; ++i) r.add_row_ids(0);
            }),
            "ROW_OUT_OF_RANGE");
}

TEST_F(StepApiTest, ATicketEndsWithItsReleaseItsSessionOrARollbackBelowIt) {
  const auto use = [this](const std::string& ticket) {
    v1::ApplyRequest request = ApplyOf({}, 2, v1::FORM_GATE);
    request.set_ticket(ticket);
    const Answer answer = rpc_->Apply(request);
    return answer.status.ok() ? std::string("OK") : answer.error.reason();
  };
  const auto decode = [this](const std::string& session, int64_t start, std::vector<int32_t> tokens) {
    const auto count = static_cast<int64_t>(tokens.size());
    return rpc_->Apply(ApplyOf({{session, start, std::move(tokens), {}, {}}}, count, v1::FORM_KV)).status;
  };

  const std::string released = Prepare({{"", 0, {1, 2}, {}, {}}}).ticket();
  EXPECT_EQ(use(released), "OK");
  EXPECT_EQ(use(released), "OK") << "any number of times";
  v1::ReleaseRequest release;
  release.add_tickets(released);
  release.add_tickets("nonsense");
  v1::ReleaseResponse gone;
  ASSERT_TRUE(Call(&v1::EngramService::Stub::Release, release, gone).ok());
  EXPECT_EQ(gone.released(), 1);
  EXPECT_EQ(use(released), "TICKET_EXPIRED");

  ASSERT_TRUE(decode("s", 0, {5, 6, 7}).ok());
  const std::string ahead = Prepare({{"s", 3, {8, 9}, {}, {}}}).ticket();
  ASSERT_TRUE(decode("s", 3, {8, 9}).ok()) << "the same ids again are no rollback";
  EXPECT_EQ(use(ahead), "OK");
  ASSERT_TRUE(decode("s", 4, {10}).ok());
  EXPECT_EQ(use(ahead), "TICKET_EXPIRED") << "position 4 is another token now";

  const std::string of_session = Prepare({{"s", 5, {1, 2}, {}, {}}}).ticket();
  v1::CloseSessionsRequest close;
  close.add_sessions("s");
  close.add_sessions("never seen");
  v1::CloseSessionsResponse closed;
  ASSERT_TRUE(Call(&v1::EngramService::Stub::CloseSessions, close, closed).ok());
  EXPECT_EQ(closed.closed(), 1);
  EXPECT_EQ(use(of_session), "TICKET_EXPIRED");
  EXPECT_EQ(decode("s", 7, {1}).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(StepApiTest, AForkContinuesTheParentsHistory) {
  const auto kv = [this](Seq seq, const std::string& parent) {
    v1::ApplyRequest request = ApplyOf({seq}, static_cast<int64_t>(seq.tokens.size()), v1::FORM_KV);
    if (!parent.empty()) request.mutable_sequences(0)->mutable_fork_from()->set_session(parent);
    const Answer answer = rpc_->Apply(request);
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
    return answer.response.layers_size() == 0 ? std::string() : answer.response.layers(1).kv();
  };
  kv({"parent", 0, Tokens(10), {}, {}}, "");
  const std::string forked = kv({"child", 8, {100, 101}, {}, {}}, "parent");
  const std::vector<int32_t> t = Tokens(10);
  EXPECT_EQ(forked, kv({"", 8, {100, 101}, {}, {t[7], t[6], t[5]}}, ""));
  EXPECT_EQ(kv({"parent", 10, {4}, {}, {}}, ""), kv({"", 10, {4}, {}, {t[9], t[8], t[7]}}, "")) << "the parent goes on";
}

TEST_F(StepApiTest, AReorderedStepDoesNotBringRejectedDraftsBack) {
  const auto at_step = [this](uint64_t step, int64_t start, int32_t token) {
    v1::ApplyRequest request = ApplyOf({{"s", start, {token}, {}, {}}}, 1, v1::FORM_KV);
    request.mutable_sequences(0)->set_step(step);
    const Answer answer = rpc_->Apply(request);
    return answer.status.ok() ? std::string("OK") : answer.error.reason();
  };
  EXPECT_EQ(at_step(5, 0, 1), "OK");
  EXPECT_EQ(at_step(6, 1, 2), "OK");
  EXPECT_EQ(at_step(6, 1, 2), "OK") << "equal is a retry";
  EXPECT_EQ(at_step(5, 1, 9), "STALE_STEP");
  EXPECT_EQ(at_step(7, 2, 3), "OK");
}

TEST_F(StepApiTest, PartialCallsServeWhatTheyCanAndTellOfTheRest) {
  const Seq good{"", 0, Tokens(3), {}, {}}, bad_token{"", 0, {1, 9999}, {}, {}}, lost{"nobody", 5, {1, 2, 3}, {}, {}},
      last{"", 0, Tokens(4, 8), {}, {}};
  v1::ApplyRequest request = ApplyOf({good, bad_token, lost, last}, 12, v1::FORM_UPDATE);
  EXPECT_EQ(rpc_->Apply(request).error.reason(), "TOKEN_OUT_OF_RANGE");
  request.set_partial_ok(true);
  const Answer partial = rpc_->Apply(request);
  ASSERT_TRUE(partial.status.ok()) << partial.status.error_message();
  ASSERT_EQ(partial.response.sequences_size(), 4);
  EXPECT_FALSE(partial.response.sequences(0).has_refused());
  EXPECT_EQ(partial.response.sequences(1).refused().code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(partial.response.sequences(2).refused().code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(partial.response.sequences(2).refused().message(), ::testing::HasSubstr("sequences[2]"));
  EXPECT_FALSE(partial.response.sequences(3).has_refused());

  v1::ApplyRequest first = ApplyOf({good}, 3, v1::FORM_UPDATE);
  v1::ApplyRequest fourth = ApplyOf({last}, 4, v1::FORM_UPDATE, v1::HIGHWAY_DTYPE_F32, 8);
  const Answer a = rpc_->Apply(first), b = rpc_->Apply(fourth);
  for (int l = 0; l < 2; ++l) {
    EXPECT_EQ(partial.response.layers(l).gates(), a.response.layers(l).gates() + b.response.layers(l).gates());
    EXPECT_EQ(partial.response.layers(l).value(), a.response.layers(l).value() + b.response.layers(l).value());
  }
}

}  // namespace
}  // namespace engram::e2e
