// A device whose context breaks under way: SIMT_FAIL_AFTER in this test's environment lets the copies and kernels of
// the upload and of some steps through.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "server/engine/cuda_backend.h"
#include "tests/engine/backend_calls.h"

namespace engram {
namespace {

using ::testing::HasSubstr;

TEST(CudaBrokenTest, ABrokenContextFailsTheStepAtHandAndAllLaterOnes) {
  const auto model = EngramModel::Load(std::string(ENGRAM_TEST_DATA) + "/tiny/tiny.gguf", {});
  ASSERT_TRUE(model.ok()) << model.status();
  const auto device = CudaDevice::Open(ENGRAM_CUDA_TEST_MODULE, 0);
  ASSERT_TRUE(device.ok()) << device.status();
  const auto plan = PlanCudaMemory(**model, {.max_batch_tokens = 64}, (*device)->module());
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::atomic<int> failed = 0, broken = 0;
  const auto backend = CudaBackend::Create(*device, *model, *plan,
                                           {.max_batch_tokens = 64,
                                            .prepare_memory_bytes = 1 << 20,
                                            .failed = [&](const absl::Status&) { ++failed; },
                                            .broken = [&](const absl::Status&) { ++broken; }});
  ASSERT_TRUE(backend.ok()) << backend.status();

  StagingPool pool(0);
  const StepShape shape = ShapeOf(**model);
  CallMaker maker(**model, pool);
  const auto made = maker.Make({{8}, {0, shape.layers - 1}, Form::kHighway});
  const auto run = [&] { return StartedStep(**backend, {WholeOf(*made)}, shape).Await().status(); };
  ASSERT_TRUE(run().ok()) << "SIMT_FAIL_AFTER is too small for this test";
  EXPECT_TRUE((*backend)->health().ok());
  absl::Status status;
  for (int i = 0; i < 10000 && status.ok(); ++i) status = run();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("an illegal memory access was encountered"));
  EXPECT_EQ(failed, 1);
  EXPECT_EQ(broken, 1);
  EXPECT_THAT(std::string((*backend)->health().message()), HasSubstr("the CUDA context is broken"));
  EXPECT_EQ(run(), (*backend)->health()) << "at once, without touching the device";
  EXPECT_EQ(run().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(broken, 1);
}

}  // namespace
}  // namespace engram
