// The CUDA backend against a module that computes on the host (host_cuda_module.cc): whatever layers, forms, lengths
// and steps are under way together, every call is what the CPU makes of it alone.
#include "server/engine/cuda_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "server/engine/cuda_memory_plan.h"
#include "tests/engine/backend_calls.h"

namespace engram {
namespace {

using kernels::HighwayType;
using ::testing::HasSubstr;

class CudaBackendTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int64_t kBatch = 1024;

  void SetUp() override {
    LoadOptions mapped;
    mapped.residency = Residency::kMmap;
    auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + GetParam(), mapped);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *model;
    shape_ = ShapeOf(*model_);
    last_ = shape_.layers - 1;
    auto device = CudaDevice::Open(ENGRAM_CUDA_TEST_MODULE, 0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *device;
    cuda_ = MakeCuda(model_, {.threads = 2, .max_batch_tokens = kBatch, .prepare_memory_bytes = 32 << 20});
    auto reference = CpuBackend::Create(model_, kernels::CpuKernels(), {.threads = 1, .max_batch_tokens = kBatch});
    ASSERT_TRUE(reference.ok()) << reference.status();
    reference_ = *std::move(reference);
  }

  std::unique_ptr<CudaBackend> MakeCuda(const std::shared_ptr<const EngramModel>& model, CudaBackendOptions options) {
    const auto plan = PlanCudaMemory(*model,
                                     {.max_batch_tokens = options.max_batch_tokens,
                                      .prepare_memory_bytes = options.prepare_memory_bytes,
                                      .tables_on_device = options.tables_on_device},
                                     device_->module());
    EXPECT_TRUE(plan.ok()) << plan.status();
    auto backend = CudaBackend::Create(device_, model, *plan, std::move(options));
    EXPECT_TRUE(backend.ok()) << backend.status();
    return *std::move(backend);
  }

  std::vector<uint8_t> RunAlone(Backend& backend, MadeCall& made) {
    made.Clear();
    const auto times = StartedStep(backend, {WholeOf(made)}, shape_).Await();
    EXPECT_TRUE(times.ok()) << times.status();
    return made.Bytes();
  }

  // docs/numerics.md, as far as another order of kv's sums may move what follows from it.
  void ExpectNear(const MadeCall& made, const std::vector<uint8_t>& got, const std::vector<uint8_t>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    if (!NeedsKv(made.call.form)) {
      EXPECT_EQ(got, expected) << "rows are the same bits everywhere";
      return;
    }
    // Of each array of a call the width of a value follows from the form.
    size_t begin = 0;
    const auto compare = [&](int64_t bytes, size_t width) {
      const size_t end = begin + static_cast<size_t>(bytes);
      double squares = 0;
      for (size_t at = begin; at < end; at += width) squares += std::pow(Value(expected, at, width), 2);
      const double rms = std::sqrt(squares / std::max(1.0, static_cast<double>(bytes) / static_cast<double>(width)));
      for (size_t at = begin; at < end; at += width) {
        const double b = Value(expected, at, width);
        ASSERT_NEAR(Value(got, at, width), b, std::abs(b) / 64 + rms / 128) << "byte " << at;
      }
      begin = end;
    };
    const size_t out_width = made.call.form == Form::kHighway && made.call.highway_type == HighwayType::kF32 ? 4 : 2;
    for (const int64_t bytes : made.outputs.out_bytes) compare(bytes, out_width);
    for (const int64_t bytes : made.outputs.gates_bytes) compare(bytes, 4);
    for (const int64_t bytes : made.outputs.value_bytes) compare(bytes, 2);
  }

  static double Value(const std::vector<uint8_t>& bytes, size_t at, size_t width) {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + at, width);
    if (width == 2) word <<= 16;
    float value = 0;
    std::memcpy(&value, &word, 4);
    return value;
  }

  // Every form, type and way to rows, and all three lengths of calls.
  std::vector<std::unique_ptr<MadeCall>> MakeMixed(CallMaker& maker) {
    const int64_t kv = shape_.kv_values();
    std::vector<std::unique_ptr<MadeCall>> calls;
    const auto add = [&](const CallSpec& spec) { calls.push_back(maker.Make(spec)); };
    add({{3, 1}, {0, last_}, Form::kHighway});
    add({{70}, {last_}, Form::kHighway});
    add({{5}, {last_}, Form::kKv});
    add({{1}, {0}, Form::kHighway, HighwayType::kBf16});
    add({{530}, {0}, Form::kKv, HighwayType::kF32, {3, kv - 5}});
    add({{2, 2, 2}, {last_, 0}, Form::kUpdate, HighwayType::kBf16});
    add({{4}, {0}, Form::kGate});
    add({{6}, {0, last_}, Form::kRowsNative, HighwayType::kF32, {1, 3}});
    add({{7}, {last_}, Form::kRowsBf16});
    add({{9}, {0, last_}, Form::kUpdate, HighwayType::kF32, {}, /*by_row_ids=*/true});
    add({{2, 3, 4}, {0}, Form::kHighway, HighwayType::kF32, {}, false, /*refused=*/1});
    add({{65}, {0}, Form::kUpdate});
    return calls;
  }

  std::shared_ptr<const EngramModel> model_;
  StepShape shape_;
  int last_ = 0;
  std::shared_ptr<const CudaDevice> device_;
  std::unique_ptr<CudaBackend> cuda_;
  std::unique_ptr<CpuBackend> reference_;
  StagingPool ordinary_{0};
};

TEST_P(CudaBackendTest, AMixedStepIsEachCallAloneOnTheCpu) {
  StagingPool pinned(0, cuda_->staging_source());
  for (StagingPool* pool : {&ordinary_, &pinned}) {
    CallMaker maker(*model_, *pool);
    const auto calls = MakeMixed(maker);
    std::vector<Piece> pieces;
    for (const auto& made : calls) pieces.push_back(WholeOf(*made));
    const auto times = StartedStep(*cuda_, pieces, shape_).Await();
    ASSERT_TRUE(times.ok()) << times.status();
    EXPECT_GT(times->rows_gathered, 0);
    for (const auto& made : calls) {
      SCOPED_TRACE(testing::Message() << "form " << static_cast<int>(made->call.form) << ", " << made->call.tokens
                                      << " tokens, pinned " << (pool == &pinned));
      const std::vector<uint8_t> mixed = made->Bytes();
      EXPECT_EQ(RunAlone(*cuda_, *made), mixed) << "what shares the step changes no bit";
      ExpectNear(*made, mixed, RunAlone(*reference_, *made));
    }
  }
}

TEST_P(CudaBackendTest, AShapeThatRecursIsReplayedWithTheSameBits) {
  CallMaker maker(*model_, ordinary_);
  const auto calls = MakeMixed(maker);
  for (size_t c = 0; c < calls.size(); ++c) {
    const std::vector<uint8_t> first = RunAlone(*cuda_, *calls[c]);
    // Each of the two slots records its second and replays its third; one of the first 64 is timed and not replayed.
    const int runs = c == 0 ? 70 : 5;
    for (int i = 0; i < runs; ++i) ASSERT_EQ(RunAlone(*cuda_, *calls[c]), first) << "call " << c << ", run " << i;
  }
}

TEST_P(CudaBackendTest, OtherTokensOfAReplayedShapeAreComputedNotRemembered) {
  CallMaker maker(*model_, ordinary_);
  for (int i = 0; i < 8; ++i) {
    const auto made = maker.Make({{4, 2}, {0, last_}, Form::kHighway});
    const std::vector<uint8_t> got = RunAlone(*cuda_, *made);
    ExpectNear(*made, got, RunAlone(*reference_, *made));
  }
}

TEST_P(CudaBackendTest, ACutCallKeepsThePathOfItsLength) {
  CallMaker maker(*model_, ordinary_);
  for (const int64_t tokens : {40, 200, 600}) {
    const auto made = maker.Make({{tokens}, {0, last_}, Form::kKv});
    const std::vector<uint8_t> whole = RunAlone(*cuda_, *made);
    made->Clear();
    for (int64_t begin = 0; begin < tokens; begin += 37) {
      const auto times = StartedStep(*cuda_, {{&made->call, begin, std::min(tokens, begin + 37)}}, shape_).Await();
      ASSERT_TRUE(times.ok()) << times.status();
    }
    EXPECT_EQ(made->Bytes(), whole) << tokens << " tokens";
  }
}

TEST_P(CudaBackendTest, ATicketGivesWhatTheCallItselfWouldHave) {
  CallMaker maker(*model_, ordinary_);
  const auto direct = maker.Make({{6}, {0, last_}, Form::kHighway});
  const std::vector<uint8_t> expected = RunAlone(*cuda_, *direct);

  auto prepared = std::make_shared<Prepared>();
  prepared->tokens = 6;
  prepared->ids.resize(static_cast<size_t>(6 * shape_.layers * shape_.columns));
  prepared->token_mask = direct->call.token_mask;
  Call prepare;
  prepare.form = Form::kPrepare;
  prepare.sequences = direct->call.sequences;
  prepare.tokens = 6;
  prepare.windows = direct->call.windows;
  prepare.preparing = prepared;
  for (const CallLayer& layer : direct->call.layers) {
    const StagingMemory kv = cuda_->TakePreparedKv(6 * shape_.kv_values() * 2);
    ASSERT_NE(kv, nullptr);
    prepared->layers.push_back({layer.layer, kv});
    prepare.layers.push_back({.layer = layer.layer, .out = kv.get()});
  }
  ASSERT_TRUE(StartedStep(*cuda_, {{&prepare, 0, 6}}, shape_).Await().ok());

  direct->Clear();
  direct->call.windows.clear();
  direct->call.prepared = prepared;
  EXPECT_EQ(RunAlone(*cuda_, *direct), expected);
  // Of a layer that was not prepared, from the ids alone.
  prepared->layers.resize(1);
  EXPECT_EQ(RunAlone(*cuda_, *direct), expected);
}

TEST_P(CudaBackendTest, TwoStepsUnderWayAreEachTheirOwn) {
  CallMaker maker(*model_, ordinary_);
  const auto a = maker.Make({{30}, {0, last_}, Form::kHighway});
  const auto b = maker.Make({{50}, {0, last_}, Form::kUpdate});
  const std::vector<uint8_t> alone_a = RunAlone(*cuda_, *a);
  const std::vector<uint8_t> alone_b = RunAlone(*cuda_, *b);
  for (int i = 0; i < 50; ++i) {
    a->Clear();
    b->Clear();
    StartedStep first(*cuda_, {WholeOf(*a)}, shape_);
    StartedStep second(*cuda_, {WholeOf(*b)}, shape_);
    ASSERT_TRUE(first.Await().ok());
    ASSERT_EQ(a->Bytes(), alone_a);
    ASSERT_TRUE(second.Await().ok());
    ASSERT_EQ(b->Bytes(), alone_b);
  }
}

TEST_P(CudaBackendTest, TablesOfPinnedHostMemoryGiveTheSameBits) {
  const auto resident = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + GetParam(), {});
  ASSERT_TRUE(resident.ok()) << resident.status();
  const auto host =
      MakeCuda(*resident, {.max_batch_tokens = 64, .prepare_memory_bytes = 1 << 20, .tables_on_device = false});
  CallMaker maker(*model_, ordinary_);
  const auto made = maker.Make({{33}, {0, last_}, Form::kHighway});
  const std::vector<uint8_t> expected = RunAlone(*cuda_, *made);
  EXPECT_EQ(RunAlone(*host, *made), expected);
  EXPECT_EQ(host->numerics_id(), cuda_->numerics_id());
}

TEST_P(CudaBackendTest, AStepBeyondItsSizeIsRefusedNotOverrun) {
  CallMaker maker(*model_, ordinary_);
  const auto made = maker.Make({{kBatch + 1}, {0}, Form::kGate});
  const auto times = StartedStep(*cuda_, {WholeOf(*made)}, shape_).Await();
  EXPECT_EQ(times.status().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(cuda_->health().ok()) << "the next one may be smaller";
}

TEST_P(CudaBackendTest, AStepOfLayersWithoutWorkIsDone) {
  CallMaker maker(*model_, ordinary_);
  const auto made = maker.Make({{2}, {0, last_}, Form::kHighway, HighwayType::kF32, {}, false, /*refused=*/0});
  const std::vector<uint8_t> before = made->Bytes();
  ASSERT_TRUE(StartedStep(*cuda_, {WholeOf(*made)}, shape_).Await().ok());
  EXPECT_EQ(made->Bytes(), before);
}

TEST_P(CudaBackendTest, PreparedBlocksOutliveTheBackend) {
  const StagingMemory block = cuda_->TakePreparedKv(1000);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(cuda_->TakePreparedKv(int64_t{1} << 62), nullptr);
  EXPECT_EQ(cuda_->TakePreparedKv(32 << 20), nullptr) << "what is left is less";
  cuda_.reset();
  std::memset(block.get(), 1, 1000);
}

TEST_P(CudaBackendTest, ThePlanIsWhatIsTaken) {
  cuda_.reset();
  const auto before = device_->FreeBytes();
  const CudaPlanOptions options = {.max_batch_tokens = 100, .prepare_memory_bytes = 4 << 20};
  const auto plan = PlanCudaMemory(*model_, options, device_->module());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto backend = MakeCuda(model_, {.max_batch_tokens = 100, .prepare_memory_bytes = 4 << 20});
  const auto after = device_->FreeBytes();
  ASSERT_TRUE(before.ok() && after.ok());
  int64_t upload = 0;  // given back once the model is up
  for (const CudaMemoryPlan::Item& item : plan->items) upload += item.name == "upload" ? item.bytes : 0;
  // Blocks that the plan rounds up are taken to the byte.
  EXPECT_LE(*before - *after, plan->DeviceBytes() - upload);
  EXPECT_GE(*before - *after, plan->DeviceBytes() - upload - 64 * kCudaAlignment);
}

TEST_P(CudaBackendTest, APlanThatDoesNotFitSaysWhatWouldHelp) {
  const CudaPlanOptions options = {.max_batch_tokens = 100, .prepare_memory_bytes = int64_t{3} << 30};
  const auto plan = PlanCudaMemory(*model_, options, device_->module());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const absl::Status refused = CheckCudaMemory(*plan, options, int64_t{3} << 30);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"--residency host", "--layers", "--max-batch-tokens", "--prepare-memory-bytes (3.0 GiB)",
                           "3221225472 (3.0 GiB) free"}) {
    EXPECT_THAT(std::string(refused.message()), HasSubstr(part));
  }
  EXPECT_TRUE(CheckCudaMemory(*plan, options, int64_t{5} << 30).ok());
  const CudaPlanOptions beyond = {.max_batch_tokens = 100, .prepare_memory_bytes = INT64_MAX - 1000};
  EXPECT_EQ(PlanCudaMemory(*model_, beyond, device_->module()).status().code(), absl::StatusCode::kOutOfRange);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, CudaBackendTest,
                         ::testing::Values("/tiny/tiny.gguf", "/split/split-00001-of-00002.gguf"));

TEST(CudaModuleTest, WhatIsMissingIsNamed) {
  const auto absent = CudaDevice::Open("/nowhere/libengram_cuda.so", 0);
  EXPECT_THAT(std::string(absent.status().message()), HasSubstr("/nowhere/libengram_cuda.so"));
  const auto none = CudaDevice::Open("libm.so.6", 0);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("has no engram_cuda_module"));
  const auto third = CudaDevice::Open(ENGRAM_CUDA_TEST_MODULE, 3);
  EXPECT_EQ(third.status().message(), "--device 3: this machine has 1");
}

}  // namespace
}  // namespace engram
