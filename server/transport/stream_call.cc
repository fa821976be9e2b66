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
  if (!ok) return EndReads(absl::OkStatus());
  auto request = std::make_shared<Request>();
  {
    ArrivedMessage arrived(incoming_);
    incoming_.Clear();
    // Where one message is none, nothing tells that the next is one, nor which request to answer.
    if (absl::Status parsed = arrived.Parse(core_.list_limits(), request->message); !parsed.ok()) {
      return EndReads(std::move(parsed));
    }
    request->started = absl::Now();
    // Whatever becomes of it: a client that reads no refusals must not pile them up either.
    request->bytes = kRequestBytes + arrived.bytes();
    {
      absl::MutexLock lock(&mutex_);
      // The stream may have ended while this message was read. Nothing may begin then: gRPC lets go of the stream as
      // soon as this function returns, and what a step would come back to is gone.
      if (finished_) return;
      ++requests_;
      held_bytes_ += request->bytes;
    }
    ++set_.in_flight_;
    Handle(request, arrived);
  }
  request.reset();
  {
    absl::MutexLock lock(&mutex_);
    ReadOrPause();
    if (!TakeFinish()) return;
  }
  Finish(finish_status_);
}

void StreamCall::EndReads(absl::Status why) {
  {
    absl::MutexLock lock(&mutex_);
    reads_done_ = true;
    fault_ = std::move(why);
    if (!TakeFinish()) return;
  }
  Finish(finish_status_);
}

void StreamCall::ReadOrPause() {
  if (finished_ || reads_done_ || closing_) return;  // a drain ends with what was read before it
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

void StreamCall::Handle(const std::shared_ptr<Request>& request, const ArrivedMessage& arrived) {
  core_.metrics.CallStarted();
  const v1::StreamRequest& message = request->message;
  switch (message.request_case()) {
    case v1::StreamRequest::kApply:
      request->method = "Stream.Apply";
      return HandleStep(request, DecodeApply(message.apply(), arrived.highway_bytes(), core_.decode_context()),
                        arrived);
    case v1::StreamRequest::kPrepare:
      request->method = "Stream.Prepare";
      return HandleStep(request, DecodePrepare(message.prepare(), core_.decode_context()), arrived);
    case v1::StreamRequest::kLookup:
      request->method = "Stream.Lookup";
      return HandleStep(request, DecodeLookup(message.lookup(), core_.decode_context()), arrived);
    case v1::StreamRequest::kRelease: {
      request->method = "Stream.Release";
      v1::StreamResponse reply;
      reply.set_last(true);
      reply.mutable_release()->set_released(ReleaseTickets(core_, message.release()));
      return Send(request, std::move(reply));
    }
    case v1::StreamRequest::kCloseSessions: {
      request->method = "Stream.CloseSessions";
      const auto& sessions = message.close_sessions().sessions();
      return RunCloseSessions(core_, {sessions.begin(), sessions.end()}, DeadlineOf(message),
                              [this, request](const absl::Status& status, int32_t closed) {
                                if (!status.ok()) return Fail(request, status);
                                v1::StreamResponse reply;
                                reply.set_last(true);
                                reply.mutable_close_sessions()->set_closed(closed);
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
                            const ArrivedMessage& arrived) {
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
  request->layers_left = request->reply.call.layers.size();
  if (const absl::Status staged = StageHighways(core_, arrived, request->reply); !staged.ok()) {
    return Fail(request, staged);
  }
  core_.metrics.StageTook(Stage::kDecode, absl::Now() - request->started);

  StepHooks hooks;
  hooks.deadline = DeadlineOf(request->message);
  hooks.stream = id_;
  hooks.cancelled = [this] { return cancelled_.load(std::memory_order_relaxed); };
  if (request->reply.call.form != Form::kPrepare) {
    hooks.layer_done = [this, request](size_t index) { LayerDone(request, index); };
  }
  hooks.done = [this, request](const absl::Status& status) {
    // Its last layer was its last message. Layers that are sent stand, whatever came after; and the stream may be gone.
    if (request->reply.call.form != Form::kPrepare && request->layers_left == 0) return;
    StepDone(request, status);
  };
  RunStep(core_, request->reply, std::move(hooks));
}

void StreamCall::LayerDone(const std::shared_ptr<Request>& request, size_t index) {
  v1::StreamResponse small;
  if (--request->layers_left == 0) {
    small.set_last(true);
    for (const absl::Status& status : request->reply.statuses) AddSequenceStatus(status, *small.add_sequences());
  }
  ReplyWriter tensors;
  tensors.Layer(v1::StreamResponse::kLayerFieldNumber, std::move(request->reply.results[index]));
  if (!request->reply.highways.empty()) request->reply.highways[index].reset();
  Send(request, std::move(small), std::move(tensors));
}

void StreamCall::StepDone(const std::shared_ptr<Request>& request, const absl::Status& status) {
  if (!status.ok()) return Fail(request, status);  // layers already sent stand; none is left to come
  v1::StreamResponse small;
  small.set_last(true);
  ReplyWriter tensors;
  tensors.Nest(v1::StreamResponse::kPrepareFieldNumber, WriteReply(request->reply, core_.identity.epoch));
  Send(request, std::move(small), std::move(tensors));
}

void StreamCall::Fail(const std::shared_ptr<Request>& request, const absl::Status& status) {
  const RefusalDetail detail = DetailOf(status);
  if (!detail.offenders.empty()) core_.metrics.Refused(ReasonName(detail.offenders.front().reason));
  v1::StreamResponse small;
  *small.mutable_error() = ToStatusMessage(status);
  small.set_last(true);
  Send(request, std::move(small));
}

void StreamCall::Send(const std::shared_ptr<Request>& request, v1::StreamResponse small, ReplyWriter tensors) {
  small.set_request_id(request->message.request_id());
  small.set_server_epoch(core_.identity.epoch);
  tensors.Fields(small);
  if (small.last()) {
    --set_.in_flight_;
    request->permit.GiveBackTokens();
    const absl::StatusCode code =
        small.has_error() ? static_cast<absl::StatusCode>(small.error().code()) : absl::StatusCode::kOk;
    core_.metrics.CallEnded(request->method, absl::StatusCodeToString(code), absl::Now() - request->started,
                            request->reply.call.request_bytes, request->reply.call.reply_bytes);
  }
  {
    absl::MutexLock lock(&mutex_);
    if (small.last()) --requests_;
    outgoing_.push_back({tensors.Take(), small.last(), request});
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
  StartWrite(&outgoing_.front().message);
}

void StreamCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    const Outgoing& sent = outgoing_.front();
    if (sent.last) held_bytes_ -= sent.request->bytes;
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
  } else if (!fault_.ok()) {
    finish_status_ = ToWireStatus(fault_);
    core_.metrics.Refused(ReasonName(DetailOf(fault_).offenders.front().reason));
  } else if (!reads_done_) {
    finish_status_ = ToWireStatus(RefuseDraining());
    core_.metrics.Refused(ReasonName(Reason::kDraining));
  }
  return true;
}

void StreamCall::OnDone() {
  core_.tickets.EndStream(id_);
  const auto code = static_cast<absl::StatusCode>(finish_status_.error_code());
  core_.metrics.CallEnded("Stream", absl::StatusCodeToString(cancelled_ ? absl::StatusCode::kCancelled : code),
                          absl::ZeroDuration(), 0, 0);
  set_.Remove(this);
  delete this;
}

}  // namespace engram
