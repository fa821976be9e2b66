#include "server/engine/staging.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace engram {
namespace {

TEST(Staging, ABlockIsUsedAgain) {
  StagingPool pool(1 << 20);
  uint8_t* first = nullptr;
  {
    const StagingMemory block = pool.Take(100'000);
    first = block.get();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0);
    EXPECT_GE(pool.stats().in_use_bytes, 100'000);
    EXPECT_LE(pool.stats().in_use_bytes, 125'000) << "at most a quarter is wasted";
  }
  EXPECT_EQ(pool.stats().in_use_bytes, 0);
  EXPECT_GE(pool.stats().idle_bytes, 100'000);
  const StagingMemory again = pool.Take(99'000);
  EXPECT_EQ(again.get(), first);
  EXPECT_EQ(pool.stats().idle_bytes, 0);
}

TEST(Staging, EverySizeFits) {
  StagingPool pool(0);
  for (int64_t bytes = 1; bytes < 70'000; bytes += 1 + bytes / 7) {
    const StagingMemory block = pool.Take(bytes);
    std::memset(block.get(), 1, static_cast<size_t>(bytes));  // under asan an error unless it fits
    ASSERT_GE(pool.stats().in_use_bytes, bytes);
  }
  for (int power = 13; power < 24; ++power) {
    for (const int64_t off : {-1, 0, 1}) {
      const StagingMemory block = pool.Take((int64_t{1} << power) + off);
      ASSERT_GE(pool.stats().in_use_bytes, (int64_t{1} << power) + off);
    }
  }
}

TEST(Staging, NoMoreIsKeptThanWasAskedFor) {
  StagingPool pool(100'000);
  std::vector<StagingMemory> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(pool.Take(16'384));
  EXPECT_EQ(pool.stats().in_use_bytes, 20 * 16'384) << "what bounds memory in use is the caller's permit";
  blocks.clear();
  EXPECT_EQ(pool.stats().in_use_bytes, 0);
  EXPECT_LE(pool.stats().idle_bytes, 100'000);
  EXPECT_GT(pool.stats().idle_bytes, 80'000);
}

// A load of prompts after a load of single tokens must not add its own idle memory to theirs.
TEST(Staging, BlocksOfOtherSizesMakeRoom) {
  StagingPool pool(100'000);
  { const std::vector<StagingMemory> small = {pool.Take(40'960), pool.Take(40'960)}; }
  EXPECT_EQ(pool.stats().idle_bytes, 81'920);
  { const StagingMemory large = pool.Take(65'536); }
  EXPECT_LE(pool.stats().idle_bytes, 100'000);
  const StagingMemory again = pool.Take(65'536);
  EXPECT_LE(pool.stats().in_use_bytes + pool.stats().idle_bytes, 100'000);
}

TEST(Staging, ABlockOutlivesItsPool) {
  StagingMemory block;
  {
    StagingPool pool(1 << 20);
    block = pool.Take(5000);
  }
  std::memset(block.get(), 1, 5000);
}

TEST(Staging, ASourceGetsBackEachBlockItGaveWithItsSizeAlsoAfterThePool) {
  auto out = std::make_shared<std::map<uint8_t*, int64_t>>();
  StagingSource source;
  source.allocate = [out](int64_t bytes) -> uint8_t* {
    if (bytes > 100'000) return nullptr;
    uint8_t* block = StagingSource::Ordinary().allocate(bytes);
    (*out)[block] = bytes;
    return block;
  };
  source.free = [out](uint8_t* block, int64_t bytes) {
    EXPECT_EQ(out->at(block), bytes);
    out->erase(block);
    StagingSource::Ordinary().free(block, bytes);
  };
  StagingMemory last;
  {
    StagingPool pool(100'000, std::move(source));
    EXPECT_EQ(pool.Take(200'000), nullptr);
    EXPECT_EQ(pool.stats().in_use_bytes, 0);
    { const std::vector<StagingMemory> small = {pool.Take(40'960), pool.Take(40'960)}; }
    EXPECT_EQ(out->size(), 2) << "kept";
    { const StagingMemory large = pool.Take(65'536); }  // makes room for itself
    EXPECT_EQ(out->size(), 1);
    last = pool.Take(5000);
  }
  ASSERT_EQ(out->count(last.get()), 1);
  last.reset();
  EXPECT_TRUE(out->empty());
}

TEST(Staging, ThreadsNeverShareABlock) {
  StagingPool pool(1 << 20);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 2000; ++i) {
        const int64_t bytes = 4096 << (i % 4);
        const StagingMemory block = pool.Take(bytes);
        std::memset(block.get(), t, static_cast<size_t>(bytes));
        ASSERT_EQ(block.get()[0], t);
        ASSERT_EQ(block.get()[bytes - 1], t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool.stats().in_use_bytes, 0);
  EXPECT_LE(pool.stats().idle_bytes, 1 << 20);
}

}  // namespace
}  // namespace engram
