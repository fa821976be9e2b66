// A backend with several steps under way: it computes them on a thread of its own, one after another, as a device does.
// A test may hold it before a step and make steps fail.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/cpu_backend.h"

namespace engram {

class AsyncBackend final : public Backend {
 public:
  static constexpr int kMostSteps = 3;

  // What the test and the backend share. Steps are counted from 0, in the order of their starts. Thread-safe.
  class Hand {
   public:
    // Steps from `step` on wait.
    void HoldFrom(int step) {
      const std::lock_guard<std::mutex> lock(mutex_);
      held_from_ = step;
      changed_.notify_all();
    }
    void LetAllGo() { HoldFrom(std::numeric_limits<int>::max()); }
    // The step computes nothing and fails.
    void Fail(int step) {
      const std::lock_guard<std::mutex> lock(mutex_);
      failing_ = step;
    }
    void SetLightTokens(int64_t tokens) {
      const std::lock_guard<std::mutex> lock(mutex_);
      light_tokens_ = tokens;
    }
    void AwaitStarted(int steps) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return static_cast<int>(tokens_.size()) >= steps; });
    }
    // Of each step started: its hashed tokens, and the thread that started it.
    std::vector<int64_t> tokens() const {
      const std::lock_guard<std::mutex> lock(mutex_);
      return tokens_;
    }
    std::vector<std::thread::id> threads() const {
      const std::lock_guard<std::mutex> lock(mutex_);
      return threads_;
    }
    int most_under_way() const {
      const std::lock_guard<std::mutex> lock(mutex_);
      return most_under_way_;
    }

   private:
    friend class AsyncBackend;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    int held_from_ = std::numeric_limits<int>::max();
    int failing_ = -1;
    int64_t light_tokens_ = 0;
    std::vector<int64_t> tokens_;
    std::vector<std::thread::id> threads_;
    int under_way_ = 0, most_under_way_ = 0;
  };

  AsyncBackend(std::unique_ptr<CpuBackend> cpu, std::shared_ptr<Hand> hand)
      : cpu_(std::move(cpu)), hand_(std::move(hand)), thread_([this] { Loop(); }) {}

  ~AsyncBackend() override {
    {
      const std::lock_guard<std::mutex> lock(hand_->mutex_);
      stopping_ = true;
      hand_->changed_.notify_all();
    }
    thread_.join();
  }

  int most_steps() const override { return kMostSteps; }

  void Start(const Step& step, LayerDone layer_done, StepDone done) override {
    const std::lock_guard<std::mutex> lock(hand_->mutex_);
    queue_.push_back({&step, std::move(layer_done), std::move(done)});
    hand_->tokens_.push_back(step.hashed_tokens);
    hand_->threads_.push_back(std::this_thread::get_id());
    hand_->most_under_way_ = std::max(hand_->most_under_way_, ++hand_->under_way_);
    EXPECT_LE(hand_->under_way_, kMostSteps);
    hand_->changed_.notify_all();
  }

  bool IsLight(const Call& call) const override {
    const std::lock_guard<std::mutex> lock(hand_->mutex_);
    return call.tokens > 0 && call.tokens <= hand_->light_tokens_;
  }
  StagingMemory TakePreparedKv(int64_t bytes) override { return cpu_->TakePreparedKv(bytes); }
  std::string name() const override { return "async"; }
  std::string numerics_id() const override { return cpu_->numerics_id(); }

 private:
  struct Started {
    const Step* step = nullptr;
    LayerDone layer_done;
    StepDone done;
  };

  void Loop() {
    for (int index = 0;; ++index) {
      Started next;
      bool fails = false;
      {
        std::unique_lock<std::mutex> lock(hand_->mutex_);
        hand_->changed_.wait(lock, [&] { return queue_.empty() ? stopping_ : index < hand_->held_from_; });
        if (queue_.empty()) return;
        next = std::move(queue_.front());
        queue_.pop_front();
        fails = index == hand_->failing_;
      }
      absl::StatusOr<StepTimes> times = absl::InternalError("device on fire");
      if (!fails) times = cpu_->Run(*next.step, next.layer_done);
      {
        const std::lock_guard<std::mutex> lock(hand_->mutex_);
        --hand_->under_way_;
      }
      next.done(std::move(times));
    }
  }

  const std::unique_ptr<CpuBackend> cpu_;
  const std::shared_ptr<Hand> hand_;
  std::deque<Started> queue_;  // of the hand's mutex
  bool stopping_ = false;      // of the hand's mutex
  std::thread thread_;         // last: it uses all of the above
};

}  // namespace engram
