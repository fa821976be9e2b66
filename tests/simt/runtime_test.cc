#include "tests/simt/runtime.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

__global__ void AddOne(int* values, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) values[i] += 1;
}

cudaError_t Launch(int* values, int count, cudaStream_t stream) {
  cudaLaunchConfig_t config;
  config.blockDim = 16;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, AddOne, values, count);
}

constexpr int kCount = 100;
constexpr size_t kBytes = kCount * sizeof(int);

class Runtime : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&device_, kBytes), cudaSuccess);
    ASSERT_EQ(cudaHostAlloc(&pinned_, kBytes, cudaHostAllocDefault), cudaSuccess);
    for (int i = 0; i < kCount; ++i) pinned_[i] = i;
  }
  void TearDown() override {
    unsetenv("SIMT_FAIL_AFTER");
    simt::MendContext();
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaFree(device_), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(pinned_), cudaSuccess);
  }

  cudaStream_t stream_ = nullptr;
  int* device_ = nullptr;
  int* pinned_ = nullptr;
};

TEST_F(Runtime, AStreamRunsItsWorkInOrder) {
  ASSERT_EQ(cudaMemcpyAsync(device_, pinned_, kBytes, cudaMemcpyDefault, stream_), cudaSuccess);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Launch(device_, kCount, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned_, device_, kBytes, cudaMemcpyDeviceToHost, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  for (int i = 0; i < kCount; ++i) EXPECT_EQ(pinned_[i], i + 3);
}

TEST_F(Runtime, PinnedMemoryHasOneAddressAndOrdinaryMemoryNone) {
  void* on_device = nullptr;
  ASSERT_EQ(cudaHostGetDevicePointer(&on_device, pinned_, 0), cudaSuccess);
  EXPECT_EQ(on_device, pinned_);
  int ordinary = 0;
  EXPECT_EQ(cudaHostGetDevicePointer(&on_device, &ordinary, 0), cudaErrorInvalidValue);
  cudaGetLastError();
}

TEST_F(Runtime, AStreamSaysWhetherItIsDone) {
  ASSERT_EQ(Launch(device_, kCount, stream_), cudaSuccess);
  const cudaError_t asked = cudaStreamQuery(stream_);
  EXPECT_TRUE(asked == cudaSuccess || asked == cudaErrorNotReady);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaSuccess);
}

TEST_F(Runtime, TheNullStreamRunsAtOnce) {
  ASSERT_EQ(cudaMemcpyAsync(device_, pinned_, kBytes, cudaMemcpyDefault), cudaSuccess);
  ASSERT_EQ(Launch(device_, kCount, nullptr), cudaSuccess);
  EXPECT_EQ(device_[7], 8);
}

TEST_F(Runtime, PageableMemoryIsCopiedOnReturn) {
  std::vector<int> pageable(kCount, 4);
  ASSERT_EQ(cudaMemcpyAsync(device_, pageable.data(), kBytes, cudaMemcpyDefault, stream_), cudaSuccess);
  pageable.assign(kCount, 0);
  ASSERT_EQ(Launch(device_, kCount, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pageable.data(), device_, kBytes, cudaMemcpyDefault, stream_), cudaSuccess);
  EXPECT_EQ(pageable[99], 5);
}

TEST_F(Runtime, EventsOrderStreams) {
  cudaStream_t second = nullptr;
  cudaEvent_t begin = nullptr, done = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&begin, cudaEventDefault), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&done, cudaEventDefault), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(done), cudaSuccess);  // never recorded
  ASSERT_EQ(cudaMemsetAsync(device_, 0, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(begin, stream_), cudaSuccess);
  for (int i = 0; i < 50; ++i) ASSERT_EQ(Launch(device_, kCount, stream_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(done, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second, done), cudaSuccess);
  ASSERT_EQ(Launch(device_, kCount, second), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(device_[0], 51);
  EXPECT_EQ(cudaEventQuery(done), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(done), cudaSuccess);
  float milliseconds = -1;
  ASSERT_EQ(cudaEventElapsedTime(&milliseconds, begin, done), cudaSuccess);
  EXPECT_GT(milliseconds, 0);
  EXPECT_EQ(cudaEventDestroy(begin), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(done), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(second), cudaSuccess);
}

TEST_F(Runtime, AGraphIsRecordedAndReplayed) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(device_, pinned_, kBytes, cudaMemcpyDefault, stream_), cudaSuccess);
  ASSERT_EQ(Launch(device_, kCount, stream_), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(pinned_, device_, kBytes, cudaMemcpyDefault, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiateWithFlags(&exec, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(pinned_[5], 5);  // captured, not run
  for (int i = 0; i < 4; ++i) ASSERT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(pinned_[5], 9);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  cudaGetLastError();
}

TEST_F(Runtime, CopiesInTwoDimensions) {
  ASSERT_EQ(cudaMemsetAsync(device_, 0, kBytes, stream_), cudaSuccess);
  // Columns 0 and 1 of 10 rows of 5 become rows of 2.
  ASSERT_EQ(cudaMemcpy2DAsync(device_, 8, pinned_, 20, 8, 10, cudaMemcpyDefault, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(device_[2], 5);
  EXPECT_EQ(device_[19], 46);
  EXPECT_EQ(device_[20], 0);
}

TEST_F(Runtime, ACopyBeyondItsMemoryIsRefused) {
  EXPECT_EQ(cudaMemcpyAsync(device_, pinned_, kBytes + 1, cudaMemcpyDefault, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(device_ + 1, 0, kBytes, stream_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(Runtime, MemoryIsCountedAndPoisoned) {
  size_t free = 0, total = 0;
  ASSERT_EQ(setenv("SIMT_DEVICE_BYTES", "1000", 1), 0);
  char *memory = nullptr, *more = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 600), cudaSuccess);
  EXPECT_EQ(memory[599], '\xFF');
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total, 1000u);
  EXPECT_EQ(free, 0u);  // with the 400 of the fixture
  EXPECT_EQ(cudaMalloc(&more, 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaFree(pinned_), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(free, 600u);
  unsetenv("SIMT_DEVICE_BYTES");
  cudaGetLastError();
}

TEST_F(Runtime, AHandleOpensDeviceMemoryWithinTheProcess) {
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, device_), cudaSuccess);
  void* opened = nullptr;
  ASSERT_EQ(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess), cudaSuccess);
  EXPECT_EQ(opened, device_);
  EXPECT_EQ(cudaIpcCloseMemHandle(opened), cudaSuccess);
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, device_ + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, pinned_), cudaErrorInvalidValue);
  void* gone = nullptr;
  ASSERT_EQ(cudaMalloc(&gone, 64), cudaSuccess);
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, gone), cudaSuccess);
  ASSERT_EQ(cudaFree(gone), cudaSuccess);
  EXPECT_EQ(cudaIpcOpenMemHandle(&opened, handle, 0), cudaErrorInvalidValue);
  setenv("SIMT_IPC", "0", 1);
  EXPECT_EQ(cudaIpcGetMemHandle(&handle, device_), cudaErrorNotSupported);
  unsetenv("SIMT_IPC");
}

TEST_F(Runtime, RegisteredMemoryIsPinned) {
  std::vector<char> memory(8192);
  EXPECT_EQ(cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterDefault), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(memory.data() + 4096, 4096, cudaHostRegisterDefault),
            cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaHostUnregister(memory.data()), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(memory.data()), cudaErrorHostMemoryNotRegistered);
  cudaGetLastError();
}

TEST_F(Runtime, ABrokenContextStaysBroken) {
  ASSERT_EQ(cudaMemsetAsync(device_, 0, kBytes, stream_), cudaSuccess);
  ASSERT_EQ(setenv("SIMT_FAIL_AFTER", "3", 1), 0);
  simt::MendContext();
  ASSERT_EQ(Launch(device_, kCount, stream_), cudaSuccess);
  ASSERT_EQ(Launch(device_, kCount, stream_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  Launch(device_, kCount, stream_);  // fails when it runs
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorIllegalAddress);
  EXPECT_EQ(device_[0], 2);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 4), cudaErrorIllegalAddress);
  EXPECT_EQ(memory, nullptr);
  EXPECT_EQ(cudaMemsetAsync(device_, 0, 4, nullptr), cudaErrorIllegalAddress);
}

TEST_F(Runtime, TheDevice) {
  int count = 0, version = 0, value = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  EXPECT_EQ(count, 1);
  EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaDriverGetVersion(&version), cudaSuccess);
  EXPECT_EQ(version, 13000);
  cudaDeviceProp properties;
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_STREQ(properties.name, "SIMT executor");
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(value, properties.multiProcessorCount);
  EXPECT_STREQ(cudaGetErrorString(cudaErrorIllegalAddress), "an illegal memory access was encountered");
  EXPECT_STREQ(cudaGetErrorName(cudaErrorLaunchFailure), "cudaErrorLaunchFailure");
  cudaGetLastError();
}

}  // namespace
