#include "client/one_connection.h"

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/error_details.h"
#include "grpcpp/client_context.h"

namespace engram::client {
namespace {

absl::Status ErrorOf(const grpc::Status& status, const std::string& target) {
  absl::Status error = StatusFromGrpc(status);
  if (!absl::IsUnavailable(error) || !ErrorReason(error).empty()) return error;
  return absl::UnavailableError(absl::StrCat(target, ": ", error.message()));
}

}  // namespace

// What gRPC needs until the call's end. Its context holds the channel.
struct OneConnection::Call {
  grpc::ClientContext context;
  grpc::ByteBuffer request;
  grpc::ByteBuffer body;
  absl::AnyInvocable<void(RawReply)> done;
};

struct OneConnection::UnderWay {
  absl::Mutex mutex;
  absl::flat_hash_set<Call*> calls ABSL_GUARDED_BY(mutex);
  int answering ABSL_GUARDED_BY(mutex) = 0;  // their `done` runs

  bool Nothing() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return calls.empty() && answering == 0; }
};

OneConnection::OneConnection(std::shared_ptr<grpc::Channel> channel, std::string target)
    : target_(std::move(target)), under_way_(std::make_shared<UnderWay>()), stub_(std::move(channel)) {}

OneConnection::~OneConnection() {
  absl::MutexLock lock(&under_way_->mutex);
  for (Call* call : under_way_->calls) call->context.TryCancel();
  under_way_->mutex.Await(absl::Condition(under_way_.get(), &UnderWay::Nothing));
}

void OneConnection::Send(RawCall raw, absl::AnyInvocable<void(RawReply)> done) {
  auto* call = new Call;
  call->context.set_deadline(absl::ToChronoTime(raw.deadline));
  call->request = std::move(raw.request);
  call->done = std::move(done);
  {
    absl::MutexLock lock(&under_way_->mutex);
    under_way_->calls.insert(call);
  }
  stub_.UnaryCall(&call->context, raw.method, grpc::StubOptions(), &call->request, &call->body,
                  [call, target = target_, under_way = under_way_](const grpc::Status& status) {
                    {
                      absl::MutexLock lock(&under_way->mutex);
                      under_way->calls.erase(call);
                      ++under_way->answering;
                    }
                    RawReply reply;
                    reply.status = ErrorOf(status, target);
                    reply.body = call->body;
                    reply.replica = target;
                    reply.attempts = 1;
                    absl::AnyInvocable<void(RawReply)> answered = std::move(call->done);
                    delete call;  // before anybody may end the connection
                    answered(std::move(reply));
                    answered = nullptr;
                    absl::MutexLock lock(&under_way->mutex);
                    --under_way->answering;
                  });
}

}  // namespace engram::client
