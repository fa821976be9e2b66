#include "server/transport/engram_service.h"

#include <string>
#include <type_traits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/transport/wire_status.h"

namespace engram {
namespace {

// What only some replies have.
void Conclude(StepReply& reply, v1::PrepareResponse& response) {
  response.set_ticket(reply.ticket);
  if (!reply.call.return_values) response.clear_layers();
}

absl::Status GrantRegion(const Core& core, const v1::OpenRegionRequest& request, v1::OpenRegionResponse& response) {
  if (core.regions == nullptr) return RefuseRegions();
  absl::StatusOr<RegionGrant> grant = core.regions->Reserve(core.principal, request.bytes());
  if (!grant.ok()) return grant.status();
  response.set_token(grant->token);
  response.set_region(grant->id);
  response.set_socket(core.region_socket);
  response.set_bytes(grant->bytes);
  response.set_server_epoch(core.identity.epoch);
  return absl::OkStatus();
}

template <typename Response>
void Conclude(StepReply& reply, Response& response) {
  for (const absl::Status& status : reply.statuses) AddSequenceStatus(status, *response.add_sequences());
}

}  // namespace

EngramService::EngramService(Core core)
    : core_(std::move(core)), description_(DescribeModel(*core_.model, core_.limits, core_.identity)) {}

UnaryCall* EngramService::NewCall(const char* method, grpc::CallbackServerContext* context,
                                  const google::protobuf::Message& request) {
  return new UnaryCall(method, *context, static_cast<int64_t>(request.ByteSizeLong()), core_.metrics, state_);
}

// From a decoded call to its answer in `response`, or the refusal.
template <typename Response>
void EngramService::Submit(UnaryCall* call, absl::StatusOr<StepCall> step, std::vector<const void*> highways,
                           Response* response) {
  if (!step.ok()) return call->End(step.status(), 0);
  absl::StatusOr<Permit> permit =
      core_.budget.Admit({.tokens = step->tokens, .bytes = step->request_bytes + step->reply_bytes});
  if (!permit.ok()) return call->End(permit.status(), 0);
  call->Hold(*std::move(permit));

  auto reply = std::make_unique<StepReply>();
  reply->call = *std::move(step);
  reply->highways = std::move(highways);
  for (size_t i = 0; i < reply->call.layers.size(); ++i) reply->outputs.push_back(response->add_layers());
  core_.metrics.StageTook(Stage::kDecode, absl::Now() - call->started());

  StepHooks hooks;
  hooks.deadline = call->deadline();
  hooks.cancelled = [call] { return call->cancelled(); };
  StepReply& filled = *reply;
  hooks.done = [this, call, response, reply = std::move(reply)](const absl::Status& status) {
    response->set_server_epoch(core_.identity.epoch);
    if (status.ok()) Conclude(*reply, *response);
    call->End(status, static_cast<int64_t>(response->ByteSizeLong()));
  };
  RunStep(core_, filled, std::move(hooks));
}

grpc::ServerUnaryReactor* EngramService::GetModel(grpc::CallbackServerContext* context,
                                                  const v1::GetModelRequest* request, v1::GetModelResponse* response) {
  UnaryCall* call = NewCall("GetModel", context, *request);
  *response = description_;
  response->set_suggested_form(absl::StartsWith(context->peer(), "unix:") ? v1::FORM_HIGHWAY : v1::FORM_UPDATE);
  call->End(absl::OkStatus(), static_cast<int64_t>(response->ByteSizeLong()));
  return call;
}

grpc::ServerUnaryReactor* EngramService::Apply(grpc::CallbackServerContext* context, const v1::ApplyRequest* request,
                                               v1::ApplyResponse* response) {
  UnaryCall* call = NewCall("Apply", context, *request);
  absl::StatusOr<StepCall> step = DecodeApply(*request, core_.decode_context());
  std::vector<const void*> highways;
  if (step.ok()) highways = HighwaysOf(*request, *step);
  Submit(call, std::move(step), std::move(highways), response);
  return call;
}

grpc::ServerUnaryReactor* EngramService::Prepare(grpc::CallbackServerContext* context,
                                                 const v1::PrepareRequest* request, v1::PrepareResponse* response) {
  UnaryCall* call = NewCall("Prepare", context, *request);
  Submit(call, DecodePrepare(*request, core_.decode_context()), {}, response);
  return call;
}

grpc::ServerUnaryReactor* EngramService::Lookup(grpc::CallbackServerContext* context, const v1::LookupRequest* request,
                                                v1::LookupResponse* response) {
  UnaryCall* call = NewCall("Lookup", context, *request);
  Submit(call, DecodeLookup(*request, core_.decode_context()), {}, response);
  return call;
}

grpc::ServerUnaryReactor* EngramService::Release(grpc::CallbackServerContext* context,
                                                 const v1::ReleaseRequest* request, v1::ReleaseResponse* response) {
  UnaryCall* call = NewCall("Release", context, *request);
  response->set_released(ReleaseTickets(core_, *request));
  call->End(absl::OkStatus(), static_cast<int64_t>(response->ByteSizeLong()));
  return call;
}

grpc::ServerUnaryReactor* EngramService::CloseSessions(grpc::CallbackServerContext* context,
                                                       const v1::CloseSessionsRequest* request,
                                                       v1::CloseSessionsResponse* response) {
  UnaryCall* call = NewCall("CloseSessions", context, *request);
  RunCloseSessions(core_, {request->sessions().begin(), request->sessions().end()}, call->deadline(),
                   [call, response](const absl::Status& status, int32_t closed) {
                     response->set_closed(closed);
                     call->End(status, static_cast<int64_t>(response->ByteSizeLong()));
                   });
  return call;
}

grpc::ServerUnaryReactor* EngramService::OpenRegion(grpc::CallbackServerContext* context,
                                                    const v1::OpenRegionRequest* request,
                                                    v1::OpenRegionResponse* response) {
  UnaryCall* call = NewCall("OpenRegion", context, *request);
  const absl::Status status = GrantRegion(core_, *request, *response);
  call->End(status, static_cast<int64_t>(response->ByteSizeLong()));
  return call;
}

grpc::ServerBidiReactor<v1::StreamRequest, v1::StreamResponse>* EngramService::Stream(
    grpc::CallbackServerContext* context) {
  return streams_.Open(core_, *context);
}

}  // namespace engram
