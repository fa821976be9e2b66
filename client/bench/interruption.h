// What a run still does when ^C or SIGTERM ends it.
#pragma once

#include <atomic>
#include <functional>
#include <thread>

namespace engram::bench {

// While one stands, SIGINT and SIGTERM call `finish` on a thread of its own, and then end the process as they would
// have. Stands before any other thread of the process begins, since these inherit that the signals are not theirs.
class Interruption {
 public:
  explicit Interruption(std::function<void()> finish);
  // Signals do again what they did before.
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

 private:
  void Watch();

  const std::function<void()> finish_;
  std::atomic<bool> over_ = false;
  std::thread thread_;
};

}  // namespace engram::bench
