#include "server/transport/engram_service.h"

#include <utility>

#include "absl/time/clock.h"

namespace engram {
namespace {

// Everyone, as long as no listener asks for credentials.
constexpr absl::string_view kAnonymous = "anonymous";

}  // namespace

EngramService::EngramService(Core core)
    : core_(std::move(core)), description_(DescribeModel(*core_.model, core_.limits, core_.identity)) {}

grpc::ServerUnaryReactor* EngramService::GetModel(grpc::CallbackServerContext* context,
                                                  const v1::GetModelRequest* request, v1::GetModelResponse* response) {
  auto* call =
      new UnaryCall("GetModel", *context, static_cast<int64_t>(request->ByteSizeLong()), core_.metrics, state_);
  *response = description_;
  call->End(absl::OkStatus(), static_cast<int64_t>(response->ByteSizeLong()));
  return call;
}

grpc::ServerUnaryReactor* EngramService::Apply(grpc::CallbackServerContext* context, const v1::ApplyRequest* request,
                                               v1::ApplyResponse* response) {
  auto* call = new UnaryCall("Apply", *context, static_cast<int64_t>(request->ByteSizeLong()), core_.metrics, state_);
  absl::StatusOr<ApplyCall> apply = DecodeApply(*request, *core_.model, core_.limits);
  if (!apply.ok()) {
    call->End(apply.status(), 0);
    return call;
  }
  absl::StatusOr<Permit> permit =
      core_.budget.Admit({.tokens = apply->tokens, .bytes = apply->request_bytes + apply->reply_bytes});
  if (!permit.ok()) {
    call->End(permit.status(), 0);
    return call;
  }
  call->Hold(*std::move(permit));

  auto work = std::make_unique<Call>();
  work->form = apply->form;
  work->highway_type = apply->highway_type;
  work->layers = LayOutReply(*apply, *core_.model, *request, *response);
  for (const SequenceClaim& claim : apply->claims) work->sequence_tokens.push_back(claim.ids.size());
  work->tokens = apply->tokens;
  work->token_mask = std::move(apply->token_mask);
  work->deadline = call->deadline();
  work->cancelled = [call] { return call->cancelled(); };
  work->commit = [&sessions = core_.sessions, claims = std::move(apply->claims)] {
    return sessions.Commit(kAnonymous, claims);
  };
  work->done = [call, response, epoch = core_.identity.epoch](const absl::Status& status) {
    response->set_server_epoch(epoch);
    call->End(status, static_cast<int64_t>(response->ByteSizeLong()));
  };
  core_.metrics.StageTook(Stage::kDecode, absl::Now() - call->started());
  core_.engine.Submit(std::move(work));
  return call;
}

}  // namespace engram
