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

// Every method gets the message's bytes and parses them here (arrived_message.h).
using RawEngramService = v1::EngramService::WithRawCallbackMethod_Apply<
    v1::EngramService::WithRawCallbackMethod_Prepare<v1::EngramService::WithRawCallbackMethod_Lookup<
        v1::EngramService::WithRawCallbackMethod_Stream<v1::EngramService::WithRawCallbackMethod_Release<
            v1::EngramService::WithRawCallbackMethod_CloseSessions<v1::EngramService::WithRawCallbackMethod_OpenRegion<
                v1::EngramService::WithRawCallbackMethod_GetModel<v1::EngramService::Service>>>>>>>>;

class EngramService final : public RawEngramService {
 public:
  explicit EngramService(Core core);

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Apply(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Prepare(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Lookup(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                   grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* CloseSessions(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* OpenRegion(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Stream(grpc::CallbackServerContext* context) override;

  // Replies carry the trailer `engram-draining` from now on.
  void AnnounceDrain() { state_.draining = true; }
  // Unary calls that gRPC is not yet done with, and streams' requests not yet answered.
  int64_t in_flight() const { return state_.in_flight + streams_.in_flight(); }
  // Ends every stream as soon as its requests are answered, and takes no new one.
  void CloseStreams() { streams_.Close(); }

 private:
  UnaryCall* NewCall(const char* method, grpc::CallbackServerContext* context, const grpc::ByteBuffer* request);
  void Submit(UnaryCall* call, const ArrivedMessage& message, absl::StatusOr<StepCall> step,
              const grpc::ByteBuffer* request, grpc::ByteBuffer* response);

  const Core core_;
  const v1::GetModelResponse description_;
  CallState state_;
  StreamSet streams_;
};

}  // namespace engram
