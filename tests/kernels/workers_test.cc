#include "kernels/workers.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace engram::kernels {
namespace {

TEST(Workers, RangesCoverEveryItemExactlyOnceAndRespectTheGrain) {
  for (const int threads : {1, 2, 3, 5}) {
    Workers workers(threads);
    EXPECT_EQ(workers.threads(), threads);
    for (const int64_t items : {1, 2, 7, 64, 1000}) {
      for (const int64_t grain : {1, 2, 3, 63, 64, 65, 5000}) {
        // Plain memory: the sanitizer also proves that what body writes is visible afterwards.
        std::vector<int> visits(static_cast<size_t>(items));
        workers.ForEachRange(items, grain, [&](int64_t begin, int64_t end) {
          EXPECT_LT(begin, end);
          EXPECT_LE(end - begin, grain);
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        for (const int count : visits) ASSERT_EQ(count, 1) << threads << " threads, " << items << " by " << grain;
      }
    }
  }
}

TEST(Workers, NoItemsCallNothing) {
  Workers workers(2);
  workers.ForEachRange(0, 1, [](int64_t, int64_t) { FAIL(); });
}

TEST(Workers, OneThreadRunsOnTheCallerInOrder) {
  Workers workers(1);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  workers.ForEachRange(10, 4, [&](int64_t begin, int64_t end) { ranges.emplace_back(begin, end); });
  EXPECT_EQ(ranges, (std::vector<std::pair<int64_t, int64_t>>{{0, 4}, {4, 8}, {8, 10}}));
}

TEST(Workers, AGrainNearTheEndOfInt64DoesNotOverflow) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  for (const int threads : {1, 3}) {
    Workers workers(threads);
    int64_t covered = 0;
    workers.ForEachRange(10, kMax, [&](int64_t begin, int64_t end) { covered += end - begin; });
    EXPECT_EQ(covered, 10);

    std::atomic<int64_t> sum = 0;
    workers.ForEachRange(kMax, kMax / 2, [&](int64_t begin, int64_t end) { sum += end - begin; });
    EXPECT_EQ(sum, kMax);
  }
}

// A thread that wakes late must neither join a finished loop nor take ranges of the next one twice.
TEST(Workers, ManyShortLoopsInARow) {
  Workers workers(4);
  std::vector<int64_t> values(64);
  for (int64_t loop = 0; loop < 20'000; ++loop) {
    const int64_t items = 1 + loop % 64;
    workers.ForEachRange(items, 1 + loop % 5, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[static_cast<size_t>(i)] = loop;
    });
    for (int64_t i = 0; i < items; ++i) ASSERT_EQ(values[static_cast<size_t>(i)], loop);
  }
}

TEST(Workers, TheWholePoolTakesPartInALongLoop) {
  constexpr int kThreads = 3;
  Workers workers(kThreads);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  std::atomic<int> arrived = 0;
  // Every range waits until three have begun: that takes three threads.
  workers.ForEachRange(kThreads, 1, [&](int64_t, int64_t) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      seen.insert(std::this_thread::get_id());
    }
    ++arrived;
    while (arrived < kThreads) std::this_thread::yield();
  });
  EXPECT_EQ(seen.size(), static_cast<size_t>(kThreads));
}

TEST(Workers, StartsAndStopsWithoutALoop) {
  for (int i = 0; i < 50; ++i) Workers workers(4);
}

}  // namespace
}  // namespace engram::kernels
