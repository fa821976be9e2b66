#include "client/one_connection.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/error_details.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"

namespace engram::client {
namespace {

// What gRPC needs until the call's end.
struct Call {
  grpc::ClientContext context;
  grpc::ByteBuffer request;
  grpc::ByteBuffer body;
  absl::AnyInvocable<void(RawReply)> done;
};

absl::Status ErrorOf(const grpc::Status& status, const std::string& target) {
  absl::Status error = StatusFromGrpc(status);
  if (!absl::IsUnavailable(error) || !ErrorReason(error).empty()) return error;
  return absl::UnavailableError(absl::StrCat(target, ": ", error.message()));
}

}  // namespace

Sender SendOver(std::shared_ptr<grpc::Channel> channel, std::string target) {
  auto stub = std::make_shared<grpc::GenericStub>(std::move(channel));
  return [stub, target = std::move(target)](RawCall raw, absl::AnyInvocable<void(RawReply)> done) {
    auto call = std::make_shared<Call>();
    call->context.set_deadline(absl::ToChronoTime(raw.deadline));
    call->request = std::move(raw.request);
    call->done = std::move(done);
    stub->UnaryCall(&call->context, raw.method, grpc::StubOptions(), &call->request, &call->body,
                    [call, stub, target](const grpc::Status& status) {
                      RawReply reply;
                      reply.status = ErrorOf(status, target);
                      reply.body = std::move(call->body);
                      reply.replica = target;
                      reply.attempts = 1;
                      call->done(std::move(reply));
                    });
  };
}

}  // namespace engram::client
