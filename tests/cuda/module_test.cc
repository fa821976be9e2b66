// libengram_cuda.so as a server meets it, with a device or without one.
#include "kernels/cuda/module.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

namespace engram::kernels::cuda {
namespace {

// Of cuda_runtime_api.h, which a server does not include either.
constexpr int kInvalidValue = 1, kInsufficientDriver = 35, kNoDevice = 100, kInvalidDevice = 101, kUnknown = 999;
constexpr int kStubLibrary = 34, kOperatingSystem = 304, kSystemDriverMismatch = 803;

const Module& Table() {
  static const Module* const table = [] {
    void* library = dlopen(ENGRAM_CUDA_MODULE, RTLD_NOW | RTLD_LOCAL);
    EXPECT_NE(library, nullptr) << dlerror();
    auto* offer = library == nullptr ? nullptr : reinterpret_cast<ModuleFn*>(dlsym(library, kModuleSymbol));
    EXPECT_NE(offer, nullptr) << "no symbol " << kModuleSymbol;
    return offer == nullptr ? nullptr : offer();
  }();
  EXPECT_NE(table, nullptr);
  return *table;
}

// What this machine has: 0 devices where the runtime says why.
int Devices(int* error) {
  int count = 0;
  *error = Table().device_count(&count);
  return *error == 0 ? count : 0;
}

TEST(CudaModule, IsOfThisHeadersVersionAndOffersEveryFunction) {
  const Module& table = Table();
  EXPECT_EQ(table.version, kModuleVersion);
  // After the version the table is pointers to functions and nothing else.
  const auto* bytes = reinterpret_cast<const char*>(&table);
  static_assert(sizeof(void*) == sizeof(table.error_text) && sizeof(Module) % sizeof(void*) == 0);
  for (size_t at = offsetof(Module, error_text); at < sizeof(Module); at += sizeof(void*)) {
    void* function = nullptr;
    std::memcpy(&function, bytes + at, sizeof(function));
    EXPECT_NE(function, nullptr) << "entry at byte " << at << " of the table";
  }
}

TEST(CudaModule, SaysWhichRuntimeItCarriesAndWhetherThereIsADriver) {
  int driver = -1, runtime = -1;
  ASSERT_EQ(Table().versions(&driver, &runtime), 0);
  EXPECT_GE(runtime, 12000);
  EXPECT_GE(driver, 0);
  int error = 0;
  EXPECT_TRUE(Devices(&error) == 0 || driver > 0);
}

TEST(CudaModule, WithoutADeviceEveryQuestionIsAnErrorWithItsText) {
  const Module& table = Table();
  int error = 0;
  if (Devices(&error) > 0) {
    DeviceInfo info;
    ASSERT_EQ(table.device_info(0, &info), 0);
    EXPECT_GT(std::strlen(info.name), 0U);
    EXPECT_GT(info.total_bytes, 0);
    EXPECT_EQ(table.check_device(), 0);
    return;
  }
  const std::set<int> no_device = {kInsufficientDriver, kNoDevice, kStubLibrary, kOperatingSystem,
                                   kSystemDriverMismatch};
  EXPECT_TRUE(no_device.contains(error)) << error << ": " << table.error_text(error);
  const std::string text = table.error_text(error);
  EXPECT_TRUE(text.find("driver") != std::string::npos || text.find("device") != std::string::npos) << text;
  EXPECT_FALSE(table.sticky(error)) << "no driver is not a broken context";

  void* memory = nullptr;
  EXPECT_NE(table.use_device(0), 0);
  EXPECT_NE(table.allocate(4096, &memory), 0);
  EXPECT_EQ(memory, nullptr);
  EXPECT_NE(table.allocate_pinned(4096, &memory), 0);
  EXPECT_EQ(memory, nullptr);
  CUstream_st* stream = nullptr;
  EXPECT_NE(table.create_stream(&stream), 0);
  Gemm* gemm = nullptr;
  alignas(16) const Bf16 weights[16] = {};
  EXPECT_NE(table.create_gemm(weights, 1, 16, 64, &gemm), 0);
  EXPECT_EQ(gemm, nullptr);
  EXPECT_EQ(table.check_device(), 0) << "nothing is broken that could be mended by starting again";
}

TEST(CudaModule, StickyErrorsAreThoseThatLeaveNoContext) {
  const Module& table = Table();
  // Illegal address, launch timeout, assert, stack, instruction, alignment, address space, pc, launch failure, ECC,
  // NVLink.
  for (const int error : {700, 702, 710, 714, 715, 716, 717, 718, 719, 214, 220, 709}) {
    EXPECT_TRUE(table.sticky(error)) << error << ": " << table.error_text(error);
  }
  // Invalid value, no memory, invalid configuration, not ready, too many resources, no kernel image.
  for (const int error : {0, kInvalidValue, 2, 9, 600, 701, 209, kNoDevice, kInvalidDevice, kUnknown}) {
    EXPECT_FALSE(table.sticky(error)) << error << ": " << table.error_text(error);
  }
  EXPECT_NE(table.error_text(123456), nullptr);
}

TEST(CudaModule, LengthsBelowZeroAndShapesThatCannotBeAreRefusedBeforeTheDevice) {
  const Module& table = Table();
  void* memory = nullptr;
  Bf16 values[16] = {};
  EXPECT_EQ(table.allocate(-1, &memory), kInvalidValue);
  EXPECT_EQ(table.allocate_pinned(-1, &memory), kInvalidValue);
  EXPECT_EQ(table.pin(values, -1), kInvalidValue);
  EXPECT_EQ(table.copy(values, values, -1, nullptr), kInvalidValue);
  EXPECT_EQ(table.copy(values, values, 0, nullptr), 0);
  EXPECT_EQ(table.fill(values, 0, -1, nullptr), kInvalidValue);
  EXPECT_EQ(table.copy_2d(values, 2, values, 4, 4, 1, nullptr), kInvalidValue) << "a pitch shorter than its row";
  EXPECT_EQ(table.copy_2d(values, 4, values, 4, 4, 0, nullptr), 0);
  Gemm* gemm = nullptr;
  EXPECT_EQ(table.create_gemm(nullptr, 16, 256, 64, &gemm), kInvalidValue);
  EXPECT_EQ(table.create_gemm(values + 1, 16, 256, 64, &gemm), kInvalidValue) << "not aligned to 16";
  EXPECT_EQ(table.destroy_gemm(nullptr), 0);
  EXPECT_EQ(table.destroy_event(nullptr), 0);
  EXPECT_EQ(table.project({TileSource::kQ2K, nullptr, 16, 255}, values, 1, values, 132, nullptr), kInvalidValue);
  EXPECT_EQ(table.apply_gate({nullptr, kMaxCopies + 1, 16, 0}, {nullptr, 1, HighwayType::kF32}, nullptr),
            kInvalidValue);
}

TEST(CudaModule, TokensArePaddedToWholeTiles) {
  const Module& table = Table();
  EXPECT_EQ(table.padded_tokens(0), 0);
  EXPECT_EQ(table.padded_tokens(1), 64);
  EXPECT_EQ(table.padded_tokens(64), 64);
  EXPECT_EQ(table.padded_tokens(65), 128);
  EXPECT_GT(table.gemm_workspace_bytes(), 0);
}

}  // namespace
}  // namespace engram::kernels::cuda
