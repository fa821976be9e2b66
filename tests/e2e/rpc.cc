#include "tests/e2e/rpc.h"

#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <limits>

#include "google/rpc/status.pb.h"

namespace engram::e2e {
namespace {

// SplitMix64: a good hash of a counter.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Rpc::Rpc(const std::string& address) {
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(std::numeric_limits<int>::max());
  args.SetMaxSendMessageSize(std::numeric_limits<int>::max());
  // A pool of its own: the test's clients must not share one connection through gRPC's global pool.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  channel_ = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args);
  stub_ = v1::EngramService::NewStub(channel_);
}

v1::GetModelResponse Rpc::Model() {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  v1::GetModelResponse response;
  const grpc::Status status = stub_->GetModel(&context, {}, &response);
  if (!status.ok()) response.Clear();
  return response;
}

Answer Rpc::Apply(const v1::ApplyRequest& request, int timeout_ms) {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  Answer answer;
  answer.status = stub_->Apply(&context, request, &answer.response);
  for (const auto& [key, value] : context.GetServerTrailingMetadata()) {
    if (key == "grpc-retry-pushback-ms") answer.pushback = std::string(value.data(), value.size());
  }
  google::rpc::Status details;
  if (details.ParseFromString(answer.status.error_details())) {
    for (const google::protobuf::Any& any : details.details()) {
      any.UnpackTo(&answer.error);
      any.UnpackTo(&answer.bad);
      answer.retry_info |= any.Is<google::rpc::RetryInfo>();
    }
  }
  return answer;
}

std::string HighwayOf(int64_t seed, int64_t first_token, int64_t tokens, int64_t values_per_token,
                      v1::HighwayDtype dtype) {
  const size_t width = dtype == v1::HIGHWAY_DTYPE_BF16 ? 2 : 4;
  std::string bytes(static_cast<size_t>(tokens * values_per_token) * width, '\0');
  char* out = bytes.data();
  for (int64_t t = first_token; t < first_token + tokens; ++t) {
    for (int64_t i = 0; i < values_per_token; ++i, out += width) {
      const uint64_t bits =
          Mix(Mix(static_cast<uint64_t>(seed)) ^ Mix(static_cast<uint64_t>(t * values_per_token + i)));
      const float value = static_cast<float>(static_cast<double>(bits >> 11) * 0x1p-52 - 1.0);  // [-1, 1)
      uint32_t word = 0;
      std::memcpy(&word, &value, sizeof word);
      if (width == 2) word >>= 16;
      std::memcpy(out, &word, width);
    }
  }
  return bytes;
}

std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (!details.ParseFromString(status.error_details())) return "";
  for (const google::protobuf::Any& any : details.details()) any.UnpackTo(&info);
  return info.reason();
}

void AddSequence(v1::ApplyRequest& request, const Seq& seq) {
  v1::Sequence& out = *request.add_sequences();
  out.set_session(seq.session);
  out.set_start_pos(seq.start);
  for (const int32_t token : seq.tokens) out.add_token_ids(token);
  out.set_token_mask(std::string(seq.mask.begin(), seq.mask.end()));
  for (const int32_t token : seq.lookback) out.add_lookback_token_ids(token);
}

grpc::Status RawStatus(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                       const grpc::ByteBuffer& request, grpc::ByteBuffer* reply) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channel);
  const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  grpc::ByteBuffer unread;
  grpc::Status status;
  call->StartCall();
  call->Finish(reply != nullptr ? reply : &unread, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status;
}

std::string RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                    const std::string& request) {
  const grpc::Slice bytes(request);
  grpc::ByteBuffer reply;
  const grpc::Status status = RawStatus(channel, method, grpc::ByteBuffer(&bytes, 1), &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  grpc::Slice slice;
  if (!reply.DumpToSingleSlice(&slice).ok()) return "";
  return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
}

}  // namespace engram::e2e
