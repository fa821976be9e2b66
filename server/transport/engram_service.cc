#include "server/transport/engram_service.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/transport/arrived_message.h"
#include "server/transport/step_reply.h"

namespace engram {
namespace {

grpc::ByteBuffer Whole(const google::protobuf::MessageLite& message) {
  ReplyWriter writer;
  writer.Fields(message);
  return writer.Take();
}

// The parsed message goes to `decode`, unless it is malformed.
template <typename Request, typename Decode>
absl::StatusOr<StepCall> Read(ArrivedMessage& message, const ListLimits& limits, Decode decode) {
  Request small;
  if (absl::Status parsed = message.Parse(limits, small); !parsed.ok()) return parsed;
  return decode(small);
}

// A grant takes of the memory there is until it is claimed or expires, so those who cannot claim one must get none.
bool OnThisHost(absl::string_view peer) {
  return absl::StartsWith(peer, "unix:") || absl::StartsWith(peer, "ipv4:127.") ||
         absl::StartsWith(peer, "ipv6:%5B::1%5D") || absl::StartsWith(peer, "ipv6:[::1]");
}

absl::Status GrantRegion(const Core& core, absl::string_view peer, const v1::OpenRegionRequest& request,
                         v1::OpenRegionResponse& response) {
  if (core.regions == nullptr) return RefuseRegions();
  if (!OnThisHost(peer)) {
    return Refuse({Reason::kRegionsOff, "region", "", "a caller on the server's host",
                   "memory is shared with callers on this host alone, who come by a unix socket or loopback"});
  }
  absl::StatusOr<RegionGrant> grant = core.regions->Reserve(
      core.principal, request.bytes(), request.on_device() ? RegionPlace::kDevice : RegionPlace::kHost);
  if (!grant.ok()) return grant.status();
  response.set_token(grant->token);
  response.set_region(grant->id);
  response.set_socket(core.region_socket);
  response.set_bytes(grant->bytes);
  response.set_server_epoch(core.identity.epoch);
  if (request.on_device()) response.set_device_uuid(core.device_uuid);
  return absl::OkStatus();
}

}  // namespace

EngramService::EngramService(Core core)
    : core_(std::move(core)), description_(DescribeModel(*core_.model, core_.limits, core_.identity)) {}

UnaryCall* EngramService::NewCall(const char* method, grpc::CallbackServerContext* context,
                                  const grpc::ByteBuffer* request) {
  return new UnaryCall(method, *context, static_cast<int64_t>(request->Length()), core_.metrics, state_);
}

// From a decoded call to its answer in `response`, or the refusal.
void EngramService::Submit(UnaryCall* call, const ArrivedMessage& message, absl::StatusOr<StepCall> step,
                           const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  if (!step.ok()) return call->End(step.status());
  absl::StatusOr<Permit> permit =
      core_.budget.Admit({.tokens = step->tokens, .bytes = step->request_bytes + step->reply_bytes});
  if (!permit.ok()) return call->End(permit.status());
  call->Hold(*std::move(permit));

  auto reply = std::make_unique<StepReply>();
  reply->call = *std::move(step);
  if (const absl::Status staged = StageHighways(core_, message, *reply); !staged.ok()) return call->End(staged);
  // The tensors are copied: the message has no reader any more. gRPC made it for this call alone and keeps it until the
  // call's end, which would hold its bytes twice while the call waits.
  const_cast<grpc::ByteBuffer*>(request)->Clear();
  core_.metrics.StageTook(Stage::kDecode, absl::Now() - call->started());

  StepHooks hooks;
  hooks.deadline = call->deadline();
  hooks.cancelled = [call] { return call->cancelled(); };
  StepReply& filled = *reply;
  hooks.done = [this, call, response, reply = std::move(reply)](const absl::Status& status) {
    if (!status.ok()) return call->End(status);
    const absl::Time computed = absl::Now();
    *response = WriteReply(*reply, core_.identity.epoch).Take();
    core_.metrics.StageTook(Stage::kEncode, absl::Now() - computed);
    call->End(status, static_cast<int64_t>(response->Length()));
  };
  RunStep(core_, filled, std::move(hooks));
}

grpc::ServerUnaryReactor* EngramService::GetModel(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  UnaryCall* call = NewCall("GetModel", context, request);
  v1::GetModelRequest small;
  if (const absl::Status parsed = ArrivedMessage(*request).Parse(core_.list_limits(), small); !parsed.ok()) {
    call->End(parsed);
    return call;
  }
  v1::GetModelResponse description = description_;
  description.set_suggested_form(absl::StartsWith(context->peer(), "unix:") ? v1::FORM_HIGHWAY : v1::FORM_UPDATE);
  *response = Whole(description);
  call->End(absl::OkStatus(), static_cast<int64_t>(response->Length()));
  return call;
}

grpc::ServerUnaryReactor* EngramService::Apply(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* response) {
  UnaryCall* call = NewCall("Apply", context, request);
  ArrivedMessage message(*request);
  absl::StatusOr<StepCall> step =
      Read<v1::ApplyRequest>(message, core_.list_limits(), [&](const v1::ApplyRequest& small) {
        return DecodeApply(small, message.highway_bytes(), core_.decode_context());
      });
  Submit(call, message, std::move(step), request, response);
  return call;
}

grpc::ServerUnaryReactor* EngramService::Prepare(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  UnaryCall* call = NewCall("Prepare", context, request);
  ArrivedMessage message(*request);
  absl::StatusOr<StepCall> step = Read<v1::PrepareRequest>(
      message, core_.list_limits(),
      [this](const v1::PrepareRequest& small) { return DecodePrepare(small, core_.decode_context()); });
  Submit(call, message, std::move(step), request, response);
  return call;
}

grpc::ServerUnaryReactor* EngramService::Lookup(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                grpc::ByteBuffer* response) {
  UnaryCall* call = NewCall("Lookup", context, request);
  ArrivedMessage message(*request);
  absl::StatusOr<StepCall> step = Read<v1::LookupRequest>(
      message, core_.list_limits(),
      [this](const v1::LookupRequest& small) { return DecodeLookup(small, core_.decode_context()); });
  Submit(call, message, std::move(step), request, response);
  return call;
}

grpc::ServerUnaryReactor* EngramService::Release(grpc::CallbackServerContext* context, const grpc::ByteBuffer* request,
                                                 grpc::ByteBuffer* response) {
  UnaryCall* call = NewCall("Release", context, request);
  v1::ReleaseRequest small;
  const absl::Status parsed = ArrivedMessage(*request).Parse(core_.list_limits(), small);
  if (parsed.ok()) {
    v1::ReleaseResponse answer;
    answer.set_released(ReleaseTickets(core_, small));
    *response = Whole(answer);
  }
  call->End(parsed, static_cast<int64_t>(response->Length()));
  return call;
}

grpc::ServerUnaryReactor* EngramService::CloseSessions(grpc::CallbackServerContext* context,
                                                       const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  UnaryCall* call = NewCall("CloseSessions", context, request);
  v1::CloseSessionsRequest small;
  if (const absl::Status parsed = ArrivedMessage(*request).Parse(core_.list_limits(), small); !parsed.ok()) {
    call->End(parsed);
    return call;
  }
  RunCloseSessions(core_, {small.sessions().begin(), small.sessions().end()}, call->deadline(),
                   [call, response](const absl::Status& status, int32_t closed) {
                     if (!status.ok()) return call->End(status);
                     v1::CloseSessionsResponse answer;
                     answer.set_closed(closed);
                     *response = Whole(answer);
                     call->End(status, static_cast<int64_t>(response->Length()));
                   });
  return call;
}

grpc::ServerUnaryReactor* EngramService::OpenRegion(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request, grpc::ByteBuffer* response) {
  UnaryCall* call = NewCall("OpenRegion", context, request);
  v1::OpenRegionRequest small;
  v1::OpenRegionResponse grant;
  absl::Status status = ArrivedMessage(*request).Parse(core_.list_limits(), small);
  if (status.ok()) status = GrantRegion(core_, context->peer(), small, grant);
  if (status.ok()) *response = Whole(grant);
  call->End(status, static_cast<int64_t>(response->Length()));
  return call;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* EngramService::Stream(
    grpc::CallbackServerContext* context) {
  return streams_.Open(core_, *context);
}

}  // namespace engram
