// Gives tickets back in the background: their step is over, and the next one is not to wait for it.
#pragma once

#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "client/engram_client.h"

namespace engram::bench {

// Thread-safe. A ticket that cannot be given back ends by its TTL.
class TicketReturns {
 public:
  explicit TicketReturns(client::Client& client) : client_(client), thread_([this] { Loop(); }) {}

  // Gives back what it still has, and waits for it.
  ~TicketReturns() {
    {
      absl::MutexLock lock(&mutex_);
      ending_ = true;
    }
    thread_.join();
  }

  void Return(client::Prepared prepared) {
    absl::MutexLock lock(&mutex_);
    waiting_.push_back(std::move(prepared));
  }

 private:
  void Loop() {
    while (true) {
      client::Prepared next;
      {
        const auto more = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || !waiting_.empty(); };
        absl::MutexLock lock(&mutex_, absl::Condition(&more));
        if (waiting_.empty()) return;
        next = std::move(waiting_.front());
        waiting_.pop_front();
      }
      client_.Release(next, absl::Seconds(5)).status().IgnoreError();
    }
  }

  client::Client& client_;
  absl::Mutex mutex_;
  std::deque<client::Prepared> waiting_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace engram::bench
