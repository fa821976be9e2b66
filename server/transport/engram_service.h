// engram.v1.EngramService on gRPC's callback threads: decode, ask the core, encode. Nothing here blocks.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <vector>

#include "engram/v1/engram.grpc.pb.h"
#include "server/transport/step_runner.h"
#include "server/transport/stream_call.h"
#include "server/transport/unary_call.h"

namespace engram {

class EngramService final : public v1::EngramService::CallbackService {
 public:
  explicit EngramService(Core core);

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* Apply(grpc::CallbackServerContext* context, const v1::ApplyRequest* request,
                                  v1::ApplyResponse* response) override;
  grpc::ServerUnaryReactor* Prepare(grpc::CallbackServerContext* context, const v1::PrepareRequest* request,
                                    v1::PrepareResponse* response) override;
  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* context, const v1::LookupRequest* request,
                                   v1::LookupResponse* response) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context, const v1::ReleaseRequest* request,
                                    v1::ReleaseResponse* response) override;
  grpc::ServerUnaryReactor* CloseSessions(grpc::CallbackServerContext* context, const v1::CloseSessionsRequest* request,
                                          v1::CloseSessionsResponse* response) override;
  grpc::ServerUnaryReactor* OpenRegion(grpc::CallbackServerContext* context, const v1::OpenRegionRequest* request,
                                       v1::OpenRegionResponse* response) override;
  grpc::ServerBidiReactor<v1::StreamRequest, v1::StreamResponse>* Stream(grpc::CallbackServerContext* context) override;

  // Replies carry the trailer `engram-draining` from now on.
  void AnnounceDrain() { state_.draining = true; }
  // Unary calls that gRPC is not yet done with, and streams' requests not yet answered.
  int64_t in_flight() const { return state_.in_flight + streams_.in_flight(); }
  // Ends every stream as soon as its requests are answered, and takes no new one.
  void CloseStreams() { streams_.Close(); }

 private:
  UnaryCall* NewCall(const char* method, grpc::CallbackServerContext* context,
                     const google::protobuf::Message& request);
  template <typename Response>
  void Submit(UnaryCall* call, absl::StatusOr<StepCall> step, std::vector<const void*> highways, Response* response);

  const Core core_;
  const v1::GetModelResponse description_;
  CallState state_;
  StreamSet streams_;
};

}  // namespace engram
