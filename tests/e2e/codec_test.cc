// What arrives as bytes: messages that are none, messages made to cost memory, and memory after many of them.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/metrics_text.h"
#include "tests/e2e/process.h"
#include "tests/e2e/rpc.h"

namespace engram::e2e {
namespace {

using ::testing::HasSubstr;

const std::string kTiny = std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf";
constexpr int64_t kValues = 256;

class CodecTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = ServerProcess::Start(kTiny);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    rpc_ = std::make_unique<Rpc>(server_->unix_address());
    ASSERT_GT(rpc_->Model().layers_size(), 0);
  }

  grpc::Status Send(const std::string& method, const grpc::ByteBuffer& request) {
    return RawStatus(rpc_->channel(), "/engram.v1.EngramService/" + method, request);
  }
  grpc::Status Send(const std::string& method, const std::string& request) {
    const grpc::Slice slice(request);
    return Send(method, grpc::ByteBuffer(&slice, 1));
  }

  v1::ApplyRequest HighwayOfTokens(int64_t tokens) {
    v1::ApplyRequest request;
    v1::Sequence& sequence = *request.add_sequences();
    for (int64_t t = 0; t < tokens; ++t) sequence.add_token_ids(static_cast<int32_t>(t % 512));
    v1::LayerInput& layer = *request.add_layers();
    layer.set_layer_id(1);
    layer.set_highway(HighwayOf(1, 0, tokens, kValues, v1::HIGHWAY_DTYPE_F32));
    return request;
  }

  std::unique_ptr<ServerProcess> server_;
  std::unique_ptr<Rpc> rpc_;
};

TEST_F(CodecTest, BytesThatAreNoMessageAreRefusedByName) {
  for (const char* method : {"GetModel", "Apply", "Prepare", "Lookup", "Release", "CloseSessions"}) {
    const grpc::Status status = Send(method, "\x0a\x7fno");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method << ": " << status.error_message();
    EXPECT_EQ(ReasonOf(status), "MALFORMED") << method;
    EXPECT_THAT(status.error_message(), HasSubstr(std::string("the message is no ") + method + "Request")) << method;
  }
}

// Generated code takes it for the client's half-close and ends the stream with OK.
TEST_F(CodecTest, AStreamEndsWithTheReasonWhereAMessageIsNone) {
  grpc::GenericStub stub(rpc_->channel());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  grpc::CompletionQueue queue;
  const auto next = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto stream = stub.PrepareCall(&context, "/engram.v1.EngramService/Stream", &queue);
  stream->StartCall(nullptr);
  ASSERT_TRUE(next());

  v1::StreamRequest good;
  good.set_request_id(7);
  *good.mutable_apply() = HighwayOfTokens(3);
  const std::string bytes = good.SerializeAsString();
  const grpc::Slice first(bytes);
  stream->Write(grpc::ByteBuffer(&first, 1), nullptr);
  ASSERT_TRUE(next());
  const grpc::Slice second(std::string("\x12\x7fno"));
  stream->Write(grpc::ByteBuffer(&second, 1), nullptr);
  ASSERT_TRUE(next());

  grpc::ByteBuffer reply;
  stream->Read(&reply, nullptr);
  ASSERT_TRUE(next()) << "what came before it is answered";
  grpc::Slice whole;
  ASSERT_TRUE(reply.DumpToSingleSlice(&whole).ok());
  v1::StreamResponse response;
  ASSERT_TRUE(response.ParseFromArray(whole.begin(), static_cast<int>(whole.size())));
  EXPECT_EQ(response.request_id(), 7);
  EXPECT_TRUE(response.has_layer());
  stream->Read(&reply, nullptr);
  EXPECT_FALSE(next());
  grpc::Status status;
  stream->Finish(&status, nullptr);
  ASSERT_TRUE(next());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOf(status), "MALFORMED");
}

// Two bytes each on the wire, more than a hundred each once parsed.
TEST_F(CodecTest, AMessageCostsAboutItsOwnSizeInMemory) {
  const int64_t before = MemoryMebibytes(server_->pid(), "VmHWM:");
  std::string sequences, unknown;
  for (int i = 0; i < 8 << 20; ++i) sequences.append("\x0a\x00", 2);
  for (int i = 0; i < 400'000; ++i) unknown.append("\xb8\x3e\x01\x18\x01", 5);  // field 999, and `form` again and again
  const grpc::Status many = Send("Apply", sequences);
  EXPECT_EQ(many.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(many), "MESSAGE_BYTES");
  EXPECT_EQ(ReasonOf(Send("Apply", sequences.substr(0, 2 << 19))), "TOO_MANY_TOKENS");
  EXPECT_EQ(ReasonOf(Send("Apply", unknown)), "EMPTY_CALL");
  EXPECT_LT(MemoryMebibytes(server_->pid(), "VmHWM:") - before, 160) << "for messages of 16 MiB";
}

// Counted as a client's empty call, it would send an operator after a fault that is none.
TEST_F(CodecTest, ACallThatEndsBeforeItsMessageComesIsNoRefusal) {
  const v1::ApplyRequest request = HighwayOfTokens(2000);
  int late = 0;
  for (int round = 0; round < 400; ++round) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::microseconds(100 + round * 5));
    v1::ApplyResponse response;
    late += rpc_->stub().Apply(&context, request, &response).ok() ? 0 : 1;
  }
  EXPECT_GT(late, 50);
  EXPECT_TRUE(rpc_->Apply(HighwayOfTokens(1)).status.ok());
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/metrics"), ::testing::Not(HasSubstr("engram_rejected_total{")));
}

TEST_F(CodecTest, MemoryDoesNotGrowOnceTheLoadIsKnown) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer keeps what was freed";
#endif
  const v1::ApplyRequest small = HighwayOfTokens(1);
  const v1::ApplyRequest middle = HighwayOfTokens(1000);
  const v1::ApplyRequest large = HighwayOfTokens(8000);
  const auto round = [&] {
    for (int i = 0; i < 10; ++i) ASSERT_TRUE(rpc_->Apply(small).status.ok());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(rpc_->Apply(middle).status.ok());
    const Answer answer = rpc_->Apply(large);
    ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  };
  for (int i = 0; i < 4; ++i) round();
  const int64_t warm = MemoryMebibytes(server_->pid(), "VmRSS:");
  const std::string in_use = "engram_staging_bytes{state=\"in_use\"}";
  ASSERT_TRUE(AwaitMetric(server_->metrics_address(), in_use, 0));
  const double staging = MetricOf(server_->metrics_address(), "engram_staging_bytes{state=\"idle\"}");
  EXPECT_GE(staging, 8000.0 * 1024) << "the largest highway's block waits for the next one";
  for (int i = 0; i < 12; ++i) round();
  EXPECT_LE(MemoryMebibytes(server_->pid(), "VmRSS:") - warm, 16);
  ASSERT_TRUE(AwaitMetric(server_->metrics_address(), in_use, 0));
  // A block of the smaller sizes more, where gRPC let one go a moment later.
  EXPECT_LE(MetricOf(server_->metrics_address(), "engram_staging_bytes{state=\"idle\"}"), staging * 1.3);
}

}  // namespace
}  // namespace engram::e2e
