#include "server/engine/engine.h"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "server/observe/log.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

// Of a batch, what PREFILL calls get while DECODE calls could fill all of it: an eighth, so that neither ever waits for
// the other to end.
constexpr int64_t kPrefillShare = 8;

// That a thread which submits runs in a row, of some ten microseconds each: it has messages to read.
constexpr int kMostLightCalls = 4;

absl::string_view FormName(Form form) {
  switch (form) {
    case Form::kHighway:
      return "HIGHWAY";
    case Form::kKv:
      return "KV";
    case Form::kRowsNative:
      return "ROWS_NATIVE";
    case Form::kRowsBf16:
      return "ROWS_BF16";
    case Form::kUpdate:
      return "UPDATE";
    case Form::kGate:
      return "GATE";
    case Form::kPrepare:
      return "PREPARE";
  }
  return "";
}

}  // namespace

Engine::Engine(std::shared_ptr<const EngramModel> model, std::unique_ptr<Backend> backend, StepShape shape,
               EngineOptions options, Metrics& metrics)
    : model_(std::move(model)),
      backend_(std::move(backend)),
      shape_(shape),
      options_(options),
      metrics_(metrics),
      thread_([this] { Loop(); }) {}

Engine::~Engine() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void Engine::Submit(std::unique_ptr<Call> call) {
  Waiting waiting{std::move(call), absl::Now()};
  waiting.light = backend_->IsLight(*waiting.call);
  Queue here;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_) {
      const bool alone = !taken_ && !more_ && arrived_.empty();
      (waiting.light && alone ? here : arrived_).push_back(std::move(waiting));
      if (!here.empty()) taken_ = true;
      if (!taken_) wake_.notify_one();
    }
  }
  if (waiting.call != nullptr) return waiting.call->done(*waiting.call, RefuseDraining());
  for (int left = kMostLightCalls - 1; !here.empty(); --left) {
    Enqueue(here);
    RunNextBatch();
    here = EndTurn(left);
  }
}

void Engine::Loop() {
  while (TakeTurn()) {
    do {
      RunNextBatch();
    } while (GoOn());
  }
  for (Queue* queue : {&decode_, &prefill_}) {
    for (Waiting& waiting : *queue) waiting.call->done(*waiting.call, RefuseDraining());
    queue->clear();
  }
}

void Engine::RunNextBatch() {
  const std::vector<Piece> pieces = NextBatch();
  if (!pieces.empty()) RunBatch(pieces);
  RetireDone();
}

// Sleeps until there is something to do, and queues what has arrived. False: the engine stops.
bool Engine::TakeTurn() {
  Queue arrived;
  bool stopping = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(
        lock, [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !taken_ && (stopping_ || more_ || !arrived_.empty()); });
    taken_ = true;
    more_ = false;
    stopping = stopping_;
    arrived.splice(arrived.end(), arrived_);
  }
  Enqueue(arrived);
  return !stopping;
}

// Keeps the turn as long as there is something to do, and queues what has arrived. False: the turn is over.
bool Engine::GoOn() {
  Queue arrived;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    arrived.splice(arrived.end(), arrived_);
    more_ = !decode_.empty() || !prefill_.empty();
    taken_ = !stopping_ && (more_ || !arrived.empty());
    if (!taken_) {
      more_ |= !arrived.empty();
      arrived_.splice(arrived_.end(), arrived);
      return false;
    }
    more_ = false;
  }
  Enqueue(arrived);
  return true;
}

// Of a turn on a thread that submitted: the next call to run there, if it is light and `left` > 0; with none the turn
// is over, and what has arrived is the engine thread's.
Engine::Queue Engine::EndTurn(int left) {
  Queue next;
  const std::lock_guard<std::mutex> lock(mutex_);
  more_ = !decode_.empty() || !prefill_.empty();
  if (left > 0 && !stopping_ && !more_ && !arrived_.empty() && arrived_.front().light) {
    next.splice(next.end(), arrived_, arrived_.begin());
    return next;
  }
  taken_ = false;
  if (stopping_ || more_ || !arrived_.empty()) wake_.notify_one();
  return next;
}

void Engine::SessionCounts::Add(const Call& call) {
  for (const std::string& key : call.session_keys) ++counts_[std::hash<std::string>{}(key)];
}

void Engine::SessionCounts::Remove(const Call& call) {
  for (const std::string& key : call.session_keys) {
    const auto found = counts_.find(std::hash<std::string>{}(key));
    if (--found->second == 0) counts_.erase(found);
  }
}

bool Engine::SessionCounts::Meets(const Call& call) const {
  return std::any_of(call.session_keys.begin(), call.session_keys.end(),
                     [this](const std::string& key) { return counts_.contains(std::hash<std::string>{}(key)); });
}

// A DECODE call follows a PREFILL call of its session through the PREFILL queue.
void Engine::Enqueue(Queue& arrived) {
  while (!arrived.empty()) {
    const Call& call = *arrived.front().call;
    const bool decode = call.priority == Priority::kDecode && !prefill_sessions_.Meets(call);
    (decode ? decode_sessions_ : prefill_sessions_).Add(call);
    Queue& queue = decode ? decode_ : prefill_;
    queue.splice(queue.end(), arrived, arrived.begin());
  }
}

// The commit point, for a call that has not passed it. False: the call is over and answered.
bool Engine::TakesTurn(Waiting& waiting) {
  Call& call = *waiting.call;
  if (call.cancelled()) {
    call.done(call, absl::CancelledError("cancelled while it waited"));
    return false;
  }
  if (absl::Now() >= call.deadline) {
    call.done(call, absl::DeadlineExceededError("the deadline passed while it waited"));
    return false;
  }
  if (waiting.committed) return true;
  waiting.committed = true;
  if (!call.uncounted) metrics_.StageTook(Stage::kQueue, absl::Now() - waiting.submitted);
  if (const absl::Status status = call.commit(call); !status.ok()) {
    call.done(call, status);
    return false;
  }
  if (call.layers.empty()) {  // all it wanted was its commit, in its turn
    call.done(call, absl::OkStatus());
    return false;
  }
  return true;
}

void Engine::TakeFrom(Queue& queue, int64_t& room, std::vector<Piece>& pieces) {
  for (auto it = queue.begin(); it != queue.end() && room > 0;) {
    const bool first_look = !it->committed;
    // DECODE calls of its session, which came before it, still wait: so does it, and all behind it. They are committed
    // before long, since nothing overtakes them.
    if (first_look && &queue == &prefill_ && decode_sessions_.Meets(*it->call)) return;
    const bool goes_on = TakesTurn(*it);
    if (first_look) (&queue == &decode_ ? decode_sessions_ : prefill_sessions_).Remove(*it->call);
    if (!goes_on) {
      it = queue.erase(it);
      continue;
    }
    const int64_t end = std::min(it->call->tokens, it->next + room);
    pieces.push_back({it->call.get(), it->next, end});
    room -= end - it->next;
    it->next = end;
    ++it;
  }
}

std::vector<Piece> Engine::NextBatch() {
  std::vector<Piece> pieces;
  const int64_t kept = prefill_.empty() ? 0 : options_.max_batch_tokens / kPrefillShare;
  int64_t room = options_.max_batch_tokens - kept;
  TakeFrom(decode_, room, pieces);
  room += kept;
  TakeFrom(prefill_, room, pieces);
  return pieces;
}

void Engine::RunBatch(const std::vector<Piece>& pieces) {
  const Step step = BuildStep(pieces, shape_);
  const absl::StatusOr<StepTimes> times =
      backend_->Run(step, [&](size_t i) { TellLayersDone(pieces, step.layers[i].layer); });
  if (!times.ok()) {
    FailBatch(pieces, times.status());
    return;
  }
  const auto uncounted = [](const Piece& piece) { return piece.call->uncounted; };
  if (!std::all_of(pieces.begin(), pieces.end(), uncounted)) Count(step, *times);
}

// Tells the calls whose last piece this batch holds that `layer` is written.
void Engine::TellLayersDone(const std::vector<Piece>& pieces, int layer) {
  for (const Piece& piece : pieces) {
    Call& call = *piece.call;
    if (call.layer_done == nullptr || piece.end != call.tokens) continue;
    for (size_t i = 0; i < call.layers.size(); ++i) {
      if (call.layers[i].layer == layer) call.layer_done(call, i);
    }
  }
}

// No call of the batch has an answer. Their histories stand: repeating the call gives what this one would have.
void Engine::FailBatch(const std::vector<Piece>& pieces, const absl::Status& status) {
  Log(LogLevel::kError, "batch failed", {{"status", status.ToString()}});
  for (const Piece& piece : pieces) {
    for (Queue* queue : {&decode_, &prefill_}) {
      const auto failed = std::find_if(queue->begin(), queue->end(),
                                       [&piece](const Waiting& waiting) { return waiting.call.get() == piece.call; });
      if (failed == queue->end()) continue;
      failed->call->done(*failed->call, status);
      queue->erase(failed);
      break;
    }
  }
}

void Engine::Count(const Step& step, const StepTimes& times) {
  metrics_.StageTook(Stage::kHash, times.hash);
  metrics_.StageTook(Stage::kGather, times.gather);
  metrics_.StageTook(Stage::kProject, times.project);
  metrics_.StageTook(Stage::kGate, times.gate);
  metrics_.DeadTokens(step.dead_tokens);
  metrics_.RowsGathered(times.rows_gathered);
  int64_t most = 0;
  for (const StepLayer& work : step.layers) {
    int64_t tokens = 0;
    for (const StepSlice& slice : work.slices) {
      if (slice.uncounted) continue;
      metrics_.TokensDone(model_->layers()[static_cast<size_t>(work.layer)].layer_id, FormName(slice.form),
                          slice.tokens);
      tokens += slice.tokens;
    }
    most = std::max(most, tokens);
  }
  if (most > 0) metrics_.BatchRan(most);
}

// Answers the calls whose last token is computed; they stand at the front of their queue, since each is served in
// order.
void Engine::RetireDone() {
  for (Queue* queue : {&decode_, &prefill_}) {
    while (!queue->empty() && queue->front().committed && queue->front().next == queue->front().call->tokens) {
      queue->front().call->done(*queue->front().call, absl::OkStatus());
      queue->pop_front();
    }
  }
}

}  // namespace engram
