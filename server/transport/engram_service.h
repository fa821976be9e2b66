// engram.v1.EngramService on gRPC's callback threads: decode, ask the core, encode. Nothing here blocks.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>

#include "engram/v1/engram.grpc.pb.h"
#include "server/admission/budget.h"
#include "server/engine/engine.h"
#include "server/model/engram_model.h"
#include "server/observe/metrics.h"
#include "server/session/session_table.h"
#include "server/transport/apply_codec.h"
#include "server/transport/describe_model.h"
#include "server/transport/unary_call.h"

namespace engram {

// What the service asks; all of it outlives the service.
struct Core {
  std::shared_ptr<const EngramModel> model;
  CallLimits limits;
  ServerIdentity identity;
  Budget& budget;
  SessionTable& sessions;
  Engine& engine;
  Metrics& metrics;
};

class EngramService final : public v1::EngramService::CallbackService {
 public:
  explicit EngramService(Core core);

  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;
  grpc::ServerUnaryReactor* Apply(grpc::CallbackServerContext* context, const v1::ApplyRequest* request,
                                  v1::ApplyResponse* response) override;

  // Replies carry the trailer `engram-draining` from now on.
  void AnnounceDrain() { state_.draining = true; }
  // Calls that gRPC is not yet done with.
  int64_t in_flight() const { return state_.in_flight; }

 private:
  const Core core_;
  const v1::GetModelResponse description_;
  CallState state_;
};

}  // namespace engram
