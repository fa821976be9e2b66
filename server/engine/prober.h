// Runs the probe again and again while the server serves.
#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/engine/probe.h"

namespace engram {

class Prober {
 public:
  // Probes on a thread of its own, `interval` after the last probe ended, and hands `report` each outcome on that
  // thread. `probe` and `engine` outlive it.
  Prober(const Probe& probe, Engine& engine, absl::Duration interval, std::function<void(const absl::Status&)> report);
  // Waits for a probe that is under way; no report comes after it.
  ~Prober();

 private:
  void Loop();

  const Probe& probe_;
  Engine& engine_;
  const absl::Duration interval_;
  const std::function<void(const absl::Status&)> report_;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace engram
