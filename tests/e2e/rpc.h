// Apply as any gRPC client would call it, with the stub that protoc made.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engram/v1/engram.grpc.pb.h"
#include "google/rpc/error_details.pb.h"

namespace engram::e2e {

// One sequence of a call, as a test writes it down.
struct Seq {
  std::string session;
  int64_t start = 0;
  std::vector<int32_t> tokens;
  std::vector<uint8_t> mask;      // empty: all live
  std::vector<int32_t> lookback;  // newest first; empty: not given
};

// What came back, with a refusal's details unpacked.
struct Answer {
  grpc::Status status;
  v1::ApplyResponse response;
  google::rpc::ErrorInfo error;
  google::rpc::BadRequest bad;
  bool retry_info = false;
  std::string pushback;  // grpc-retry-pushback-ms
};

class Rpc {
 public:
  explicit Rpc(const std::string& address);

  v1::GetModelResponse Model();
  Answer Apply(const v1::ApplyRequest& request, int timeout_ms = 30'000);
  v1::EngramService::Stub& stub() { return *stub_; }
  const std::shared_ptr<grpc::Channel>& channel() { return channel_; }

 private:
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::EngramService::Stub> stub_;
};

// Pseudo-random highway bytes for `tokens` tokens, finite, a function of (seed, index of the token) alone: token t's
// highway is the same bytes whatever call it travels in.
std::string HighwayOf(int64_t seed, int64_t first_token, int64_t tokens, int64_t values_per_token,
                      v1::HighwayDtype dtype);

// ErrorInfo's reason; empty where there is none.
std::string ReasonOf(const grpc::Status& status);

// A call by its wire bytes, as a client without our (or gRPC's) generated code would make it.
std::string RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                    const std::string& request);

// What becomes of a call of these wire bytes, whatever they are; at most a minute. `reply` may be null.
grpc::Status RawStatus(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                       const grpc::ByteBuffer& request, grpc::ByteBuffer* reply = nullptr);

void AddSequence(v1::ApplyRequest& request, const Seq& seq);

}  // namespace engram::e2e
