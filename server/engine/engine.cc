#include "server/engine/engine.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "server/observe/log.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

absl::Status Stopped() {
  return Refuse({Reason::kDraining, "server", "", "", "the server is shutting down: use another replica"});
}

absl::string_view FormName(Form form) { return form == Form::kHighway ? "HIGHWAY" : "KV"; }

}  // namespace

Engine::Engine(std::shared_ptr<const EngramModel> model, std::unique_ptr<Backend> backend, EngineOptions options,
               Metrics& metrics)
    : model_(std::move(model)),
      backend_(std::move(backend)),
      options_(options),
      shape_{model_->geometry().max_ngram, model_->geometry().highway_values(), model_->geometry().outputs()},
      metrics_(metrics),
      thread_([this] { Loop(); }) {}

Engine::~Engine() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void Engine::Submit(std::unique_ptr<Call> call) {
  {
    absl::MutexLock lock(&mutex_);
    if (!stopping_) {
      arrived_.push_back({std::move(call), absl::Now(), {}, 0});
      return;
    }
  }
  call->done(Stopped());
}

void Engine::Loop() {
  while (AwaitCalls()) {
    const std::vector<Piece> pieces = NextBatch();
    if (!pieces.empty()) RunBatch(pieces);
    RetireDone();
  }
  for (Waiting& waiting : queue_) waiting.call->done(Stopped());
  queue_.clear();
}

// Moves what has arrived to the queue, sleeping while there is nothing to do. False: the engine stops.
bool Engine::AwaitCalls() {
  absl::MutexLock lock(&mutex_);
  if (queue_.empty()) {
    mutex_.Await(absl::Condition(
        +[](Engine* engine) ABSL_NO_THREAD_SAFETY_ANALYSIS { return engine->stopping_ || !engine->arrived_.empty(); },
        this));
  }
  queue_.splice(queue_.end(), arrived_);
  return !stopping_;
}

// The commit point, for a call that has not passed it. False: the call is over and answered.
bool Engine::TakesTurn(Waiting& waiting) {
  Call& call = *waiting.call;
  if (call.cancelled()) {
    call.done(absl::CancelledError("cancelled while it waited"));
    return false;
  }
  if (absl::Now() >= call.deadline) {
    call.done(absl::DeadlineExceededError("the deadline passed while it waited"));
    return false;
  }
  if (waiting.next > 0) return true;
  metrics_.StageTook(Stage::kQueue, absl::Now() - waiting.submitted);
  absl::StatusOr<std::vector<int32_t>> windows = call.commit();
  if (!windows.ok()) {
    call.done(windows.status());
    return false;
  }
  waiting.windows = *std::move(windows);
  return true;
}

std::vector<Piece> Engine::NextBatch() {
  std::vector<Piece> pieces;
  int64_t room = options_.max_batch_tokens;
  for (auto it = queue_.begin(); it != queue_.end() && room > 0;) {
    if (!TakesTurn(*it)) {
      it = queue_.erase(it);
      continue;
    }
    const int64_t end = std::min(it->call->tokens, it->next + room);
    pieces.push_back({it->call.get(), &it->windows, it->next, end});
    room -= end - it->next;
    it->next = end;
    ++it;
  }
  return pieces;
}

void Engine::RunBatch(const std::vector<Piece>& pieces) {
  const Step step = BuildStep(pieces, shape_);
  const absl::StatusOr<StepTimes> times = backend_->Run(step);
  if (!times.ok()) {
    // No call of the batch has an answer. Their histories stand: repeating the call gives what this one would have.
    Log(LogLevel::kError, "batch failed", {{"status", times.status().ToString()}});
    for (const Piece& piece : pieces) {
      const auto failed = std::find_if(queue_.begin(), queue_.end(),
                                       [&piece](const Waiting& waiting) { return waiting.call.get() == piece.call; });
      failed->call->done(times.status());
      queue_.erase(failed);
    }
    return;
  }
  metrics_.BatchRan(step.tokens);
  metrics_.StageTook(Stage::kHash, times->hash);
  metrics_.StageTook(Stage::kGather, times->gather);
  metrics_.StageTook(Stage::kProject, times->project);
  metrics_.StageTook(Stage::kGate, times->gate);
  metrics_.DeadTokens(step.dead_tokens);
  for (const StepLayer& work : step.layers) {
    int64_t tokens = 0;
    for (const StepSlice& slice : work.slices) {
      metrics_.TokensDone(model_->layers()[static_cast<size_t>(work.layer)].layer_id, FormName(slice.form),
                          slice.tokens);
      tokens += slice.tokens;
    }
    metrics_.RowsGathered(tokens * model_->geometry().columns);
  }
}

// Answers the calls whose last token is computed; they stand at the front, since calls are served in order.
void Engine::RetireDone() {
  while (!queue_.empty() && queue_.front().next == queue_.front().call->tokens) {
    queue_.front().call->done(absl::OkStatus());
    queue_.pop_front();
  }
}

}  // namespace engram
