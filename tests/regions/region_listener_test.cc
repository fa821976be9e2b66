// Workers of all kinds at the region listener's socket.
#include "server/regions/region_listener.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/regions/region_socket.h"

namespace engram {
namespace {

constexpr int64_t kPage = 4096;

class RegionListenerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "engram-regions-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = folder_ + "/m";
    Start({.path = path_});
  }

  void TearDown() override {
    listener_.reset();
    std::filesystem::remove_all(folder_);
  }

  void Start(const RegionListenerOptions& options) {
    listener_.reset();
    auto listener = RegionListener::Start(options, store_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    listener_ = *std::move(listener);
  }

  RegionGrant Grant(int64_t bytes = kPage) {
    auto grant = store_.Reserve("p", bytes);
    EXPECT_TRUE(grant.ok()) << grant.status();
    return *std::move(grant);
  }

  // Whether it comes to that, within 20 s.
  bool AwaitBytes(int64_t bytes) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (store_.stats().bytes != bytes) {
      if (absl::Now() > end) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  // A worker that does everything right works.
  void ExpectServes() {
    const RegionGrant grant = Grant();
    RegionSocket worker(path_);
    ASSERT_TRUE(worker.connected());
    ASSERT_TRUE(worker.Send(grant.token));
    int fd = -1;
    EXPECT_EQ(worker.Receive(&fd), 1);
    EXPECT_GE(fd, 0);
    ::close(fd);
  }

  // Stands for a device's memory: what the listener must do with it is the same.
  absl::StatusOr<DeviceMemory> MakeDeviceMemory(int64_t bytes) {
    if (device_is_full_) return absl::ResourceExhaustedError("out of memory");
    device_memory_.emplace_back(static_cast<size_t>(bytes));
    ++device_regions_;
    return DeviceMemory{device_memory_.back().data(), std::string(kDeviceHandleBytes, 'h'),
                        [this] { --device_regions_; }};
  }

  std::atomic<bool> device_is_full_{false};
  std::atomic<int> device_regions_{0};
  std::list<std::vector<char>> device_memory_;
  RegionStore store_{{.memory_bytes = kPage * 64,
                      .device_memory_bytes = 4 * kDeviceBlockBytes,
                      .device_memory = [this](int64_t bytes) { return MakeDeviceMemory(bytes); }}};
  std::string folder_, path_;
  std::unique_ptr<RegionListener> listener_;
};

TEST_F(RegionListenerTest, ARegionOnTheDeviceIsAHandleWithoutADescriptor) {
  const auto grant = store_.Reserve("p", 5, RegionPlace::kDevice);
  ASSERT_TRUE(grant.ok()) << grant.status();
  EXPECT_EQ(grant->bytes, kDeviceBlockBytes) << "a handle opens whole blocks";
  {
    RegionSocket worker(path_);
    ASSERT_TRUE(worker.Send(grant->token));
    int fd = -1;
    ASSERT_EQ(worker.Receive(&fd), 2);
    EXPECT_EQ(fd, -1);
    char handle[kDeviceHandleBytes + 1];
    EXPECT_EQ(::recv(worker.fd(), handle, sizeof handle, 0), kDeviceHandleBytes) << "and nothing behind it";
    EXPECT_EQ(std::string(handle, kDeviceHandleBytes), std::string(kDeviceHandleBytes, 'h'));
    const auto region = store_.Find("p", grant->id);
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_EQ((*region)->At(0, 1), device_memory_.front().data());
    EXPECT_EQ((*region)->At(kDeviceBlockBytes, 1), nullptr);
    EXPECT_EQ(store_.stats().device_bytes, kDeviceBlockBytes);
    EXPECT_EQ(store_.stats().bytes, 0) << "the host's memory is another budget";
    EXPECT_FALSE(store_.Find("q", grant->id).ok());
  }
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (device_regions_ != 0 && absl::Now() < end) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(device_regions_, 0) << "the connection's end is the region's";
}

TEST_F(RegionListenerTest, ADeviceWithoutMemorySaysSoAndTheBudgetIsGivenBack) {
  device_is_full_ = true;
  const auto grant = store_.Reserve("p", 4 * kDeviceBlockBytes, RegionPlace::kDevice);
  ASSERT_TRUE(grant.ok()) << grant.status();
  EXPECT_FALSE(store_.Reserve("p", 1, RegionPlace::kDevice).ok()) << "all of it is promised";
  RegionSocket worker(path_);
  ASSERT_TRUE(worker.Send(grant->token));
  int fd = -1;
  EXPECT_EQ(worker.Receive(&fd), 0);
  EXPECT_EQ(fd, -1);
  EXPECT_TRUE(store_.Reserve("p", 1, RegionPlace::kDevice).ok());
  ExpectServes();
}

TEST_F(RegionListenerTest, TheDescriptorIsTheRegionAndTheConnectionItsLife) {
  const RegionGrant grant = Grant(2 * kPage);
  RegionSocket worker(path_);
  ASSERT_TRUE(worker.Send(grant.token.substr(0, 7)));
  ASSERT_TRUE(worker.Send(grant.token.substr(7)));
  int fd = -1;
  ASSERT_EQ(worker.Receive(&fd), 1);
  ASSERT_GE(fd, 0);
  auto* mine = static_cast<char*>(::mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  ASSERT_NE(mine, MAP_FAILED);
  const auto region = store_.Find("p", grant.id);
  ASSERT_TRUE(region.ok()) << region.status();
  mine[kPage + 5] = 'x';
  EXPECT_EQ(*(*region)->At(kPage + 5, 1), 'x');
  *(*region)->At(0, 1) = 'y';
  EXPECT_EQ(mine[0], 'y');
  EXPECT_NE(::ftruncate(fd, 0), 0);

  worker.Close();  // the mapping and the descriptor stay, the region does not
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (store_.Find("p", grant.id).ok() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_FALSE(store_.Find("p", grant.id).ok());
  EXPECT_EQ(*(*region)->At(kPage + 5, 1), 'x') << "a call under way keeps it";
  ::munmap(mine, 2 * kPage);
  ::close(fd);
}

TEST_F(RegionListenerTest, MemoryComesBackWhenTheWorkerGoes) {
  {
    const RegionGrant grant = Grant(8 * kPage);
    RegionSocket worker(path_);
    ASSERT_TRUE(worker.Send(grant.token));
    int fd = -1;
    ASSERT_EQ(worker.Receive(&fd), 1);
    ::close(fd);
    EXPECT_EQ(store_.stats().bytes, 8 * kPage);
  }
  EXPECT_TRUE(AwaitBytes(0));
}

TEST_F(RegionListenerTest, AUsedTokenGarbageAndTooManyBytesAreAnsweredByClosing) {
  const RegionGrant used = Grant();
  RegionSocket first(path_);
  ASSERT_TRUE(first.Send(used.token));
  int fd = -1;
  ASSERT_EQ(first.Receive(&fd), 1);
  ::close(fd);
  const RegionGrant open = Grant();
  for (const std::string& bytes : {used.token, std::string(32, '\0'), std::string(1000, 'x'),
                                   std::string("GET / HTTP/1.1\r\nHost: engram\r\n\r\n"), open.token + "x"}) {
    RegionSocket worker(path_);
    worker.Send(bytes);
    EXPECT_TRUE(worker.ClosedByServer());
  }
  {
    RegionSocket worker(path_);
    worker.Send("half");
    ::shutdown(worker.fd(), SHUT_WR);
    EXPECT_TRUE(worker.ClosedByServer());
  }
  // Another worker's region does not mind, and the token that came with too much is still its owner's.
  EXPECT_TRUE(store_.Find("p", used.id).ok());
  RegionSocket owner(path_);
  ASSERT_TRUE(owner.Send(open.token));
  EXPECT_EQ(owner.Receive(&fd), 1);
  ::close(fd);
}

TEST_F(RegionListenerTest, AWordOnAnOpenConnectionEndsItsRegion) {
  const RegionGrant grant = Grant();
  RegionSocket worker(path_);
  ASSERT_TRUE(worker.Send(grant.token));
  int fd = -1;
  ASSERT_EQ(worker.Receive(&fd), 1);
  ::close(fd);
  ASSERT_TRUE(worker.Send(grant.token));
  EXPECT_TRUE(worker.ClosedByServer());
  EXPECT_TRUE(AwaitBytes(0));
}

TEST_F(RegionListenerTest, ConnectionsWithoutATokenEndInTime) {
  Start({.path = path_, .token_timeout = absl::Milliseconds(50)});
  RegionSocket silent(path_);
  RegionSocket slow(path_);
  ASSERT_TRUE(slow.Send("0123456789"));
  EXPECT_TRUE(silent.ClosedByServer());
  EXPECT_TRUE(slow.ClosedByServer());
  ExpectServes();
}

TEST_F(RegionListenerTest, ACrowdThatShowsNoTokenKeepsNobodyOut) {
  Start({.path = path_, .max_waiting = 4, .token_timeout = absl::Seconds(60)});
  std::vector<std::unique_ptr<RegionSocket>> crowd;
  for (int i = 0; i < 50; ++i) crowd.push_back(std::make_unique<RegionSocket>(path_));
  ExpectServes();
  EXPECT_TRUE(crowd.front()->ClosedByServer());
}

TEST_F(RegionListenerTest, ManyWorkersAtOnce) {
  std::vector<std::thread> workers;
  for (int w = 0; w < 8; ++w) {
    workers.emplace_back([this] {
      for (int i = 0; i < 20; ++i) ExpectServes();
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_TRUE(AwaitBytes(0));
  EXPECT_EQ(store_.stats().regions, 0);
}

TEST_F(RegionListenerTest, ItsEndDropsItsRegionsAndRemovesTheSocket) {
  const RegionGrant grant = Grant();
  RegionSocket worker(path_);
  ASSERT_TRUE(worker.Send(grant.token));
  int fd = -1;
  ASSERT_EQ(worker.Receive(&fd), 1);
  ::close(fd);
  listener_.reset();
  EXPECT_TRUE(worker.ClosedByServer());
  EXPECT_FALSE(store_.Find("p", grant.id).ok());
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(RegionListenerTest, OthersMayNeverConnect) {
  struct stat file {};
  ASSERT_EQ(::stat(path_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0007, 0u);
  EXPECT_EQ(file.st_mode & 0600, 0600u);
}

TEST_F(RegionListenerTest, APathInUseIsAnErrorThatNamesItAndASocketLeftBehindIsReplaced) {
  const auto second = RegionListener::Start({.path = path_}, store_);
  EXPECT_EQ(second.status().message(), "--shm-listen unix:" + path_ + ": cannot listen there: Address already in use");
  ExpectServes();
  const std::string file = folder_ + "/file";
  std::ofstream(file) << "not a socket";
  EXPECT_FALSE(RegionListener::Start({.path = file}, store_).ok());
  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_FALSE(RegionListener::Start({.path = folder_ + "/no/such/folder"}, store_).ok());
  EXPECT_FALSE(RegionListener::Start({.path = std::string(200, 'x')}, store_).ok());

  // As a server that was killed leaves it.
  const std::string left = folder_ + "/left";
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, left.data(), left.size());
  ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&name), sizeof name), 0);
  ::close(fd);
  path_ = left;
  Start({.path = left});
  ExpectServes();
}

}  // namespace
}  // namespace engram
