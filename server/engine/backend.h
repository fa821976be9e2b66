// Where a step is computed: host memory today, a GPU beside it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/staging.h"
#include "server/engine/step.h"

namespace engram {

struct StepTimes {
  absl::Duration hash, gather, project, gate;  // summed over the step's layers
  absl::Duration h2d, d2h;                     // likewise, where there is a device; zero elsewhere
  // False: gather, project and gate of some layer ran as one, so that what is said of the three is not all of it.
  bool stages_timed = true;
  int64_t rows_gathered = 0;
};

// Called once each, on any thread, perhaps before Start() returns; they must not block. One at a time over all steps,
// and in order: nothing is told of a step before the one started earlier is done.
using LayerDone = std::function<void(size_t index)>;
using StepDone = std::function<void(absl::StatusOr<StepTimes> times)>;

// Used by one thread at a time, but for what is thread-safe.
class Backend {
 public:
  // Waits for the steps under way.
  virtual ~Backend() = default;

  // Steps that may be under way at once: Start() is called for no more before the first of them is done.
  virtual int most_steps() const { return 1; }

  // Computes the step, which outlives `done`: writes every slice's outputs, layer by layer, and calls
  // layer_done(i) when step.layers[i] is written, in ascending order, then done(times). A failure means that no output
  // of a layer not yet done may be used. Steps are done in the order of their starts.
  //
  // A step never reads what another one under way writes, neither kv nor ids (Step::id_copies): calls by a ticket are
  // committed after its Prepare is done. All memory that a step names is the step's until it is done: highways are read
  // at any time until their layer is done, and id copies written at any time until `done`.
  virtual void Start(const Step& step, LayerDone layer_done, StepDone done) = 0;

  // Would the call alone take some ten microseconds and wait for nothing? The engine may then run it on the thread that
  // submits it, when nothing else waits: waking another thread would cost more. Thread-safe.
  virtual bool IsLight(const Call& /*call*/) const { return false; }

  // Where a ticket's kv stands: memory that steps write and read as StepSlice::kv and nobody else looks into. Aligned
  // to 64; null where there is no more. Thread-safe; blocks may outlive the backend.
  virtual StagingMemory TakePreparedKv(int64_t bytes) = 0;
  // What it has given and keeps of host memory; a device's memory does not count. Thread-safe.
  virtual StagingStats prepared_stats() const { return {}; }

  // How memory is made that highways and results stand in, so that steps reach it fastest.
  virtual StagingSource staging_source() const { return StagingSource::Ordinary(); }

  // Not OK: it has met an error that it cannot recover from, and every later step fails with it. Thread-safe.
  virtual absl::Status health() const { return absl::OkStatus(); }

  virtual std::string name() const = 0;  // "cpu", "cuda"
  // What decides the bits of everything but rows: backend, algorithm set, ISA, libraries. docs/numerics.md.
  virtual std::string numerics_id() const = 0;
};

}  // namespace engram
