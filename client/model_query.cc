#include "client/model_query.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/channels.h"
#include "client/error_details.h"
#include "engram/v1/engram.grpc.pb.h"
#include "grpcpp/client_context.h"

namespace engram::client {
namespace {

struct Query {
  std::string name;
  absl::Time started;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::EngramService::Stub> stub;
  std::shared_ptr<grpc::ClientContext> context = std::make_shared<grpc::ClientContext>();
  std::unique_ptr<grpc::ClientAsyncResponseReader<v1::GetModelResponse>> call;
  v1::GetModelResponse response;
  grpc::Status status;
  std::function<void(ModelAnswer)> done;
};

absl::StatusOr<ModelInfo> Read(const Query& query) {
  const grpc::Status& status = query.status;
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    const std::string waited = absl::FormatDuration(absl::Trunc(absl::Now() - query.started, absl::Milliseconds(1)));
    if (query.channel->GetState(false) == GRPC_CHANNEL_READY) {
      return absl::DeadlineExceededError(
          absl::StrCat(query.name, ": connected, but GetModel was not answered within ", waited));
    }
    return absl::UnavailableError(absl::StrCat(query.name, ": not reached within ", waited));
  }
  if (!status.ok()) {
    const absl::Status error = StatusFromGrpc(status);
    return absl::Status(error.code(), absl::StrCat(query.name, ": GetModel: ", error.message()));
  }
  absl::StatusOr<ModelInfo> model = DecodeModelInfo(query.response);
  if (model.ok()) return model;
  return absl::Status(model.status().code(), absl::StrCat(query.name, ": ", model.status().message()));
}

}  // namespace

std::shared_ptr<grpc::ClientContext> QueryModel(Completions& completions, const Address& address,
                                                const std::string& authority, absl::Time deadline,
                                                std::function<void(ModelAnswer)> done) {
  auto query = std::make_shared<Query>();
  query->name = address.name;
  query->started = absl::Now();
  // GetModel's reply is small: nothing larger is believed before the model's own limits are known.
  query->channel = OpenChannel(address.uri, authority, 0);
  query->stub = v1::EngramService::NewStub(query->channel);
  query->done = std::move(done);
  query->context->set_deadline(absl::ToChronoTime(deadline));
  std::shared_ptr<grpc::ClientContext> context = query->context;
  query->call = query->stub->AsyncGetModel(context.get(), v1::GetModelRequest(), completions.queue());
  query->call->Finish(&query->response, &query->status, Completions::Tag([query](bool) {
    query->done({.model = Read(*query), .draining = AnnouncesDrain(*query->context)});
  }));
  return context;
}

bool AnnouncesDrain(const grpc::ClientContext& context) {
  return context.GetServerTrailingMetadata().count("engram-draining") > 0;
}

}  // namespace engram::client
