#include "server/engine/prober.h"

#include <utility>

namespace engram {

Prober::Prober(const Probe& probe, Engine& engine, absl::Duration interval,
               std::function<void(const absl::Status&)> report)
    : probe_(probe), engine_(engine), interval_(interval), report_(std::move(report)), thread_([this] { Loop(); }) {}

Prober::~Prober() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  thread_.join();
}

void Prober::Loop() {
  for (;;) {
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_), interval_)) return;
    }
    report_(probe_.Run(engine_));
  }
}

}  // namespace engram
