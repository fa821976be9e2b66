// The queue, the batches and the thread that starts them.
//
// Calls of all clients wait in one queue. Whatever waits when the backend can take a step forms the next batch, up
// to max_batch_tokens: DECODE calls first, then PREFILL calls, each in order of arrival; a longer call is cut and goes
// on in the next batch, so a DECODE call waits for at most Backend::most_steps() batches.
//
// Whichever thread has the turn commits calls, starts batches and answers the calls of those that are done: the
// engine's own, or, for a light call that finds nothing under way, the one that submits it. One thread has it at a
// time, and none while there is nothing to do: batches under way need nobody. A backend tells on any thread that a
// layer or a batch is done; the former goes straight to the calls, the latter waits for the turn. A call that is cut
// over several batches is answered when none of them is under way any more, however it ends.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/backend.h"
#include "server/engine/call.h"
#include "server/model/engram_model.h"
#include "server/observe/metrics.h"

namespace engram {

struct EngineOptions {
  int64_t max_batch_tokens = 1024;
};

// Thread-safe.
class Engine {
 public:
  // `metrics` outlives the engine.
  Engine(std::shared_ptr<const EngramModel> model, std::unique_ptr<Backend> backend, StepShape shape,
         EngineOptions options, Metrics& metrics);
  // Waits for the batches under way; what still waits is refused with DRAINING.
  ~Engine();

  // Never waits for compute, and computes some ten microseconds at the most (Backend::IsLight). The call's `done` will
  // be called exactly once. The queue itself has no bound: the caller holds a permit for what it submits. A call whose
  // deadline has passed or that is cancelled when its turn comes ends with DEADLINE_EXCEEDED or CANCELLED, and its
  // commit does not run.
  void Submit(std::unique_ptr<Call> call);

  // Steps are the engine's to start; the rest of it is for everyone.
  Backend& backend() { return *backend_; }

 private:
  // A call from its submission to its answer. Who has the turn uses it, but for what says otherwise.
  struct Waiting {
    std::unique_ptr<Call> call;
    absl::Time submitted;
    bool light = false;  // Backend::IsLight
    bool committed = false;
    int64_t next = 0;                  // first token not yet in a batch
    int batches = 0;                   // under way, or done and not yet retired, that hold a piece of it
    absl::Status end = {};             // once it is in `leaving_`: what it is answered with
    std::atomic<bool> failed = false;  // a batch of it failed; from that batch's end on, any thread
  };
  using Queue = std::list<Waiting>;  // a list, since batches point at its calls

  struct Batch {
    std::vector<Piece> pieces;
    std::vector<Queue::iterator> calls;  // of each piece
    Step step;
    absl::StatusOr<StepTimes> times = StepTimes{};  // once it is done
  };
  using Batches = std::list<Batch>;  // a list, since the backend works on them

  void Loop();
  bool TakeTurn();
  bool GoOn();
  Queue EndTurn(int left);
  void AwaitBatches();
  bool CanStart() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartAndRetire();
  void StartNextBatch();
  void Enqueue(Queue& arrived);
  void TakeFrom(Queue& queue, int64_t& room, Batch& batch);
  std::optional<absl::Status> EndBeforeBatch(Waiting& waiting);
  void End(Queue& queue, Queue::iterator waiting, absl::Status status);
  void TellLayersDone(const Batch& batch, size_t index);
  void BatchDone(Batches::iterator batch, absl::StatusOr<StepTimes> times);
  void RetireDone();
  void Retire(const Batch& batch);
  void Fail(Queue::iterator waiting, const absl::Status& status);
  void Count(const Step& step, const StepTimes& times);

  const std::shared_ptr<const EngramModel> model_;
  const StepShape shape_;
  const EngineOptions options_;
  Metrics& metrics_;

  std::mutex mutex_;              // as in SessionTable
  std::condition_variable wake_;  // there is something to do and nobody has the turn, or stop
  Queue arrived_ ABSL_GUARDED_BY(mutex_);
  Batches under_way_ ABSL_GUARDED_BY(mutex_);   // started
  Batches done_ ABSL_GUARDED_BY(mutex_);        // to be retired
  bool taken_ ABSL_GUARDED_BY(mutex_) = false;  // somebody has the turn
  bool more_ ABSL_GUARDED_BY(mutex_) = false;   // whoever had it left calls in the queues
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  // Calls of a queue not yet committed, counted by the sessions they touch: none of these may be overtaken. By hash:
  // two sessions of one hash keep an order that nobody asked for, which harms nobody.
  class SessionCounts {
   public:
    void Add(const Call& call);
    void Remove(const Call& call);
    // Does it touch a session that one of them touches?
    bool Meets(const Call& call) const;

   private:
    absl::flat_hash_map<size_t, int> counts_;
  };

  // Of whoever has the turn. In the queues are calls of which tokens, or all, are not yet in a batch; once there is
  // nothing left to start of a call that has been in one, it is among the leaving until it is answered.
  Queue decode_, prefill_, leaving_;
  SessionCounts decode_sessions_, prefill_sessions_;

  // After what its last words touch: it ends first.
  const std::unique_ptr<Backend> backend_;
  const size_t most_steps_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace engram
