// Every refusal of Apply, each by its reason, as any gRPC client sees it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kValues = 64 * 4;  // of tiny, per token

class ApplyRefusalsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto server = ServerProcess::Start(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf",
                                       {"--max-queue-tokens", "256", "--max-message-bytes", "128KiB",
                                        "--position-limit", "1000", "--max-batch-tokens", "64"});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = server->release();
    rpc_ = new Rpc(server_->unix_address());
  }
  static void TearDownTestSuite() {
    delete rpc_;
    delete server_;
  }

  // A good call of one layer; each test spoils one thing of it.
  static v1::ApplyRequest Good(const std::vector<Seq>& seqs) {
    v1::ApplyRequest request;
    int64_t tokens = 0;
    for (const Seq& seq : seqs) {
      AddSequence(request, seq);
      tokens += static_cast<int64_t>(seq.tokens.size());
    }
    v1::LayerInput& layer = *request.add_layers();
    layer.set_layer_id(1);
    layer.set_highway(HighwayOf(1, 0, tokens, kValues, v1::HIGHWAY_DTYPE_F32));
    return request;
  }

  static void ExpectRefused(const v1::ApplyRequest& request, grpc::StatusCode code, const std::string& reason,
                            const std::string& field, const std::string& value, const std::string& bound) {
    const Answer answer = rpc_->Apply(request);
    EXPECT_EQ(answer.status.error_code(), code) << answer.status.error_message();
    EXPECT_EQ(answer.error.reason(), reason) << answer.status.error_message();
    EXPECT_EQ(answer.error.domain(), "engram");
    EXPECT_EQ(answer.error.metadata().at("field"), field);
    EXPECT_EQ(answer.error.metadata().at("value"), value);
    EXPECT_EQ(answer.error.metadata().at("bound"), bound);
    EXPECT_THAT(answer.status.error_message(), HasSubstr(field));
    ASSERT_GE(answer.bad.field_violations_size(), 1);
    EXPECT_EQ(answer.bad.field_violations(0).field(), field);
  }

  static constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;

  static ServerProcess* server_;
  static Rpc* rpc_;
};

ServerProcess* ApplyRefusalsTest::server_ = nullptr;
Rpc* ApplyRefusalsTest::rpc_ = nullptr;

TEST_F(ApplyRefusalsTest, TheGoodCallPasses) {
  const Answer answer = rpc_->Apply(Good({{"", 0, {1, 2, 3}, {}, {}}}));
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_NE(answer.response.server_epoch(), 0);
  EXPECT_EQ(answer.response.server_epoch(), rpc_->Model().server_epoch());
}

TEST_F(ApplyRefusalsTest, TokenOutOfRange) {
  ExpectRefused(Good({{"", 0, {1, 512}, {}, {}}}), kInvalid, "TOKEN_OUT_OF_RANGE", "sequences[0].token_ids[1]", "512",
                "[0, 512)");
  ExpectRefused(Good({{"", 0, {-1, 5}, {}, {}}}), kInvalid, "TOKEN_OUT_OF_RANGE", "sequences[0].token_ids[0]", "-1",
                "[0, 512)");
}

TEST_F(ApplyRefusalsTest, AMaskedTokenMustBeATokenToo) {
  ExpectRefused(Good({{"", 0, {5, -2}, {1, 0}, {}}}), kInvalid, "TOKEN_OUT_OF_RANGE", "sequences[0].token_ids[1]", "-2",
                "[0, 512)");
}

TEST_F(ApplyRefusalsTest, EveryOffenderIsListedWithItsIndex) {
  const Answer answer =
      rpc_->Apply(Good({{"", 0, {600, 1}, {}, {}}, {"", 0, {1, 2, 700}, {1, 1}, {}}, {"", 0, {-9}, {}, {}}}));
  ASSERT_EQ(answer.bad.field_violations_size(), 4);
  EXPECT_EQ(answer.bad.field_violations(0).field(), "sequences[0].token_ids[0]");
  EXPECT_EQ(answer.bad.field_violations(1).field(), "sequences[1].token_mask");
  EXPECT_THAT(answer.bad.field_violations(1).description(), HasSubstr("TOKEN_MASK_LENGTH"));
  EXPECT_EQ(answer.bad.field_violations(2).field(), "sequences[1].token_ids[2]");
  EXPECT_EQ(answer.bad.field_violations(3).field(), "sequences[2].token_ids[0]");
  EXPECT_EQ(answer.error.metadata().at("offenders"), "4");
  EXPECT_EQ(answer.error.metadata().at("index"), "0");
}

// 64 offenders must fit the 8 KiB that a client takes as trailers by default: this client did not raise it.
TEST_F(ApplyRefusalsTest, SixtyFourOffendersFitAClientsDefaultTrailerLimit) {
  const Answer answer = rpc_->Apply(Good({{"", 0, std::vector<int32_t>(200, -1234567890), {}, {}}}));
  EXPECT_EQ(answer.status.error_code(), kInvalid) << answer.status.error_message();
  EXPECT_EQ(answer.error.metadata().at("offenders"), "200");
  EXPECT_EQ(answer.bad.field_violations_size(), 64);
}

TEST_F(ApplyRefusalsTest, TokenMaskLength) {
  ExpectRefused(Good({{"", 0, {1, 2, 3}, {1, 1}, {}}}), kInvalid, "TOKEN_MASK_LENGTH", "sequences[0].token_mask", "2",
                "3");
}

TEST_F(ApplyRefusalsTest, HighwaySize) {
  v1::ApplyRequest request = Good({{"", 0, {1, 2}, {}, {}}});
  request.mutable_layers(0)->mutable_highway()->pop_back();
  ExpectRefused(request, kInvalid, "HIGHWAY_SIZE", "layers[0].highway", "2047", "2048");
  request = Good({{"", 0, {1, 2}, {}, {}}});
  request.set_highway_dtype(v1::HIGHWAY_DTYPE_BF16);
  ExpectRefused(request, kInvalid, "HIGHWAY_SIZE", "layers[0].highway", "2048", "1024");
  request = Good({{"", 0, {1, 2}, {}, {}}});
  request.set_form(v1::FORM_KV);
  ExpectRefused(request, kInvalid, "HIGHWAY_SIZE", "layers[0].highway", "2048", "0");
}

TEST_F(ApplyRefusalsTest, LayerUnknown) {
  v1::ApplyRequest request = Good({{"", 0, {1}, {}, {}}});
  request.mutable_layers(0)->set_layer_id(2);
  ExpectRefused(request, kInvalid, "LAYER_UNKNOWN", "layers[0].layer_id", "2", "1, 14");
}

// Millions of empty messages fit few bytes: they must not be walked one by one.
TEST_F(ApplyRefusalsTest, SwarmsOfEmptySequencesAndLayersAreRefusedByTheirNumber) {
  v1::ApplyRequest request = Good({{"", 0, {1}, {}, {}}});
  for (int i = 0; i < 257; ++i) request.add_sequences();
  ExpectRefused(request, grpc::StatusCode::RESOURCE_EXHAUSTED, "TOO_MANY_TOKENS", "sequences", "258", "<= 256");
  request = Good({{"", 0, {1}, {}, {}}});
  for (int i = 0; i < 100'000; ++i) request.add_layers();
  ExpectRefused(request, kInvalid, "LAYER_UNKNOWN", "layers", "100001", "<= 2");
}

TEST_F(ApplyRefusalsTest, ALayerTwiceIsRefused) {
  v1::ApplyRequest request = Good({{"", 0, {1}, {}, {}}});
  *request.add_layers() = request.layers(0);
  ExpectRefused(request, kInvalid, "LAYER_UNKNOWN", "layers[1].layer_id", "1", "each layer once");
}

TEST_F(ApplyRefusalsTest, LookbackLength) {
  ExpectRefused(Good({{"", 9, {1}, {}, {4, 5}}}), kInvalid, "LOOKBACK_LENGTH", "sequences[0].lookback_token_ids", "2",
                "3");
  ExpectRefused(Good({{"", 9, {1}, {}, {}}}), kInvalid, "LOOKBACK_LENGTH", "sequences[0].lookback_token_ids", "0", "3");
}

TEST_F(ApplyRefusalsTest, LookbackIdsAreTokensOrMinusOne) {
  ExpectRefused(Good({{"", 9, {1}, {}, {4, 512, 5}}}), kInvalid, "TOKEN_OUT_OF_RANGE",
                "sequences[0].lookback_token_ids[1]", "512", "[0, 512)");
  ExpectRefused(Good({{"", 9, {1}, {}, {4, -2, 5}}}), kInvalid, "TOKEN_OUT_OF_RANGE",
                "sequences[0].lookback_token_ids[1]", "-2", "[0, 512)");
}

TEST_F(ApplyRefusalsTest, LookbackBeforeTheStartIsMinusOne) {
  ExpectRefused(Good({{"", 1, {1}, {}, {4, 7, -1}}}), kInvalid, "TOKEN_OUT_OF_RANGE",
                "sequences[0].lookback_token_ids[1]", "7", "-1");
}

TEST_F(ApplyRefusalsTest, TheLeastPositionDoesNotWrap) {
  ExpectRefused(Good({{"", INT64_MIN, {1}, {}, {4, 7, -1}}}), grpc::StatusCode::FAILED_PRECONDITION, "POSITION_GAP",
                "sequences[0].start_pos", "-9223372036854775808", ">= 0");
}

TEST_F(ApplyRefusalsTest, DuplicateSession) {
  ExpectRefused(Good({{"twin", 0, {1}, {}, {}}, {"twin", 0, {2}, {}, {}}}), kInvalid, "DUPLICATE_SESSION",
                "sequences[1].session", "4 bytes", "each session once");
}

TEST_F(ApplyRefusalsTest, SessionLength) {
  EXPECT_TRUE(rpc_->Apply(Good({{std::string(64, 's'), 0, {1}, {}, {}}})).status.ok());
  ExpectRefused(Good({{std::string(65, 's'), 0, {1}, {}, {}}}), kInvalid, "SESSION_LENGTH", "sequences[0].session",
                "65", "<= 64");
}

TEST_F(ApplyRefusalsTest, EmptyCall) {
  v1::ApplyRequest request;
  ExpectRefused(request, kInvalid, "EMPTY_CALL", "sequences", "0", ">= 1");
  ExpectRefused(Good({{"", 0, {1}, {}, {}}, {"", 0, {}, {}, {}}}), kInvalid, "EMPTY_CALL", "sequences[1].token_ids",
                "0", ">= 1");
  request = Good({{"", 0, {1}, {}, {}}});
  request.clear_layers();
  ExpectRefused(request, kInvalid, "EMPTY_CALL", "layers", "0", ">= 1");
}

TEST_F(ApplyRefusalsTest, UnknownEnumValuesAreRefusedByName) {
  v1::ApplyRequest request = Good({{"", 0, {1}, {}, {}}});
  request.set_form(static_cast<v1::Form>(77));
  ExpectRefused(request, kInvalid, "FORM", "form", "77",
                "FORM_HIGHWAY (1), FORM_KV (2), FORM_UPDATE (5), FORM_GATE (6)");
  request = Good({{"", 0, {1}, {}, {}}});
  request.set_highway_dtype(static_cast<v1::HighwayDtype>(9));
  ExpectRefused(request, kInvalid, "DTYPE", "highway_dtype", "9", "HIGHWAY_DTYPE_F32 (1) or HIGHWAY_DTYPE_BF16 (2)");
}

TEST_F(ApplyRefusalsTest, PositionGap) {
  ASSERT_TRUE(rpc_->Apply(Good({{"gap", 0, {1, 2}, {}, {}}})).status.ok());
  ExpectRefused(Good({{"gap", 3, {4}, {}, {}}}), grpc::StatusCode::FAILED_PRECONDITION, "POSITION_GAP",
                "sequences[0].start_pos", "3", "[0, 2]");
  ExpectRefused(Good({{"gap", -1, {4}, {}, {}}}), grpc::StatusCode::FAILED_PRECONDITION, "POSITION_GAP",
                "sequences[0].start_pos", "-1", ">= 0");
}

TEST_F(ApplyRefusalsTest, SessionLost) {
  ExpectRefused(Good({{"never seen", 3, {4}, {}, {}}}), grpc::StatusCode::NOT_FOUND, "SESSION_LOST",
                "sequences[0].start_pos", "3", "0");
}

TEST_F(ApplyRefusalsTest, OneOffenderRefusesTheCallAndTheOthersSessionIsUntouched) {
  ASSERT_TRUE(rpc_->Apply(Good({{"pair", 0, {1, 2}, {}, {}}})).status.ok());
  ExpectRefused(Good({{"pair", 2, {3}, {}, {}}, {"nobody", 4, {1}, {}, {}}}), grpc::StatusCode::NOT_FOUND,
                "SESSION_LOST", "sequences[1].start_pos", "4", "0");
  ExpectRefused(Good({{"pair", 3, {3}, {}, {}}}), grpc::StatusCode::FAILED_PRECONDITION, "POSITION_GAP",
                "sequences[0].start_pos", "3", "[0, 2]");
}

TEST_F(ApplyRefusalsTest, PositionLimit) {
  EXPECT_TRUE(rpc_->Apply(Good({{"", 998, {1, 2}, {}, {1, 2, 3}}})).status.ok());
  ExpectRefused(Good({{"", 999, {1, 2}, {}, {1, 2, 3}}}), grpc::StatusCode::OUT_OF_RANGE, "POSITION_LIMIT",
                "sequences[0].start_pos", "999", "<= 998");
  ExpectRefused(Good({{"", INT64_MAX, {1, 2}, {}, {1, 2, 3}}}), grpc::StatusCode::OUT_OF_RANGE, "POSITION_LIMIT",
                "sequences[0].start_pos", "9223372036854775807", "<= 998");
}

TEST_F(ApplyRefusalsTest, TooManyTokensIsPermanent) {
  const v1::ApplyRequest request = Good({{"", 0, std::vector<int32_t>(257, 1), {}, {}}});
  ExpectRefused(request, grpc::StatusCode::RESOURCE_EXHAUSTED, "TOO_MANY_TOKENS", "sequences", "257", "<= 256");
  const Answer answer = rpc_->Apply(request);
  EXPECT_EQ(answer.pushback, "-1");
  EXPECT_FALSE(answer.retry_info);
}

TEST_F(ApplyRefusalsTest, MessageBytesIsPermanent) {
  const v1::ApplyRequest request = Good({{"", 0, std::vector<int32_t>(129, 1), {}, {}}});
  ExpectRefused(request, grpc::StatusCode::RESOURCE_EXHAUSTED, "MESSAGE_BYTES", "layers", "132096", "<= 131072");
  EXPECT_EQ(rpc_->Apply(request).pushback, "-1");
  v1::ApplyRequest kv = Good({{"", 0, std::vector<int32_t>(205, 1), {}, {}}});  // 640 bytes a token
  kv.set_form(v1::FORM_KV);
  kv.mutable_layers(0)->clear_highway();
  ExpectRefused(kv, grpc::StatusCode::RESOURCE_EXHAUSTED, "MESSAGE_BYTES", "layers", "131200", "<= 131072");
}

TEST_F(ApplyRefusalsTest, DigestMismatch) {
  v1::ApplyRequest request = Good({{"", 0, {1}, {}, {}}});
  const std::string digest = rpc_->Model().config_digest();
  request.set_model_key(digest.substr(0, 16));
  EXPECT_TRUE(rpc_->Apply(request).status.ok());
  request.set_model_key(digest);
  EXPECT_TRUE(rpc_->Apply(request).status.ok());
  const std::string content = rpc_->Model().content_digest();
  ASSERT_EQ(content.size(), 32u) << "tables in memory";
  for (const std::string& key : {content, content.substr(0, 16)}) {
    request.set_model_key(key);
    EXPECT_TRUE(rpc_->Apply(request).status.ok());
  }
  for (const std::string& key : {std::string(16, 'x'), digest.substr(0, 15), digest + "x", content.substr(0, 15),
                                 digest.substr(0, 16) + content.substr(16)}) {
    request.set_model_key(key);
    const Answer answer = rpc_->Apply(request);
    EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_EQ(answer.error.reason(), "DIGEST_MISMATCH");
  }
}

// A message beyond what gRPC takes at all is its own RESOURCE_EXHAUSTED, and the server lives on.
TEST_F(ApplyRefusalsTest, AMessageBeyondTheTransportsLimitDoesNotHurt) {
  v1::ApplyRequest request = Good({{"", 0, {1}, {}, {}}});
  request.mutable_layers(0)->set_highway(std::string(4 << 20, 'x'));
  EXPECT_EQ(rpc_->Apply(request).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(rpc_->Apply(Good({{"", 0, {1}, {}, {}}})).status.ok());
}

}  // namespace
}  // namespace engram::e2e
