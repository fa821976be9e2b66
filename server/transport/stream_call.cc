#include "server/transport/stream_call.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "server/refusal/refusal.h"
#include "server/transport/wire_status.h"

namespace engram {
namespace {

// What a request costs of its stream's limit besides its message and the reply's tensors: its own records, an error.
constexpr int64_t kRequestBytes = 4096;

}  // namespace

int32_t ReleaseTickets(const Core& core, const v1::ReleaseRequest& request) {
  int32_t released = 0;
  for (const std::string& ticket : request.tickets()) released += core.tickets.Release(core.principal, ticket) ? 1 : 0;
  return released;
}

void AddSequenceStatus(const absl::Status& status, v1::SequenceStatus& out) {
  if (!status.ok()) *out.mutable_refused() = ToStatusMessage(status);
}

StreamCall* StreamSet::Open(const Core& core, grpc::CallbackServerContext& context) {
  absl::MutexLock lock(&mutex_);
  auto* stream = new StreamCall(core, context, next_id_++, *this);
  streams_.insert(stream);
  if (closed_) stream->CloseWhenIdle();
  return stream;
}

void StreamSet::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  for (StreamCall* stream : streams_) stream->CloseWhenIdle();
}

void StreamSet::Remove(StreamCall* stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

StreamCall::StreamCall(const Core& core, grpc::CallbackServerContext& context, uint64_t id, StreamSet& set)
    : core_(core), context_(context), id_(id), set_(set), limit_bytes_(core.limits.max_message_bytes) {
  core_.metrics.CallStarted();
  StartRead(&incoming_);
}

void StreamCall::CloseWhenIdle() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    if (!TakeFinish()) return;
  }
  Finish(finish_status_);
}

void StreamCall::OnReadDone(bool ok) {
  if (!ok) {
    {
      absl::MutexLock lock(&mutex_);
      reads_done_ = true;
      if (!TakeFinish()) return;
    }
    return Finish(finish_status_);
  }
  auto request = std::make_shared<Request>();
  request->message.Swap(&incoming_);
  request->started = absl::Now();
  // Whatever becomes of it: a client that reads no refusals must not pile them up either.
  request->bytes = kRequestBytes + static_cast<int64_t>(request->message.ByteSizeLong());
  {
    absl::MutexLock lock(&mutex_);
    ++requests_;
    held_bytes_ += request->bytes;
  }
  ++set_.in_flight_;
  Handle(std::move(request));
  {
    absl::MutexLock lock(&mutex_);
    ReadOrPause();
    if (!TakeFinish()) return;
  }
  Finish(finish_status_);
}

void StreamCall::ReadOrPause() {
  if (finished_ || reads_done_) return;
  if (cancelled_.load(std::memory_order_relaxed)) {
    reads_done_ = true;
    return;
  }
  paused_ = held_bytes_ >= limit_bytes_;
  if (!paused_) StartRead(&incoming_);
}

absl::Time StreamCall::DeadlineOf(const v1::StreamRequest& message) const {
  const absl::Time stream = absl::FromChrono(context_.deadline());
  if (message.timeout_ms() == 0) return stream;
  return std::min(stream, absl::Now() + absl::Milliseconds(message.timeout_ms()));
}

void StreamCall::Handle(std::shared_ptr<Request> request) {
  core_.metrics.CallStarted();
  const v1::StreamRequest& message = request->message;
  switch (message.request_case()) {
    case v1::StreamRequest::kApply: {
      request->method = "Stream.Apply";
      absl::StatusOr<StepCall> step = DecodeApply(message.apply(), core_.decode_context());
      std::vector<const void*> highways;
      if (step.ok()) highways = HighwaysOf(message.apply(), *step);
      return HandleStep(request, std::move(step), std::move(highways));
    }
    case v1::StreamRequest::kPrepare:
      request->method = "Stream.Prepare";
      return HandleStep(request, DecodePrepare(message.prepare(), core_.decode_context()), {});
    case v1::StreamRequest::kLookup:
      request->method = "Stream.Lookup";
      return HandleStep(request, DecodeLookup(message.lookup(), core_.decode_context()), {});
    case v1::StreamRequest::kRelease: {
      request->method = "Stream.Release";
      auto reply = std::make_unique<v1::StreamResponse>();
      reply->set_last(true);
      reply->mutable_release()->set_released(ReleaseTickets(core_, message.release()));
      return Send(request, std::move(reply));
    }
    case v1::StreamRequest::kCloseSessions: {
      request->method = "Stream.CloseSessions";
      const auto& sessions = message.close_sessions().sessions();
      return RunCloseSessions(core_, {sessions.begin(), sessions.end()}, DeadlineOf(message),
                              [this, request](const absl::Status& status, int32_t closed) {
                                if (!status.ok()) return Fail(request, status);
                                auto reply = std::make_unique<v1::StreamResponse>();
                                reply->set_last(true);
                                reply->mutable_close_sessions()->set_closed(closed);
                                Send(request, std::move(reply));
                              });
    }
    case v1::StreamRequest::REQUEST_NOT_SET:
      request->method = "Stream";
      return Fail(request, Refuse({Reason::kEmptyCall, "request", "none",
                                   "apply, prepare, lookup, release or close_sessions", "the request is empty"}));
  }
}

void StreamCall::HandleStep(const std::shared_ptr<Request>& request, absl::StatusOr<StepCall> step,
                            std::vector<const void*> highways) {
  if (!step.ok()) return Fail(request, step.status());
  const int64_t payload = step->request_bytes + step->reply_bytes;
  absl::StatusOr<Permit> permit = core_.budget.Admit({.tokens = step->tokens, .bytes = payload});
  if (!permit.ok()) return Fail(request, permit.status());
  request->permit = *std::move(permit);
  request->bytes += step->reply_bytes;
  {
    absl::MutexLock lock(&mutex_);
    held_bytes_ += step->reply_bytes;
  }
  request->reply.call = *std::move(step);
  request->reply.highways = std::move(highways);
  const size_t layers = request->reply.call.layers.size();
  request->layers_left = layers;
  const bool one_for_all = request->reply.call.form == Form::kPrepare;
  for (size_t i = 0; i < layers; ++i) {
    if (i == 0 || !one_for_all) request->replies.push_back(std::make_unique<v1::StreamResponse>());
    v1::StreamResponse& reply = *request->replies.back();
    request->reply.outputs.push_back(one_for_all ? reply.mutable_prepare()->add_layers() : reply.mutable_layer());
  }

  StepHooks hooks;
  hooks.deadline = DeadlineOf(request->message);
  hooks.stream = id_;
  hooks.cancelled = [this] { return cancelled_.load(std::memory_order_relaxed); };
  if (!one_for_all) hooks.layer_done = [this, request](size_t index) { LayerDone(request, index); };
  hooks.done = [this, request](const absl::Status& status) { StepDone(request, status); };
  RunStep(core_, request->reply, std::move(hooks));
}

void StreamCall::LayerDone(const std::shared_ptr<Request>& request, size_t index) {
  std::unique_ptr<v1::StreamResponse> message = std::move(request->replies[index]);
  if (--request->layers_left == 0) {
    message->set_last(true);
    for (const absl::Status& status : request->reply.statuses) AddSequenceStatus(status, *message->add_sequences());
  }
  Send(request, std::move(message));
}

void StreamCall::StepDone(const std::shared_ptr<Request>& request, const absl::Status& status) {
  if (!status.ok()) {
    // Layers already sent stand; none is left to come.
    if (request->reply.call.form == Form::kPrepare || request->layers_left > 0) Fail(request, status);
    return;
  }
  if (request->reply.call.form != Form::kPrepare) return;  // its last layer was its last message
  std::unique_ptr<v1::StreamResponse> message = std::move(request->replies.front());
  v1::PrepareResponse& prepare = *message->mutable_prepare();
  prepare.set_ticket(request->reply.ticket);
  prepare.set_server_epoch(core_.identity.epoch);
  if (!request->reply.call.return_values) prepare.clear_layers();
  message->set_last(true);
  Send(request, std::move(message));
}

void StreamCall::Fail(const std::shared_ptr<Request>& request, const absl::Status& status) {
  const RefusalDetail detail = DetailOf(status);
  if (!detail.offenders.empty()) core_.metrics.Refused(ReasonName(detail.offenders.front().reason));
  auto message = std::make_unique<v1::StreamResponse>();
  *message->mutable_error() = ToStatusMessage(status);
  message->set_last(true);
  Send(request, std::move(message));
}

void StreamCall::Send(const std::shared_ptr<Request>& request, std::unique_ptr<v1::StreamResponse> message) {
  message->set_request_id(request->message.request_id());
  message->set_server_epoch(core_.identity.epoch);
  if (message->last()) {
    --set_.in_flight_;
    request->permit.GiveBackTokens();
    const absl::StatusCode code =
        message->has_error() ? static_cast<absl::StatusCode>(message->error().code()) : absl::StatusCode::kOk;
    core_.metrics.CallEnded(request->method, absl::StatusCodeToString(code), absl::Now() - request->started,
                            request->reply.call.request_bytes, request->reply.call.reply_bytes);
  }
  {
    absl::MutexLock lock(&mutex_);
    if (message->last()) --requests_;
    outgoing_.push_back({std::move(message), request});
    WriteNext();
    if (!TakeFinish()) return;
  }
  Finish(finish_status_);
}

void StreamCall::WriteNext() {
  if (writing_) return;
  if (finished_ || cancelled_.load(std::memory_order_relaxed)) {
    outgoing_.clear();
    return;
  }
  if (outgoing_.empty()) return;
  writing_ = true;
  StartWrite(outgoing_.front().message.get());
}

void StreamCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    const Outgoing& sent = outgoing_.front();
    if (sent.message->last()) held_bytes_ -= sent.request->bytes;
    outgoing_.pop_front();
    if (!ok) cancelled_.store(true, std::memory_order_relaxed);  // nobody reads any more
    WriteNext();
    if (paused_) ReadOrPause();
    if (!TakeFinish()) return;
  }
  Finish(finish_status_);
}

void StreamCall::OnCancel() {
  cancelled_.store(true, std::memory_order_relaxed);
  {
    absl::MutexLock lock(&mutex_);
    if (paused_) reads_done_ = true;  // no read is under way that would end by itself
    paused_ = false;
    WriteNext();
    if (!TakeFinish()) return;
  }
  Finish(finish_status_);
}

// The stream ends once the client sends no more (or the server closes) and everything asked for is sent. True: the
// caller lets go of the mutex and calls Finish(), after which `this` may be gone.
bool StreamCall::TakeFinish() {
  if (finished_ || writing_ || requests_ > 0 || !outgoing_.empty()) return false;
  const bool cancelled = cancelled_.load(std::memory_order_relaxed);
  if (!reads_done_ && !closing_ && !cancelled) return false;
  finished_ = true;
  if (cancelled) {
    finish_status_ = grpc::Status::CANCELLED;
  } else if (!reads_done_) {
    finish_status_ = ToWireStatus(RefuseDraining());
  }
  return true;
}

void StreamCall::OnDone() {
  core_.tickets.EndStream(id_);
  core_.metrics.CallEnded("Stream", cancelled_ ? "CANCELLED" : "OK", absl::ZeroDuration(), 0, 0);
  set_.Remove(this);
  delete this;
}

}  // namespace engram
