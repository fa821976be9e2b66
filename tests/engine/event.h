// Something that happens once, and threads that wait for it. Made of what ThreadSanitizer sees, as absl::Notification
// of an uninstrumented library is not.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

namespace engram {

class Event {
 public:
  void Notify() {
    const std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_FALSE(happened_) << "happened twice";
    happened_ = true;
    changed_.notify_all();
  }
  void Await() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return happened_; });
  }
  bool happened() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return happened_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
};

}  // namespace engram
