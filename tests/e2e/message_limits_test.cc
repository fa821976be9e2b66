// What fits a message follows from the model and the server's flags: GetModel says it, and refusals name it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

using ::testing::HasSubstr;

// Its columns and row bytes are those of the released model, 24 of 84; its dim is small.
const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";
constexpr size_t kRowsPerToken = 24 * 84;
constexpr size_t kHighwayPerToken = 64 * 4 * 4;

class MessageLimitsTest : public ::testing::Test {
 protected:
  void Start(const std::vector<std::string>& args) {
    auto server = ServerProcess::Start(kTiny, args);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    rpc_ = std::make_unique<Rpc>(server_->unix_address());
    model_ = rpc_->Model();
    ASSERT_EQ(model_.layers_size(), 2);
  }

  // Rows of both layers for tokens [first, first + count) of one long sequence.
  static v1::LookupRequest RowsOf(int64_t first, int64_t count) {
    v1::LookupRequest request;
    request.add_layer_ids(1);
    request.add_layer_ids(14);
    v1::Sequence& sequence = *request.add_sequences();
    sequence.set_start_pos(first);
    for (int64_t t = first; t < first + count; ++t) sequence.add_token_ids(TokenAt(t));
    for (int64_t t = first - 1; first > 0 && t >= first - 3; --t) sequence.add_lookback_token_ids(TokenAt(t));
    return request;
  }

  static int32_t TokenAt(int64_t pos) { return static_cast<int32_t>((pos * 37 + pos / 512) % 512); }

  grpc::Status Lookup(const v1::LookupRequest& request, v1::LookupResponse& response) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return rpc_->stub().Lookup(&context, request, &response);
  }

  static v1::ApplyRequest HighwayOfBytes(size_t bytes) {
    v1::ApplyRequest request;
    v1::Sequence& sequence = *request.add_sequences();
    for (size_t t = 0; t < bytes / kHighwayPerToken; ++t) sequence.add_token_ids(1);
    v1::LayerInput& layer = *request.add_layers();
    layer.set_layer_id(1);
    layer.set_highway(std::string(bytes, '\0'));
    return request;
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Rpc> rpc_;
  v1::GetModelResponse model_;
};

// 33 MB, eight times what gRPC takes where nobody says otherwise.
TEST_F(MessageLimitsTest, NativeRowsOf8192TokensAreOneMessage) {
  Start({});
  v1::LookupResponse whole;
  const grpc::Status status = Lookup(RowsOf(0, 8192), whole);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(whole.layers_size(), 2);
  EXPECT_EQ(whole.layers(0).rows().size() + whole.layers(1).rows().size(), 33'030'144);
  v1::LookupResponse part;
  for (const int64_t first : {int64_t{0}, int64_t{4096}, int64_t{8191}}) {
    const int64_t count = std::min<int64_t>(8192 - first, 4096);
    ASSERT_TRUE(Lookup(RowsOf(first, count), part).ok());
    for (int l = 0; l < 2; ++l) {
      EXPECT_TRUE(part.layers(l).rows() == whole.layers(l).rows().substr(static_cast<size_t>(first) * kRowsPerToken,
                                                                         static_cast<size_t>(count) * kRowsPerToken))
          << "layer " << l << ", tokens from " << first;
    }
  }
}

// The last call that fits and the first that does not, by what GetModel says.
TEST_F(MessageLimitsTest, WhatGetModelSaysIsWhatFits) {
  Start({"--max-message-bytes", "1MiB"});
  const int64_t most = model_.limits().max_message_bytes();
  ASSERT_EQ(most, 1 << 20);
  int64_t row_bytes = 0;
  for (const v1::FormCost& cost : model_.form_costs()) {
    if (cost.form() == v1::FORM_ROWS_NATIVE) row_bytes = cost.reply_bytes();
  }
  ASSERT_EQ(row_bytes, kRowsPerToken);
  const int64_t fit = most / (2 * row_bytes);
  v1::LookupResponse response;
  EXPECT_TRUE(Lookup(RowsOf(0, fit), response).ok());
  const grpc::Status beyond = Lookup(RowsOf(0, fit + 1), response);
  EXPECT_EQ(beyond.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(beyond), "MESSAGE_BYTES");
  EXPECT_THAT(beyond.error_message(), HasSubstr(std::to_string((fit + 1) * 2 * row_bytes)));
  EXPECT_THAT(beyond.error_message(), HasSubstr("1048576"));
}

TEST_F(MessageLimitsTest, AHighwayBeyondTheLimitIsRefusedByName) {
  Start({"--max-message-bytes", "1MiB"});
  EXPECT_TRUE(rpc_->Apply(HighwayOfBytes(1 << 20)).status.ok());
  const Answer beyond = rpc_->Apply(HighwayOfBytes((1 << 20) + kHighwayPerToken));
  EXPECT_EQ(beyond.error.reason(), "MESSAGE_BYTES");
  EXPECT_EQ(beyond.error.metadata().at("value"), "1049600");
  EXPECT_EQ(beyond.error.metadata().at("bound"), "<= 1048576");
  EXPECT_EQ(beyond.pushback, "-1");
}

// An Apply of that many MiB of zeros, which this side holds but once.
grpc::Status SendMebibytes(Rpc& rpc, size_t count) {
  const std::string zeros(1 << 20, '\0');
  const std::vector<grpc::Slice> slices(count, grpc::Slice(zeros));
  const grpc::ByteBuffer request(slices.data(), slices.size());
  return RawStatus(rpc.channel(), "/engram.v1.EngramService/Apply", request);
}

TEST_F(MessageLimitsTest, AMessageBeyondGrpcsLimitIsRefusedInGrpcsWords) {
  Start({});
  const grpc::Status status = SendMebibytes(*rpc_, 66);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("Received message larger than max (69206016 vs. 68157440)"));
  EXPECT_TRUE(rpc_->Apply(HighwayOfBytes(kHighwayPerToken)).status.ok());
}

// gRPC holds a message in full before it looks at its length: what is arriving has a bound of its own.
TEST_F(MessageLimitsTest, AHugeMessageIsNotHeldBeforeItIsRefused) {
  Start({"--max-queue-bytes", "64MiB"});
  const int64_t before = MemoryMebibytes(server_->pid(), "VmHWM:");
  ASSERT_GT(before, 0);
  EXPECT_EQ(SendMebibytes(*rpc_, 1024).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_LT(MemoryMebibytes(server_->pid(), "VmHWM:") - before, 640);
  EXPECT_TRUE(rpc_->Apply(HighwayOfBytes(kHighwayPerToken)).status.ok()) << "and it goes on";
}

}  // namespace
}  // namespace engram::e2e
