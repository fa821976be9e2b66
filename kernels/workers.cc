#include "kernels/workers.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace engram::kernels {
namespace {

using Body = std::function<void(int64_t begin, int64_t end)>;

struct Loop {
  const Body* body = nullptr;  // null = no loop is open
  int64_t items = 0;
  int64_t grain = 1;
  int64_t ranges = 0;
};

}  // namespace

// A loop is open while `loop.body` is set. A pool thread joins an open loop at most once and counts itself in `inside`;
// the caller closes the loop when it finds no range left and waits only for those inside. A thread that wakes too late
// finds the loop closed, so a short loop never waits for a sleeper.
struct Workers::State {
  std::mutex mutex;
  std::condition_variable opened;  // a loop was opened, or stop
  std::condition_variable left;    // inside became 0
  Loop loop;
  uint64_t generation = 0;  // number of loops opened so far
  int inside = 0;
  bool stop = false;

  // Next range to claim. Relaxed is enough: what body reads and writes is ordered by the mutex on the way in and out.
  std::atomic<int64_t> next_range{0};
  std::vector<std::thread> threads;

  void RunRanges(const Loop& open) {
    for (;;) {
      const int64_t range = next_range.fetch_add(1, std::memory_order_relaxed);
      if (range >= open.ranges) return;
      const int64_t begin = range * open.grain;
      (*open.body)(begin, begin + std::min(open.grain, open.items - begin));
    }
  }

  void ThreadMain() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      opened.wait(lock, [&] { return stop || (loop.body != nullptr && generation != seen); });
      if (stop) return;
      seen = generation;
      const Loop open = loop;
      ++inside;
      lock.unlock();
      RunRanges(open);
      lock.lock();
      if (--inside == 0) left.notify_one();
    }
  }
};

Workers::Workers(int threads) : state_(std::make_unique<State>()) {
  state_->threads.reserve(static_cast<size_t>(std::max(threads - 1, 0)));
  for (int i = 1; i < threads; ++i) state_->threads.emplace_back([state = state_.get()] { state->ThreadMain(); });
}

Workers::~Workers() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  state_->opened.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

int Workers::threads() const { return static_cast<int>(state_->threads.size()) + 1; }

void Workers::ForEachRange(int64_t items, int64_t grain, const Body& body) {
  if (items <= 0) return;
  Loop loop;
  loop.body = &body;
  loop.items = items;
  loop.grain = std::clamp<int64_t>(grain, 1, items);
  loop.ranges = items / loop.grain + (items % loop.grain != 0 ? 1 : 0);

  State& state = *state_;
  const int64_t joiners = std::min<int64_t>(static_cast<int64_t>(state.threads.size()), loop.ranges - 1);
  if (joiners == 0) {
    for (int64_t begin = 0; begin < items; begin += loop.grain) {
      body(begin, begin + std::min(loop.grain, items - begin));
      if (items - begin <= loop.grain) return;  // begin + grain may not fit 64 bits
    }
    return;
  }

  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.loop = loop;
    ++state.generation;
    state.next_range.store(0, std::memory_order_relaxed);
  }
  for (int64_t i = 0; i < joiners; ++i) state.opened.notify_one();
  state.RunRanges(loop);

  std::unique_lock<std::mutex> lock(state.mutex);
  state.loop.body = nullptr;
  state.left.wait(lock, [&] { return state.inside == 0; });
}

}  // namespace engram::kernels
