// Where a step is computed: host memory today, a GPU beside it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/step.h"

namespace engram {

struct StepTimes {
  absl::Duration hash, gather, project, gate;  // summed over the step's layers
  int64_t rows_gathered = 0;
};

// Used by one thread at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  // Computes the step: writes every slice's outputs, layer by layer, and calls layer_done(i) when step.layers[i] is
  // written, before the next begins. A failure means that no output of a layer not yet done may be used.
  virtual absl::StatusOr<StepTimes> Run(const Step& step, const std::function<void(size_t)>& layer_done) = 0;

  // Would the call alone take some ten microseconds and wait for nothing? The engine may then run it on the thread that
  // submits it, when nothing else waits: waking another thread would cost more. Thread-safe.
  virtual bool IsLight(const Call& /*call*/) const { return false; }

  virtual std::string name() const = 0;  // "cpu"
  // What decides the bits of everything but rows: backend, algorithm set, ISA, libraries. docs/numerics.md.
  virtual std::string numerics_id() const = 0;
};

}  // namespace engram
