// Highways in the memory of a device that a worker shares, against the module that needs no GPU: what the worker writes
// and reads goes through the module too, as a worker's CUDA would do it.
#include "server/engine/device_regions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "server/engine/cuda_backend.h"
#include "server/engine/cuda_memory_plan.h"
#include "server/engine/cuda_resources.h"
#include "tests/engine/backend_calls.h"

namespace engram {
namespace {

using kernels::HighwayType;
using ::testing::HasSubstr;

constexpr int64_t kPage = 4096;

class DeviceRegionsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kBatch = 256;

  void SetUp() override {
    LoadOptions mapped;
    mapped.residency = Residency::kMmap;
    auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf", mapped);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    shape_ = ShapeOf(*model_);
    auto device = CudaDevice::Open(ENGRAM_CUDA_TEST_MODULE, 0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *device;
    ASSERT_TRUE(device_->Use().ok());
    auto stream = MakeCudaStream(device_);
    ASSERT_TRUE(stream.ok()) << stream.status();
    stream_ = *std::move(stream);
    const auto plan = PlanCudaMemory(
        *model_, {.max_batch_tokens = kBatch, .prepare_memory_bytes = 1 << 20, .device_region_bytes = 8 << 20},
        device_->module());
    ASSERT_TRUE(plan.ok()) << plan.status();
    auto backend =
        CudaBackend::Create(device_, model_, *plan, {.max_batch_tokens = kBatch, .prepare_memory_bytes = 1 << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    auto region = backend_->device_region_source()(4 << 20);
    ASSERT_TRUE(region.ok()) << region.status();
    region_ = *std::move(region);
  }

  void Copy(void* to, const void* from, int64_t bytes) {
    ASSERT_EQ(device_->module().copy(to, from, bytes, stream_.get()), 0);
    ASSERT_EQ(device_->module().wait_stream(stream_.get()), 0);
  }

  std::vector<uint8_t> BytesOf(const void* memory, int64_t bytes) {
    std::vector<uint8_t> all(static_cast<size_t>(bytes));
    Copy(all.data(), memory, bytes);
    return all;
  }

  int64_t FreeBytes() const {
    const auto bytes = device_->FreeBytes();
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return *bytes;
  }

  std::vector<uint8_t> Ordinary(MadeCall& made) {
    made.Clear();
    EXPECT_TRUE(StartedStep(*backend_, {WholeOf(made)}, shape_).Await().ok());
    return made.Bytes();
  }

  // The call's highways from here on stand in the region, `begin` bytes from its begin on, and their updates too: in
  // place, or behind them all.
  void Move(MadeCall& made, int64_t begin, bool in_place) {
    const int64_t bytes = made.call.tokens * HighwayBytes(shape_, made.call.highway_type);
    const auto layers = static_cast<int64_t>(made.call.layers.size());
    for (int64_t l = 0; l < layers; ++l) {
      CallLayer& layer = made.call.layers[static_cast<size_t>(l)];
      uint8_t* const in = region_.memory.get() + begin + l * bytes;
      Copy(in, made.highways[static_cast<size_t>(l)].get(), bytes);
      layer.highway = in;
      if (made.call.form == Form::kHighway) layer.out = in_place ? in : in + layers * bytes;
    }
  }

  // MadeCall::Bytes(), its updates from where they now stand.
  std::vector<uint8_t> Moved(MadeCall& made) {
    for (size_t l = 0; made.call.form == Form::kHighway && l < made.call.layers.size(); ++l) {
      Copy(made.outputs.out[l].get(), made.call.layers[l].out, made.outputs.out_bytes[l]);
    }
    return made.Bytes();
  }

  std::shared_ptr<const EngramModel> model_;
  StepShape shape_;
  std::shared_ptr<const CudaDevice> device_;
  CudaStream stream_;
  std::unique_ptr<CudaBackend> backend_;
  DeviceRegion region_;
  StagingPool ordinary_{0};
};

TEST_F(DeviceRegionsTest, ARegionIsZerosInWholeBlocksAndItsHandleOpensIt) {
  const int64_t before = FreeBytes();
  const DeviceRegionSource source = backend_->device_region_source();
  for (int i = 0; i < 3; ++i) {
    auto region = source(5);
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_EQ(before - FreeBytes(), kDeviceRegionBlock);
    ASSERT_EQ(region->handle.size(), static_cast<size_t>(kernels::cuda::kIpcHandleBytes));
    void* opened = nullptr;
    ASSERT_EQ(device_->module().open_memory(reinterpret_cast<const uint8_t*>(region->handle.data()), &opened), 0);
    const std::vector<uint8_t> bytes = BytesOf(opened, kDeviceRegionBlock);
    EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0), kDeviceRegionBlock) << "what the last worker left";
    const std::vector<uint8_t> secret(bytes.size(), 's');
    Copy(opened, secret.data(), kDeviceRegionBlock);
    EXPECT_EQ(BytesOf(region->memory.get(), kDeviceRegionBlock), secret) << "both see the same";
    EXPECT_EQ(device_->module().close_memory(opened), 0);
  }
  EXPECT_EQ(FreeBytes(), before) << "its last owner's end is the memory's";
}

TEST_F(DeviceRegionsTest, ADeviceWithoutMemorySaysSo) {
  const int64_t before = FreeBytes();
  const auto region = backend_->device_region_source()(before + 1);
  EXPECT_EQ(region.status().code(), absl::StatusCode::kResourceExhausted) << region.status();
  EXPECT_THAT(std::string(region.status().message()), HasSubstr("a region: no "));
  EXPECT_EQ(FreeBytes(), before);
}

TEST_F(DeviceRegionsTest, ARegionOutlivesTheBackend) {
  const DeviceRegionSource source = backend_->device_region_source();
  backend_.reset();
  const std::vector<uint8_t> bytes(kDeviceRegionBlock, 7);
  Copy(region_.memory.get(), bytes.data(), kDeviceRegionBlock);
  EXPECT_EQ(BytesOf(region_.memory.get(), kDeviceRegionBlock), bytes);
  EXPECT_TRUE(source(1).ok());
}

TEST_F(DeviceRegionsTest, WhatIsInARegionIsKnownToTheByteUntilItEnds) {
  const auto regions = std::make_shared<DeviceRegions>(device_);
  EXPECT_FALSE(regions->Holds(region_.memory.get(), 1)) << "another's";
  auto a = regions->source()(1), b = regions->source()(kDeviceRegionBlock + 1);
  ASSERT_TRUE(a.ok() && b.ok());
  for (const auto& [region, bytes] :
       {std::pair{a->memory.get(), kDeviceRegionBlock}, {b->memory.get(), 2 * kDeviceRegionBlock}}) {
    EXPECT_TRUE(regions->Holds(region, bytes));
    EXPECT_TRUE(regions->Holds(region + bytes - 1, 1));
    EXPECT_FALSE(regions->Holds(region, bytes + 1));
    EXPECT_FALSE(regions->Holds(region + bytes - 1, 2));
    EXPECT_FALSE(regions->Holds(region + 1, INT64_MAX)) << "and does not wrap";
  }
  EXPECT_FALSE(regions->Holds(&regions, 1));
  const uint8_t* const was = a->memory.get();
  a->memory.reset();
  EXPECT_FALSE(regions->Holds(was, 1));
  EXPECT_TRUE(regions->Holds(b->memory.get(), 1));
}

// All of them in one step: what shares it changes no bit, and the executor is slow.
TEST_F(DeviceRegionsTest, EveryFormInPlaceOrApartGivesTheBitsOfTheOrdinaryCall) {
  CallMaker maker(*model_, ordinary_);
  std::vector<std::unique_ptr<MadeCall>> calls;
  for (const Form form : {Form::kHighway, Form::kUpdate, Form::kGate}) {
    for (const HighwayType type : {HighwayType::kF32, HighwayType::kBf16}) {
      calls.push_back(maker.Make({{2, 1}, {0, 1}, form, type}));
    }
  }
  const auto run = [&] {
    std::vector<Piece> pieces;
    for (const auto& made : calls) {
      made->Clear();
      pieces.push_back(WholeOf(*made));
    }
    EXPECT_TRUE(StartedStep(*backend_, pieces, shape_).Await().ok());
  };
  run();
  std::vector<std::vector<uint8_t>> expected;
  for (const auto& made : calls) expected.push_back(made->Bytes());
  for (const bool in_place : {true, false}) {
    for (const int64_t values_in : {0, 3}) {  // aligned to nothing but a value
      for (size_t c = 0; c < calls.size(); ++c) {
        const int64_t begin = values_in * kernels::HighwayBytesPerValue(calls[c]->call.highway_type);
        Move(*calls[c], static_cast<int64_t>(c << 19) + begin, in_place);
      }
      run();
      for (size_t c = 0; c < calls.size(); ++c) {
        EXPECT_EQ(Moved(*calls[c]), expected[c])
            << "call " << c << ", in place " << in_place << ", " << values_in << " values in";
      }
    }
  }
}

// Each of the two slots records its second use of a shape and replays its third.
TEST_F(DeviceRegionsTest, AReplayedShapeTakesWhereItsHighwayIsNow) {
  CallMaker maker(*model_, ordinary_);
  const auto made = maker.Make({{2}, {0}, Form::kHighway});
  const std::vector<uint8_t> expected = Ordinary(*made);
  for (int64_t run = 0; run < 7; ++run) {
    Move(*made, run * 65540, /*in_place=*/run % 2 == 0);
    ASSERT_TRUE(StartedStep(*backend_, {WholeOf(*made)}, shape_).Await().ok());
    ASSERT_EQ(Moved(*made), expected) << "run " << run;
  }
}

TEST_F(DeviceRegionsTest, OneStepTakesHighwaysFromEverywhere) {
  StagingPool pinned(0, backend_->staging_source());
  CallMaker maker(*model_, ordinary_), pinning(*model_, pinned);
  const auto plain = maker.Make({{3}, {0, 1}, Form::kHighway});
  const auto in_region = maker.Make({{4}, {0, 1}, Form::kHighway});
  const auto rows = maker.Make({{2}, {0, 1}, Form::kRowsBf16});
  const auto updating = maker.Make({{6}, {0, 1}, Form::kUpdate});
  const auto in_pinned = pinning.Make({{5}, {0, 1}, Form::kHighway});
  const std::vector<MadeCall*> calls = {plain.get(), in_region.get(), rows.get(), updating.get(), in_pinned.get()};
  std::vector<std::vector<uint8_t>> expected;
  for (MadeCall* made : calls) expected.push_back(Ordinary(*made));
  for (MadeCall* made : calls) made->Clear();
  Move(*in_region, 0, /*in_place=*/true);
  Move(*updating, 1 << 20, /*in_place=*/true);
  std::vector<Piece> pieces;
  for (MadeCall* made : calls) pieces.push_back(WholeOf(*made));
  ASSERT_TRUE(StartedStep(*backend_, pieces, shape_).Await().ok());
  for (size_t c = 0; c < calls.size(); ++c) EXPECT_EQ(Moved(*calls[c]), expected[c]) << "call " << c;
}

TEST_F(DeviceRegionsTest, AHighwayOfTheHostsMayBeUpdatedIntoARegionAndBack) {
  CallMaker maker(*model_, ordinary_);
  const auto made = maker.Make({{9}, {0, 1}, Form::kHighway});
  const std::vector<uint8_t> expected = Ordinary(*made);
  const std::vector<CallLayer> outside = made->call.layers;
  Move(*made, 0, /*in_place=*/false);
  const std::vector<CallLayer> inside = made->call.layers;
  for (const bool up : {true, false}) {
    made->Clear();
    for (size_t l = 0; l < outside.size(); ++l) {
      made->call.layers[l].highway = up ? outside[l].highway : inside[l].highway;
      made->call.layers[l].out = up ? inside[l].out : outside[l].out;
    }
    ASSERT_TRUE(StartedStep(*backend_, {WholeOf(*made)}, shape_).Await().ok());
    EXPECT_EQ(up ? Moved(*made) : made->Bytes(), expected) << "up " << up;
  }
}

TEST_F(DeviceRegionsTest, RefusedTokensKeepTheirPlaces) {
  CallMaker maker(*model_, ordinary_);
  const auto made = maker.Make({{2, 3, 4}, {0}, Form::kHighway, HighwayType::kF32, {}, false, /*refused=*/1});
  const int64_t token = HighwayBytes(shape_, HighwayType::kF32);
  const std::vector<uint8_t> ordinary = Ordinary(*made);
  Move(*made, 0, /*in_place=*/true);
  const std::vector<uint8_t> before = BytesOf(region_.memory.get(), 9 * token);
  ASSERT_TRUE(StartedStep(*backend_, {WholeOf(*made)}, shape_).Await().ok());
  std::vector<uint8_t> expected = ordinary;
  std::copy_n(before.begin() + 2 * token, 3 * token, expected.begin() + 2 * token);
  EXPECT_EQ(BytesOf(region_.memory.get(), 9 * token), expected);
}

// Pages that no thread may touch, but for noting the first one that does. One at a time.
struct Guarded {
  uint8_t* begin = nullptr;
  size_t bytes = 0;
  std::atomic<pid_t> toucher{0};
};
Guarded guarded[2];

pid_t ThisThread() { return static_cast<pid_t>(::syscall(SYS_gettid)); }

void NoteToucher(int signal, siginfo_t* info, void*) {
  const auto* address = static_cast<const uint8_t*>(info->si_addr);
  for (Guarded& pages : guarded) {
    if (address < pages.begin || address >= pages.begin + pages.bytes) continue;
    pid_t nobody = 0;
    pages.toucher.compare_exchange_strong(nobody, ThisThread());
    ::mprotect(pages.begin, pages.bytes, PROT_READ | PROT_WRITE);
    return;
  }
  ::signal(signal, SIG_DFL);
}

// What a device's address means to it, only its threads (here a stream's) know: on a GPU, any other would be SIGSEGV.
TEST_F(DeviceRegionsTest, NoThreadOfTheHostsTouchesARegion) {
  struct sigaction handler {
  }, was{};
  handler.sa_sigaction = NoteToucher;
  handler.sa_flags = SA_SIGINFO;
  sigemptyset(&handler.sa_mask);
  ASSERT_EQ(::sigaction(SIGSEGV, &handler, &was), 0);
  CallMaker maker(*model_, ordinary_);
  const auto made = maker.Make({{3}, {0}, Form::kHighway});
  const int64_t bytes = 3 * HighwayBytes(shape_, HighwayType::kF32);
  const auto base = reinterpret_cast<uintptr_t>(region_.memory.get());
  auto* const pages = reinterpret_cast<uint8_t*>((base + kPage - 1) / kPage * kPage);
  const size_t length = static_cast<size_t>((bytes + kPage - 1) / kPage * kPage);
  Copy(pages, made->highways[0].get(), bytes);
  made->call.layers[0].highway = pages;
  made->call.layers[0].out = pages + length;
  for (int i = 0; i < 2; ++i) {
    guarded[i].begin = pages + static_cast<size_t>(i) * length;
    guarded[i].bytes = length;
    guarded[i].toucher = 0;
    if (::mprotect(guarded[i].begin, length, PROT_NONE) != 0) GTEST_SKIP() << "the device's memory is not the host's";
  }
  pid_t completing = 0;
  Event done;
  const Step step = BuildStep({WholeOf(*made)}, shape_);
  backend_->Start(
      step, [&](size_t) { completing = ThisThread(); },
      [&](const absl::StatusOr<StepTimes>& times) {
        EXPECT_TRUE(times.ok()) << times.status();
        done.Notify();
      });
  done.Await();
  for (Guarded& range : guarded) {
    EXPECT_NE(range.toucher, 0) << "nobody, so this test sees nothing";
    EXPECT_NE(range.toucher, ThisThread());
    EXPECT_NE(range.toucher, completing);
    ASSERT_EQ(::mprotect(range.begin, length, PROT_READ | PROT_WRITE), 0);
  }
  ASSERT_EQ(::sigaction(SIGSEGV, &was, nullptr), 0);
}

TEST_F(DeviceRegionsTest, ThePlanHasRoomForThemInWholeBlocks) {
  const auto item = [this](int64_t bytes) {
    const auto plan = PlanCudaMemory(*model_, {.device_region_bytes = bytes}, device_->module());
    EXPECT_TRUE(plan.ok()) << plan.status();
    for (const CudaMemoryPlan::Item& one : plan->items) {
      if (one.name == "device_regions") return one.on_device ? one.bytes : -1;
    }
    return int64_t{-2};
  };
  EXPECT_EQ(item(0), 0);
  EXPECT_EQ(item(1), kDeviceRegionBlock);
  EXPECT_EQ(item(kDeviceRegionBlock), kDeviceRegionBlock);
  EXPECT_EQ(item(kDeviceRegionBlock + 1), 2 * kDeviceRegionBlock);
  const CudaPlanOptions options = {.device_region_bytes = int64_t{3} << 30};
  const auto plan = PlanCudaMemory(*model_, options, device_->module());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(std::string(CheckCudaMemory(*plan, options, int64_t{3} << 30).message()),
              HasSubstr("--device-region-bytes (3.0 GiB)"));
}

}  // namespace
}  // namespace engram
