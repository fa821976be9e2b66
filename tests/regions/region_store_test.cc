#include "server/regions/region_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "server/refusal/refusal.h"

namespace engram {
namespace {

constexpr int64_t kPage = 4096;  // or a multiple of the system's
constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();

Reason ReasonOf(const absl::Status& status) {
  const RefusalDetail detail = DetailOf(status);
  EXPECT_FALSE(detail.offenders.empty()) << status;
  return detail.offenders.empty() ? Reason::kLoading : detail.offenders.front().reason;
}

// Everything that a refusal tells its caller.
std::string Told(const absl::Status& status) {
  std::string told(status.message());
  for (const Offender& offender : DetailOf(status).offenders) {
    told += "|" + offender.field + "|" + offender.value + "|" + offender.bound + "|" + offender.text;
  }
  return told;
}

class RegionStoreTest : public ::testing::Test {
 protected:
  RegionStore Store(int64_t memory_bytes, int64_t max_per_principal = 256) {
    return RegionStore({.memory_bytes = memory_bytes,
                        .max_per_principal = max_per_principal,
                        .token_ttl = absl::Seconds(10),
                        .clock = [this] { return now_; }});
  }

  static ClaimedRegion Open(RegionStore& store, const std::string& principal, int64_t bytes) {
    const absl::StatusOr<RegionGrant> grant = store.Reserve(principal, bytes);
    EXPECT_TRUE(grant.ok()) << grant.status();
    absl::StatusOr<ClaimedRegion> claimed = store.Claim(grant->token);
    EXPECT_TRUE(claimed.ok()) << claimed.status();
    EXPECT_EQ(claimed->id, grant->id);
    return *std::move(claimed);
  }

  absl::Time now_ = absl::UnixEpoch();
};

TEST(RegionStore, WithoutDeviceMemoryThereAreNoRegionsOnADevice) {
  RegionStore store({.memory_bytes = 4 * kPage});
  const auto grant = store.Reserve("p", 1, RegionPlace::kDevice);
  ASSERT_FALSE(grant.ok());
  EXPECT_EQ(ReasonOf(grant.status()), Reason::kRegionsOff);
  EXPECT_TRUE(store.Reserve("p", 1).ok());
}

// Of a device that stands for one: as many blocks as the test has taken and not given back.
TEST(RegionStore, ADeviceRegionIsFreedOnceAndOnlyAfterTheCallsThatUseIt) {
  std::vector<char> memory(1);
  int taken = 0;
  RegionStore store({.memory_bytes = kPage,
                     .device_memory_bytes = 2 * kDeviceBlockBytes - 1,
                     .device_memory = [&](int64_t bytes) -> absl::StatusOr<DeviceMemory> {
                       const auto blocks = static_cast<int>(bytes / kDeviceBlockBytes);
                       taken += blocks;
                       return DeviceMemory{memory.data(), "handle", [&taken, blocks] { taken -= blocks; }};
                     }});
  const auto too_many = store.Reserve("p", 2 * kDeviceBlockBytes, RegionPlace::kDevice);
  EXPECT_EQ(ReasonOf(too_many.status()), Reason::kRegionSpan);
  const auto grant = store.Reserve("p", kDeviceBlockBytes + 1, RegionPlace::kDevice);
  ASSERT_TRUE(grant.ok()) << grant.status();
  EXPECT_EQ(grant->bytes, 2 * kDeviceBlockBytes);
  EXPECT_EQ(taken, 0) << "a grant that nobody claims costs no memory";
  ASSERT_TRUE(store.Claim(grant->token).ok());
  EXPECT_EQ(taken, 2);
  EXPECT_EQ(ReasonOf(store.Reserve("q", 1, RegionPlace::kDevice).status()), Reason::kRegionFull);
  auto call = store.Find("p", grant->id);
  ASSERT_TRUE(call.ok()) << call.status();
  store.Drop(grant->id);
  EXPECT_TRUE(store.Sweep());
  EXPECT_EQ(taken, 2) << "a step may write there yet";
  EXPECT_EQ(store.stats().device_bytes, 2 * kDeviceBlockBytes);
  EXPECT_EQ(ReasonOf(store.Reserve("q", 1, RegionPlace::kDevice).status()), Reason::kRegionFull);
  call->reset();
  EXPECT_FALSE(store.Sweep());
  EXPECT_EQ(taken, 0);
  EXPECT_EQ(store.stats().device_bytes, 0);
  EXPECT_TRUE(store.Reserve("q", 1, RegionPlace::kDevice).ok());
}

TEST(RegionTest, OffsetsAndLengthsThatWrapAreOutside) {
  const auto region = Region::Create(4 * kPage);
  ASSERT_TRUE(region.ok()) << region.status();
  const Region& r = **region;
  char* begin = r.At(0, 0);
  ASSERT_NE(begin, nullptr);
  EXPECT_EQ(r.At(0, 4 * kPage), begin);
  EXPECT_EQ(r.At(4 * kPage, 0), begin + 4 * kPage);
  EXPECT_EQ(r.At(4 * kPage - 1, 1), begin + 4 * kPage - 1);
  for (const auto& [offset, bytes] : {std::pair<uint64_t, uint64_t>{0, 4 * kPage + 1},
                                      {1, 4 * kPage},
                                      {4 * kPage, 1},
                                      {4 * kPage + 1, 0},
                                      {kMost, 0},
                                      {kMost, 1},
                                      {kMost, kMost},
                                      {1, kMost},
                                      {16, kMost - 15},
                                      {kMost - 15, 16},
                                      {uint64_t{1} << 63, uint64_t{1} << 63},
                                      {0, kMost}}) {
    EXPECT_EQ(r.At(offset, bytes), nullptr) << offset << " + " << bytes;
  }
}

// Who has the descriptor may do with it what it likes; the server must never meet the end of the file.
TEST(RegionTest, NobodyCanShrinkGrowOrUnsealIt) {
  const auto region = Region::Create(2 * kPage);
  ASSERT_TRUE(region.ok()) << region.status();
  const int fd = ::dup((*region)->fd());
  EXPECT_NE(::ftruncate(fd, 0), 0);
  EXPECT_NE(::ftruncate(fd, kPage), 0);
  EXPECT_NE(::ftruncate(fd, 4 * kPage), 0);
  EXPECT_NE(::fallocate(fd, 0, 0, 4 * kPage), 0);
  EXPECT_NE(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
  struct stat file {};
  ASSERT_EQ(::fstat(fd, &file), 0);
  EXPECT_EQ(file.st_size, 2 * kPage);
  EXPECT_EQ(file.st_blocks * 512, 2 * kPage) << "all of it is allocated";
  // A hole reads as zeros, and can be written.
  std::memset((*region)->At(0, 2 * kPage), 7, 2 * kPage);
  EXPECT_EQ(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 2 * kPage), 0);
  EXPECT_EQ(*(*region)->At(kPage, 1), 0);
  *(*region)->At(kPage, 1) = 1;
  ::close(fd);
}

// A worker that keeps the descriptor of a region after its end keeps no memory of the server's.
TEST(RegionTest, ItsEndGivesTheMemoryBackWhoeverStillHasTheDescriptor) {
  int fd = -1;
  {
    const auto region = Region::Create(16 * kPage);
    ASSERT_TRUE(region.ok()) << region.status();
    std::memset((*region)->At(0, 16 * kPage), 7, 16 * kPage);
    fd = ::dup((*region)->fd());
  }
  struct stat file {};
  ASSERT_EQ(::fstat(fd, &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
  char byte = 1;
  EXPECT_EQ(::pread(fd, &byte, 1, kPage), 1);
  EXPECT_EQ(byte, 0);
  ::close(fd);
}

TEST_F(RegionStoreTest, ATokenIsGoodOnce) {
  RegionStore store = Store(kPage * 16);
  const auto grant = store.Reserve("p", kPage);
  ASSERT_TRUE(grant.ok());
  EXPECT_EQ(grant->token.size(), kRegionTokenBytes);
  EXPECT_EQ(grant->id.size(), kRegionIdBytes);
  EXPECT_EQ(grant->bytes, WholePages(kPage));
  EXPECT_EQ(store.stats().regions, 0);
  EXPECT_EQ(store.stats().bytes, 0) << "a grant that nobody claims costs no memory";
  const auto claimed = store.Claim(grant->token);
  ASSERT_TRUE(claimed.ok()) << claimed.status();
  EXPECT_EQ(store.Claim(grant->token).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store.stats().regions, 1);
  EXPECT_EQ(store.stats().bytes, grant->bytes);
}

TEST_F(RegionStoreTest, WhatIsNoGoodTokenIsNotFound) {
  RegionStore store = Store(kPage * 16);
  const auto grant = store.Reserve("p", kPage);
  ASSERT_TRUE(grant.ok());
  std::string other = grant->token;
  other.back() = static_cast<char>(other.back() ^ 1);
  for (const std::string& token :
       {std::string(), std::string(32, '\0'), other, grant->id, grant->token + "x", grant->token.substr(0, 31)}) {
    EXPECT_EQ(store.Claim(token).status().code(), absl::StatusCode::kNotFound);
  }
  EXPECT_TRUE(store.Claim(grant->token).ok());
}

TEST_F(RegionStoreTest, ATokenExpiresAndItsBytesAreFreeAgain) {
  RegionStore store = Store(kPage);
  const auto grant = store.Reserve("p", kPage);
  ASSERT_TRUE(grant.ok());
  EXPECT_EQ(ReasonOf(store.Reserve("p", 1).status()), Reason::kRegionFull);
  now_ += absl::Seconds(10);
  EXPECT_EQ(store.Claim(grant->token).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(store.Reserve("p", kPage).ok());
}

TEST_F(RegionStoreTest, AnotherPrincipalsRegionIsRefusedInTheWordsOfAnUnknownOne) {
  RegionStore store = Store(kPage * 16);
  const ClaimedRegion mine = Open(store, "mine", kPage);
  EXPECT_TRUE(store.Find("mine", mine.id).ok());
  const absl::Status foreign = store.Find("other", mine.id).status();
  const absl::Status unknown = store.Find("mine", std::string(16, 'x')).status();
  const absl::Status empty = store.Find("mine", "").status();
  const auto gone = Open(store, "mine", kPage);
  store.Drop(gone.id);
  EXPECT_EQ(ReasonOf(foreign), Reason::kRegion);
  EXPECT_EQ(foreign.code(), absl::StatusCode::kNotFound);
  for (const absl::Status& status : {unknown, empty, store.Find("mine", gone.id).status()}) {
    EXPECT_EQ(Told(status), Told(foreign));
  }
}

TEST_F(RegionStoreTest, TokensAndIdsNeverRepeat) {
  RegionStore store = Store(kPage * 1024, 1024);
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const auto grant = store.Reserve("p", 1);
    ASSERT_TRUE(grant.ok());
    EXPECT_TRUE(seen.insert(grant->token).second);
    EXPECT_TRUE(seen.insert(grant->id).second);
  }
}

TEST_F(RegionStoreTest, BytesThatCannotFitAreRefusedForGoodAndThoseThatDoNotFitNowAreNot) {
  RegionStore store = Store(4 * kPage);
  for (const int64_t bytes : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min(), 4 * kPage + 1,
                              std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(ReasonOf(store.Reserve("p", bytes).status()), Reason::kRegionSpan) << bytes;
  }
  const ClaimedRegion all = Open(store, "p", 4 * kPage);
  const absl::Status full = store.Reserve("q", 1).status();
  EXPECT_EQ(ReasonOf(full), Reason::kRegionFull);
  EXPECT_TRUE(WorthRetry(Reason::kRegionFull));
  store.Drop(all.id);
  EXPECT_EQ(ReasonOf(store.Reserve("q", 1).status()), Reason::kRegionFull) << "still mapped: a call may use it";
}

TEST_F(RegionStoreTest, APrincipalHasSoManyAndOthersHaveTheirOwn) {
  RegionStore store = Store(kPage * 16, 2);
  const ClaimedRegion first = Open(store, "p", 1);
  ASSERT_TRUE(store.Reserve("p", 1).ok());
  EXPECT_EQ(ReasonOf(store.Reserve("p", 1).status()), Reason::kRegionFull);
  EXPECT_TRUE(store.Reserve("q", 1).ok());
  now_ += absl::Seconds(11);  // the grant is gone
  EXPECT_TRUE(store.Reserve("p", 1).ok());
}

TEST_F(RegionStoreTest, ACallUnderWayKeepsADroppedRegion) {
  RegionStore store = Store(kPage);
  std::string id;
  std::shared_ptr<Region> pin;
  {
    ClaimedRegion claimed = Open(store, "p", kPage);
    id = claimed.id;
    pin = store.Find("p", id).value();
  }
  store.Drop(id);
  store.Drop(id);
  EXPECT_FALSE(store.Find("p", id).ok());
  EXPECT_TRUE(store.Sweep());
  EXPECT_EQ(store.stats().regions, 0);
  EXPECT_EQ(store.stats().bytes, WholePages(kPage));
  std::memset(pin->At(0, kPage), 1, kPage);
  pin.reset();
  EXPECT_FALSE(store.Sweep());
  EXPECT_EQ(store.stats().bytes, 0);
  EXPECT_TRUE(store.Reserve("p", kPage).ok());
}

TEST_F(RegionStoreTest, AClosedStoreGrantsNothingAndKeepsWhatThereIs) {
  RegionStore store = Store(kPage * 16);
  const auto granted = store.Reserve("p", 1);
  const ClaimedRegion region = Open(store, "p", 1);
  store.Close();
  EXPECT_EQ(ReasonOf(store.Reserve("p", 1).status()), Reason::kDraining);
  EXPECT_TRUE(store.Claim(granted->token).ok());
  EXPECT_TRUE(store.Find("p", region.id).ok());
}

}  // namespace
}  // namespace engram
