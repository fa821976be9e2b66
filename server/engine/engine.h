// The queue, the batch and the thread that runs them.
//
// Calls of all clients wait in one queue. Whatever waits when the engine becomes free forms the next batch, up to
// max_batch_tokens: DECODE calls first, then PREFILL calls, each in order of arrival; a longer call is cut and goes on
// in the next batch, so a DECODE call waits for at most one batch. One batch runs at a time, on whichever thread has
// the turn: the engine's own, or, for a light call that finds nothing under way, the one that submits it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
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
  // Finishes the batch at hand; what still waits is refused with DRAINING.
  ~Engine();

  // Never waits for compute, and computes some ten microseconds at the most (Backend::IsLight). The call's `done` will
  // be called exactly once. The queue itself has no bound: the caller holds a permit for what it submits. A call whose
  // deadline has passed or that is cancelled when its turn comes ends with DEADLINE_EXCEEDED or CANCELLED, and its
  // commit does not run.
  void Submit(std::unique_ptr<Call> call);

  const Backend& backend() const { return *backend_; }

 private:
  struct Waiting {
    std::unique_ptr<Call> call;
    absl::Time submitted;
    bool light = false;  // Backend::IsLight
    bool committed = false;
    int64_t next = 0;  // first token not yet computed
  };
  using Queue = std::list<Waiting>;  // a list, since pieces point at its calls

  void Loop();
  bool TakeTurn();
  bool GoOn();
  Queue EndTurn(int left);
  void RunNextBatch();
  void Enqueue(Queue& arrived);
  std::vector<Piece> NextBatch();
  void TakeFrom(Queue& queue, int64_t& room, std::vector<Piece>& pieces);
  bool TakesTurn(Waiting& waiting);
  void RunBatch(const std::vector<Piece>& pieces);
  void TellLayersDone(const std::vector<Piece>& pieces, int layer);
  void FailBatch(const std::vector<Piece>& pieces, const absl::Status& status);
  void Count(const Step& step, const StepTimes& times);
  void RetireDone();

  const std::shared_ptr<const EngramModel> model_;
  const std::unique_ptr<Backend> backend_;
  const StepShape shape_;
  const EngineOptions options_;
  Metrics& metrics_;

  std::mutex mutex_;              // as in SessionTable
  std::condition_variable wake_;  // something waits and nobody has the turn, or stop
  Queue arrived_ ABSL_GUARDED_BY(mutex_);
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

  // Of whoever has the turn.
  Queue decode_, prefill_;
  SessionCounts decode_sessions_, prefill_sessions_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace engram
