// Where a step is computed: host memory today, a GPU beside it.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/step.h"

namespace engram {

struct StepTimes {
  absl::Duration hash, gather, project, gate;  // summed over the step's layers
};

// Used by one thread at a time.
class Backend {
 public:
  virtual ~Backend() = default;

  // Computes the step: writes every slice's `out`. A failure means that no output may be used.
  virtual absl::StatusOr<StepTimes> Run(const Step& step) = 0;

  virtual std::string name() const = 0;  // "cpu"
  // What decides the bits of everything but rows: backend, ISA, algorithm set. docs/numerics.md.
  virtual std::string numerics_id() const = 0;
};

}  // namespace engram
