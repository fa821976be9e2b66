#include "server/engine/device_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace engram {
namespace {

std::shared_ptr<DeviceArena> MakeArena(int64_t bytes) {
  auto device = CudaDevice::Open(ENGRAM_CUDA_TEST_MODULE, 0);
  EXPECT_TRUE(device.ok()) << device.status();
  auto memory = CudaMemory::OnDevice(*device, bytes, "the test");
  EXPECT_TRUE(memory.ok()) << memory.status();
  return std::make_shared<DeviceArena>(*std::move(memory));
}

TEST(DeviceArenaTest, BlocksNeverOverlapAndAllComesBack) {
  constexpr int64_t kBytes = 1 << 16;
  const auto arena = MakeArena(kBytes);
  std::mt19937 random(3);
  std::vector<std::pair<StagingMemory, int64_t>> held;
  for (int i = 0; i < 20000; ++i) {
    if (random() % 2 == 0 && !held.empty()) {
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
      continue;
    }
    const int64_t bytes = 1 + random() % 5000;
    StagingMemory block = arena->Take(bytes);
    if (block == nullptr) continue;
    for (const auto& [other, length] : held) {
      ASSERT_TRUE(block.get() + bytes <= other.get() || other.get() + length <= block.get());
    }
    held.emplace_back(std::move(block), bytes);
  }
  held.clear();
  EXPECT_EQ(arena->in_use_bytes(), 0);
  EXPECT_NE(arena->Take(kBytes), nullptr) << "neighbours that are free have joined";
}

TEST(DeviceArenaTest, WhatIsFullGivesNone) {
  const auto arena = MakeArena(512);
  const StagingMemory first = arena->Take(257);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(arena->Take(1), nullptr) << "blocks are of whole 256 bytes";
}

}  // namespace
}  // namespace engram
