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
      shape_(shape),
      options_(options),
      metrics_(metrics),
      backend_(std::move(backend)),
      most_steps_(static_cast<size_t>(backend_->most_steps())),
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
  Queue here;
  here.emplace_back(std::move(call), absl::Now());
  Waiting& waiting = here.front();
  waiting.light = backend_->IsLight(*waiting.call);
  bool refused = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool alone = !taken_ && !more_ && arrived_.empty() && under_way_.empty() && done_.empty();
    if (stopping_) {
      refused = true;
    } else if (waiting.light && alone) {
      taken_ = true;
    } else {
      arrived_.splice(arrived_.end(), here);
      if (!taken_ && CanStart()) wake_.notify_one();
    }
  }
  if (refused) return waiting.call->done(*waiting.call, RefuseDraining());
  for (int left = kMostLightCalls - 1; !here.empty(); --left) {
    Enqueue(here);
    StartAndRetire();
    here = EndTurn(left);
  }
}

void Engine::Loop() {
  while (TakeTurn()) {
    do {
      StartAndRetire();
    } while (GoOn());
  }
  AwaitBatches();
  for (Queue* queue : {&decode_, &prefill_}) {
    for (Waiting& waiting : *queue) waiting.call->done(*waiting.call, RefuseDraining());
    queue->clear();
  }
}

bool Engine::CanStart() const { return under_way_.size() < most_steps_; }

void Engine::StartAndRetire() {
  bool can_start = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    can_start = CanStart();
  }
  if (can_start) StartNextBatch();
  RetireDone();
}

// Sleeps until there is something to do, and queues what has arrived. False: the engine stops, and the turn is taken
// for good.
bool Engine::TakeTurn() {
  Queue arrived;
  bool stopping = false;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return !taken_ && (stopping_ || !done_.empty() || (CanStart() && (more_ || !arrived_.empty())));
    });
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
    more_ = !decode_.empty() || !prefill_.empty();
    taken_ = !stopping_ && (!done_.empty() || (CanStart() && (more_ || !arrived_.empty())));
    if (!taken_) return false;
    more_ = false;
    arrived.splice(arrived.end(), arrived_);
  }
  Enqueue(arrived);
  return true;
}

// Of a turn on a thread that submitted: the next call to run there, if it is light, nothing is under way and `left` >
// 0; with none the turn is over, and what has arrived is the engine thread's.
Engine::Queue Engine::EndTurn(int left) {
  Queue next;
  const std::lock_guard<std::mutex> lock(mutex_);
  more_ = !decode_.empty() || !prefill_.empty();
  const bool alone = !more_ && under_way_.empty() && done_.empty();
  if (left > 0 && !stopping_ && alone && !arrived_.empty() && arrived_.front().light) {
    next.splice(next.end(), arrived_, arrived_.begin());
    return next;
  }
  taken_ = false;
  if (stopping_ || !done_.empty() || (CanStart() && (more_ || !arrived_.empty()))) wake_.notify_one();
  return next;
}

// Of an engine that stops: no batch is under way any more, and what was in one alone is answered.
void Engine::AwaitBatches() {
  for (bool all = false; !all;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return under_way_.empty() || !done_.empty(); });
      all = under_way_.empty();
    }
    RetireDone();
  }
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

// The commit point, for a call that has not passed it. What the call is to be answered with, if it goes no further.
std::optional<absl::Status> Engine::EndBeforeBatch(Waiting& waiting) {
  Call& call = *waiting.call;
  if (call.cancelled()) return absl::CancelledError("cancelled while it waited");
  if (absl::Now() >= call.deadline) return absl::DeadlineExceededError("the deadline passed while it waited");
  if (waiting.committed) return std::nullopt;
  waiting.committed = true;
  if (!call.uncounted) metrics_.StageTook(Stage::kQueue, absl::Now() - waiting.submitted);
  if (absl::Status status = call.commit(call); !status.ok()) return status;
  if (call.layers.empty()) return absl::OkStatus();  // all it wanted was its commit, in its turn
  return std::nullopt;
}

// Nothing more of the call is started: it is answered, now or when the last batch that holds a piece of it is retired.
void Engine::End(Queue& queue, Queue::iterator waiting, absl::Status status) {
  if (waiting->batches > 0) {
    waiting->end = std::move(status);
    leaving_.splice(leaving_.end(), queue, waiting);
    return;
  }
  waiting->call->done(*waiting->call, std::move(status));
  queue.erase(waiting);
}

void Engine::TakeFrom(Queue& queue, int64_t& room, Batch& batch) {
  for (auto next = queue.begin(); next != queue.end() && room > 0;) {
    const auto waiting = next++;
    if (waiting->failed) continue;  // it ends with its batch, which is about to be retired
    const bool first_look = !waiting->committed;
    // DECODE calls of its session, which came before it, still wait: so does it, and all behind it. They are committed
    // before long, since nothing overtakes them.
    if (first_look && &queue == &prefill_ && decode_sessions_.Meets(*waiting->call)) return;
    std::optional<absl::Status> end = EndBeforeBatch(*waiting);
    if (first_look) (&queue == &decode_ ? decode_sessions_ : prefill_sessions_).Remove(*waiting->call);
    if (end.has_value()) {
      End(queue, waiting, *std::move(end));
      continue;
    }
    const int64_t until = std::min(waiting->call->tokens, waiting->next + room);
    batch.pieces.push_back({waiting->call.get(), waiting->next, until});
    batch.calls.push_back(waiting);
    room -= until - waiting->next;
    waiting->next = until;
    ++waiting->batches;
    if (until == waiting->call->tokens) leaving_.splice(leaving_.end(), queue, waiting);
  }
}

void Engine::StartNextBatch() {
  Batches one;
  Batch& batch = one.emplace_back();
  const int64_t kept = prefill_.empty() ? 0 : options_.max_batch_tokens / kPrefillShare;
  int64_t room = options_.max_batch_tokens - kept;
  TakeFrom(decode_, room, batch);
  room += kept;
  TakeFrom(prefill_, room, batch);
  if (batch.pieces.empty()) return;
  batch.step = BuildStep(batch.pieces, shape_);
  const auto started = one.begin();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    under_way_.splice(under_way_.end(), one);
  }
  backend_->Start(
      batch.step, [this, &batch](size_t index) { TellLayersDone(batch, index); },
      [this, started](absl::StatusOr<StepTimes> times) { BatchDone(started, std::move(times)); });
}

// Tells the calls whose last piece this batch holds that a layer is written. Any thread: nobody else touches what it
// reads before the batch is done. A call that failed in an earlier batch, which is done by now, hears nothing more.
void Engine::TellLayersDone(const Batch& batch, size_t index) {
  const int layer = batch.step.layers[index].layer;
  for (size_t p = 0; p < batch.pieces.size(); ++p) {
    Call& call = *batch.pieces[p].call;
    if (call.layer_done == nullptr || batch.pieces[p].end != call.tokens || batch.calls[p]->failed) continue;
    for (size_t i = 0; i < call.layers.size(); ++i) {
      if (call.layers[i].layer == layer) call.layer_done(call, i);
    }
  }
}

// Any thread. As soon as the mutex is let go the batch may be gone.
void Engine::BatchDone(Batches::iterator batch, absl::StatusOr<StepTimes> times) {
  const std::lock_guard<std::mutex> lock(mutex_);
  batch->times = std::move(times);
  if (!batch->times.ok()) {
    for (const Queue::iterator& waiting : batch->calls) waiting->failed = true;
  }
  done_.splice(done_.end(), under_way_, batch);
  if (!taken_ || stopping_) wake_.notify_one();
}

void Engine::RetireDone() {
  Batches done;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    done.splice(done.end(), done_);
  }
  for (const Batch& batch : done) Retire(batch);
}

// Answers the calls that were in this batch last.
void Engine::Retire(const Batch& batch) {
  if (!batch.times.ok()) {
    Log(LogLevel::kError, "batch failed", {{"status", batch.times.status().ToString()}});
  } else if (!std::all_of(batch.pieces.begin(), batch.pieces.end(), [](const Piece& p) { return p.call->uncounted; })) {
    Count(batch.step, *batch.times);
  }
  for (const Queue::iterator& waiting : batch.calls) {
    if (!batch.times.ok()) Fail(waiting, batch.times.status());
    --waiting->batches;
    const bool leaves = waiting->next == waiting->call->tokens || !waiting->end.ok();
    if (waiting->batches == 0 && leaves) End(leaving_, waiting, waiting->end);
  }
}

// The call has no answer, and nothing more of it is started. Its histories stand: repeating the call gives what this
// one would have. One that has ended otherwise, while this batch of it was under way, keeps that end.
void Engine::Fail(Queue::iterator waiting, const absl::Status& status) {
  if (!waiting->end.ok()) return;
  if (waiting->next == waiting->call->tokens) {
    waiting->end = status;
    return;
  }
  for (Queue* queue : {&decode_, &prefill_}) {
    const auto same = [&waiting](const Waiting& one) { return &one == &*waiting; };
    if (std::any_of(queue->begin(), queue->end(), same)) return End(*queue, waiting, status);
  }
}

void Engine::Count(const Step& step, const StepTimes& times) {
  metrics_.StageTook(Stage::kHash, times.hash);
  if (times.stages_timed) {
    metrics_.StageTook(Stage::kGather, times.gather);
    metrics_.StageTook(Stage::kProject, times.project);
    metrics_.StageTook(Stage::kGate, times.gate);
  }
  if (backend_->name() != "cpu") {
    metrics_.StageTook(Stage::kH2d, times.h2d);
    metrics_.StageTook(Stage::kD2h, times.d2h);
  }
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

}  // namespace engram
