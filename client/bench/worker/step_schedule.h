// When a step's layers are reached, and what waiting for the engram costs.
//
// A model of `depth` equal layers takes `step` for one step when nothing is waited for; layer L is reached at L / depth
// of it. What a layer needs and is not there yet is waited for, and everything after comes that much later.
//
// Moments are durations since any one origin (clock.h). Pure. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace engram::bench {

class StepSchedule {
 public:
  // `layer_ids` ascend, each in [0, depth).
  StepSchedule(absl::Duration step, int depth, absl::Span<const int32_t> layer_ids);

  size_t layers() const { return shares_.size(); }

  // A step begins: its ids are known.
  void Begin(absl::Duration start);
  absl::Duration start() const { return start_; }

  // When layer layer_ids[index] is reached, as far as is known: all before it have arrived.
  absl::Duration ReachedAt(size_t index) const { return start_ + shares_[index] + exposed_; }

  // What that layer needs was there at `ready`: the wait that is left, zero where it was there in time. Called once per
  // layer, in order.
  absl::Duration Arrived(size_t index, absl::Duration ready);

  // All waits of this step so far; when the step is over.
  absl::Duration exposed() const { return exposed_; }
  absl::Duration end() const { return start_ + step_ + exposed_; }

 private:
  absl::Duration step_;
  std::vector<absl::Duration> shares_;
  absl::Duration start_, exposed_;
};

}  // namespace engram::bench
