#include "client/bench/worker/step_schedule.h"

#include <algorithm>

namespace engram::bench {

StepSchedule::StepSchedule(absl::Duration step, int depth, absl::Span<const int32_t> layer_ids) : step_(step) {
  for (const int32_t layer : layer_ids) shares_.push_back(step * layer / depth);
}

void StepSchedule::Begin(absl::Duration start) {
  start_ = start;
  exposed_ = absl::ZeroDuration();
}

absl::Duration StepSchedule::Arrived(size_t index, absl::Duration ready) {
  const absl::Duration wait = std::max(absl::ZeroDuration(), ready - ReachedAt(index));
  exposed_ += wait;
  return wait;
}

}  // namespace engram::bench
