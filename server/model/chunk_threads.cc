#include "server/model/chunk_threads.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace engram {

absl::Status RunChunks(int64_t chunks, int threads, const std::function<absl::Status(int64_t chunk)>& body,
                       const std::function<void()>& tick) {
  std::mutex mutex;
  std::condition_variable done;
  int64_t next = 0;
  absl::Status first_error;
  const int count = static_cast<int>(std::clamp<int64_t>(threads, 1, std::max<int64_t>(chunks, 1)));
  int running = count;

  const auto work = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    while (next < chunks && first_error.ok()) {
      const int64_t chunk = next++;
      lock.unlock();
      absl::Status status = body(chunk);
      lock.lock();
      if (!status.ok() && first_error.ok()) first_error = std::move(status);
    }
    if (--running == 0) done.notify_one();
  };
  std::vector<std::thread> pool;
  for (int i = 0; i < count; ++i) pool.emplace_back(work);
  {
    std::unique_lock<std::mutex> lock(mutex);
    while (running > 0) {
      done.wait_for(lock, std::chrono::milliseconds(250), [&] { return running == 0; });
      if (running == 0 || !tick) continue;
      lock.unlock();
      tick();
      lock.lock();
    }
  }
  for (std::thread& thread : pool) thread.join();
  return first_error;
}

}  // namespace engram
