// The queue, the batch and the thread that runs them.
//
// Calls of all clients wait in one queue, in order of arrival. Whatever waits when the engine becomes free forms the
// next batch, up to max_batch_tokens; a longer call is cut and goes on in the next batch. One batch runs at a time.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
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
  Engine(std::shared_ptr<const EngramModel> model, std::unique_ptr<Backend> backend, EngineOptions options,
         Metrics& metrics);
  // Finishes the batch at hand; what still waits is refused with DRAINING.
  ~Engine();

  // Never blocks on compute. The call's `done` will be called exactly once. The queue itself has no bound: the caller
  // holds a permit for what it submits. A call whose deadline has passed or that is cancelled when its turn comes ends
  // with DEADLINE_EXCEEDED or CANCELLED, and its history is not written.
  void Submit(std::unique_ptr<Call> call);

  const Backend& backend() const { return *backend_; }

 private:
  struct Waiting {
    std::unique_ptr<Call> call;
    absl::Time submitted;
    std::vector<int32_t> windows;  // empty until committed
    int64_t next = 0;              // first token not yet computed
  };

  void Loop();
  bool AwaitCalls();
  std::vector<Piece> NextBatch();
  bool TakesTurn(Waiting& waiting);
  void RunBatch(const std::vector<Piece>& pieces);
  void RetireDone();

  const std::shared_ptr<const EngramModel> model_;
  const std::unique_ptr<Backend> backend_;
  const EngineOptions options_;
  const StepShape shape_;
  Metrics& metrics_;

  absl::Mutex mutex_;
  std::list<Waiting> arrived_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::list<Waiting> queue_;  // the engine thread's own; a list, since pieces point into its elements
  std::thread thread_;        // last: it uses all of the above
};

}  // namespace engram
