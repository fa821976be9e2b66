// The answers that one layer waits for: counted down by whatever threads they come on, waited for by the worker's.
#pragma once

#include <algorithm>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/bench/worker/clock.h"

namespace engram::bench {

// Thread-safe. Outlives the answers it expects.
class Arrival {
 public:
  Arrival() = default;
  // Whoever told of the last answer may still be leaving.
  ~Arrival() { absl::MutexLock lock(&mutex_); }

  // Before any of them can come, and after all that were expected before have.
  void Expect(int answers) {
    absl::MutexLock lock(&mutex_);
    missing_ = answers;
    at_ = absl::ZeroDuration();
    failures_.clear();
  }

  void Answered(const absl::Status& status) {
    const absl::Duration now = ClockNow();
    absl::MutexLock lock(&mutex_);
    at_ = std::max(at_, now);
    if (!status.ok()) failures_.push_back(status);
    --missing_;
  }

  struct Outcome {
    absl::Duration at;                   // of the last answer (clock.h)
    std::vector<absl::Status> failures;  // those that were not OK
  };

  // Blocks until none is missing.
  Outcome Await() {
    const auto none_missing = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return missing_ == 0; };
    absl::MutexLock lock(&mutex_, absl::Condition(&none_missing));
    return {at_, failures_};
  }

 private:
  absl::Mutex mutex_;
  int missing_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration at_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Status> failures_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace engram::bench
