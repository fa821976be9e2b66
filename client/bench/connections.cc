#include "client/bench/connections.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/channels.h"
#include "client/error_details.h"
#include "engram/v1/engram.grpc.pb.h"
#include "grpcpp/alarm.h"
#include "grpcpp/create_channel.h"

namespace engram::bench {
namespace {

// What a completion queue's tags are.
using Then = std::function<void()>;

}  // namespace

int64_t NowNanos() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Connections::Connections(const std::vector<std::string>& targets, int channels, int threads, int64_t message_bytes) {
  // Targets side by side, so that neighbouring lanes go to different ones.
  for (int channel = 0; channel < channels; ++channel) {
    for (const std::string& target : targets) {
      stubs_.push_back(std::make_unique<grpc::GenericStub>(client::OpenChannel(target, "", message_bytes)));
    }
  }
  for (int i = 0; i < threads; ++i) queues_.push_back(std::make_unique<grpc::CompletionQueue>());
  for (const auto& queue : queues_) {
    threads_.emplace_back([queue = queue.get()] {
      void* tag = nullptr;
      bool ok = false;
      while (queue->Next(&tag, &ok)) (*static_cast<Then*>(tag))();
    });
  }
}

Connections::~Connections() {
  for (const auto& queue : queues_) queue->Shutdown();
  for (std::thread& thread : threads_) thread.join();
}

void Connections::Start(RawCall* call, size_t lane, const char* method, const grpc::ByteBuffer& message,
                        absl::Duration timeout) {
  grpc::CompletionQueue* queue = queues_[lane % queues_.size()].get();
  call->reader_.reset();  // lives in the context's arena
  call->context_.emplace();
  call->context_->set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(timeout));
  call->reply.Clear();
  call->started = NowNanos();
  call->reader_ = stubs_[lane % stubs_.size()]->PrepareUnaryCall(&*call->context_, method, message, queue);
  call->reader_->StartCall();
  call->reader_->Finish(&call->reply, &call->status, &call->done);
}

void Connections::After(absl::Duration pause, size_t lane, std::function<void()> then) {
  struct Waiting {
    grpc::Alarm alarm;
    Then tag;
    Then then;
  };
  auto* waiting = new Waiting;
  waiting->then = std::move(then);
  waiting->tag = [waiting] {
    const Then next = std::move(waiting->then);
    delete waiting;  // and this closure with it
    next();
  };
  waiting->alarm.Set(queues_[lane % queues_.size()].get(),
                     std::chrono::system_clock::now() + absl::ToChronoNanoseconds(pause), &waiting->tag);
}

absl::StatusOr<client::ModelInfo> AskModel(const std::vector<std::string>& targets, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::vector<client::ModelInfo> models;
  for (const std::string& target : targets) {
    if (absl::Status status = client::CheckTarget(target); !status.ok()) return status;
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(absl::ToChronoTime(deadline));
    v1::GetModelResponse response;
    const auto stub = v1::EngramService::NewStub(client::OpenChannel(target, "", client::kMaxEnvelopeBytes));
    if (const grpc::Status status = stub->GetModel(&context, {}, &response); !status.ok()) {
      if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
        return absl::UnavailableError(
            absl::StrCat(target, ": no server answered within ", absl::FormatDuration(timeout)));
      }
      const absl::Status why = client::StatusFromGrpc(status);
      return {absl::Status(why.code(), absl::StrCat(target, ": ", why.message()))};
    }
    absl::StatusOr<client::ModelInfo> model = client::DecodeModelInfo(response);
    if (!model.ok()) {
      return {absl::Status(model.status().code(), absl::StrCat(target, ": ", model.status().message()))};
    }
    models.push_back(*std::move(model));
    if (models.back().config_digest != models.front().config_digest) {
      return absl::FailedPreconditionError(absl::StrCat(
          target, " serves a model of config digest ", absl::BytesToHexString(models.back().config_digest), ", ",
          targets.front(), " one of ", absl::BytesToHexString(models.front().config_digest), ": all must serve one"));
    }
  }
  // What all of them take.
  client::ModelInfo model = models.front();
  for (const client::ModelInfo& other : models) {
    model.limits.max_call_tokens = std::min(model.limits.max_call_tokens, other.limits.max_call_tokens);
    model.limits.max_message_bytes = std::min(model.limits.max_message_bytes, other.limits.max_message_bytes);
    model.limits.position_limit = std::min(model.limits.position_limit, other.limits.position_limit);
    model.limits.ticket_ttl_ms = std::min(model.limits.ticket_ttl_ms, other.limits.ticket_ttl_ms);
  }
  return model;
}

}  // namespace engram::bench
