#include "tests/simt/runtime.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

// Work in order, on a thread of its own.
struct CUstream_st {
  CUstream_st() : worker([this] { Run(); }) {}
  ~CUstream_st() {
    Push({});
    worker.join();
  }

  void Push(Work work) {
    const std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }

  void Drain() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return queue.empty(); });
  }

  // Empty work ends it.
  void Run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return !queue.empty(); });
      const Work work = queue.front();
      if (!work) return;
      lock.unlock();
      work();
      lock.lock();
      queue.pop_front();
      changed.notify_all();
    }
  }

  std::unique_ptr<std::vector<Work>> captured;  // while it is captured
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;  // the first is being run
  std::thread worker;
};

// What one cudaEventRecord stands for; an event points to its latest.
struct Mark {
  void Reach() {
    const std::lock_guard lock(mutex);
    at = Clock::now();
    reached = true;
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return reached; });
  }
  bool IsReached() {
    const std::lock_guard lock(mutex);
    return reached;
  }

  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  Clock::time_point at;
};

struct CUevent_st {
  bool timing = false;
  std::shared_ptr<Mark> mark;
};
struct CUgraph_st {
  std::vector<Work> nodes;
};
struct CUgraphExec_st {
  std::shared_ptr<const std::vector<Work>> nodes;
};

namespace {

enum class Memory { kDevice, kPinned, kRegistered };
struct Region {
  size_t bytes;
  Memory kind;
};

std::mutex state_mutex;
std::map<uintptr_t, Region> regions;          // by their first byte
std::map<const void*, size_t> shared_limits;  // by kernel
size_t device_used = 0;
std::mutex streams_mutex;
std::set<CUstream_st*> streams;  // those that live
std::atomic<int64_t> kernels_run = 0;
std::atomic<cudaError_t> broken = cudaSuccess;
thread_local cudaError_t last_error = cudaSuccess;

constexpr int kVersion = 13000;
constexpr int kMultiprocessors = 4;
constexpr size_t kPage = 4096;

size_t DeviceBytes() {
  const char* text = getenv("SIMT_DEVICE_BYTES");
  return text == nullptr ? size_t{4} << 30 : strtoull(text, nullptr, 10);
}

// A broken context answers everything with its error.
cudaError_t Return(cudaError_t error) {
  if (broken != cudaSuccess) error = broken;
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

void CountKernel() {
  const int64_t number = ++kernels_run;
  const char* text = getenv("SIMT_FAIL_AFTER");
  if (text != nullptr && number >= strtoll(text, nullptr, 10)) broken = cudaErrorIllegalAddress;
}

// Null where nothing that we know of holds `memory`.
const std::pair<const uintptr_t, Region>* Find(const void* memory) {
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto next = regions.upper_bound(address);
  if (next == regions.begin()) return nullptr;
  --next;
  return address < next->first + next->second.bytes ? &*next : nullptr;
}

// Does a copy of `bytes` stay within what `memory` lies in? `pageable` is set where that is ordinary host memory.
bool Fits(const void* memory, size_t bytes, bool* pageable) {
  const std::lock_guard lock(state_mutex);
  const auto* region = Find(memory);
  if (region == nullptr) {
    *pageable = true;
    return true;
  }
  return reinterpret_cast<uintptr_t>(memory) + bytes <= region->first + region->second.bytes;
}

// In the order of the stream; `now`: and done on return.
cudaError_t Submit(cudaStream_t stream, Work work, bool now = false) {
  if (broken != cudaSuccess) return Return(broken);
  if (stream == nullptr) {
    work();
    return Return(cudaSuccess);
  }
  if (stream->captured != nullptr) {
    stream->captured->push_back(std::move(work));
    return Return(cudaSuccess);
  }
  stream->Push([work = std::move(work)] {
    if (broken == cudaSuccess) work();
  });
  if (now) stream->Drain();
  return Return(cudaSuccess);
}

cudaError_t Allocate(void** memory, size_t bytes, size_t alignment, Memory kind) {
  if (memory == nullptr) return Return(cudaErrorInvalidValue);
  *memory = nullptr;
  if (broken != cudaSuccess || bytes == 0) return Return(cudaSuccess);
  const std::lock_guard lock(state_mutex);
  if (kind == Memory::kDevice && bytes > DeviceBytes() - std::min(device_used, DeviceBytes())) {
    return Return(cudaErrorMemoryAllocation);
  }
  if (posix_memalign(memory, alignment, bytes) != 0) return Return(cudaErrorMemoryAllocation);
  constexpr size_t kAll = 64 << 20, kEnd = 1 << 20;
  if (bytes <= kAll) {
    memset(*memory, 0xFF, bytes);
  } else {
    memset(*memory, 0xFF, kEnd);
    memset(static_cast<char*>(*memory) + bytes - kEnd, 0xFF, kEnd);
  }
  if (kind == Memory::kDevice) device_used += bytes;
  regions[reinterpret_cast<uintptr_t>(*memory)] = {bytes, kind};
  return Return(cudaSuccess);
}

// Of memory that was allocated or registered as `kind`, forgets it; what it was in `bytes`, 0 where it was not.
size_t Forget(void* memory, Memory kind) {
  const std::lock_guard lock(state_mutex);
  const auto region = regions.find(reinterpret_cast<uintptr_t>(memory));
  if (region == regions.end() || region->second.kind != kind) return 0;
  const size_t bytes = region->second.bytes;
  if (kind == Memory::kDevice) device_used -= bytes;
  regions.erase(region);
  return bytes;
}

// Waits for the device first, as CUDA does. A broken context frees too: it is the test's memory.
cudaError_t Release(void* memory, Memory kind) {
  if (memory == nullptr) return Return(cudaSuccess);
  cudaDeviceSynchronize();
  if (Forget(memory, kind) == 0) return Return(cudaErrorInvalidValue);
  free(memory);
  return Return(cudaSuccess);
}

bool Known(cudaStream_t stream) {
  const std::lock_guard lock(streams_mutex);
  return stream == nullptr || streams.count(stream) != 0;
}

bool Captures(cudaStream_t stream) { return stream != nullptr && stream->captured != nullptr; }

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define ENGRAM_SIMT_NAME(name) \
  case name:                   \
    return #name;
    ENGRAM_SIMT_NAME(cudaSuccess)
    ENGRAM_SIMT_NAME(cudaErrorInvalidValue)
    ENGRAM_SIMT_NAME(cudaErrorMemoryAllocation)
    ENGRAM_SIMT_NAME(cudaErrorInvalidConfiguration)
    ENGRAM_SIMT_NAME(cudaErrorNoDevice)
    ENGRAM_SIMT_NAME(cudaErrorInvalidDevice)
    ENGRAM_SIMT_NAME(cudaErrorInvalidResourceHandle)
    ENGRAM_SIMT_NAME(cudaErrorNotReady)
    ENGRAM_SIMT_NAME(cudaErrorIllegalAddress)
    ENGRAM_SIMT_NAME(cudaErrorHostMemoryAlreadyRegistered)
    ENGRAM_SIMT_NAME(cudaErrorHostMemoryNotRegistered)
    ENGRAM_SIMT_NAME(cudaErrorLaunchFailure)
    ENGRAM_SIMT_NAME(cudaErrorNotSupported)
    ENGRAM_SIMT_NAME(cudaErrorStreamCaptureUnsupported)
#undef ENGRAM_SIMT_NAME
    default:
      return "cudaErrorUnknown";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorNotSupported:
      return "operation not supported";
    default:
      return cudaGetErrorName(error);
  }
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return broken != cudaSuccess ? broken.load() : last_error; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return Return(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return Return(cudaSuccess);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return Return(cudaSuccess);
}

cudaError_t cudaSetDevice(int device) { return Return(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaSetDeviceFlags(unsigned) { return Return(cudaSuccess); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  if (device != 0) return Return(cudaErrorInvalidDevice);
  strcpy(properties->name, "SIMT executor");
  strcpy(properties->uuid.bytes, "simt executor");
  properties->totalGlobalMem = DeviceBytes();
  properties->sharedMemPerBlock = simt::kDefaultShared;
  properties->sharedMemPerBlockOptin = simt::kMostShared;
  properties->major = 9;
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = 32;
  return Return(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return Return(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(simt::kMostShared);
      break;
    default:
      return Return(cudaErrorInvalidValue);
  }
  return Return(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize() {
  const std::lock_guard lock(streams_mutex);
  for (CUstream_st* stream : streams) stream->Drain();
  return Return(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(state_mutex);
  *total = DeviceBytes();
  *free = *total - std::min(device_used, *total);
  return Return(cudaSuccess);
}

cudaError_t cudaMalloc(void** memory, size_t bytes) { return Allocate(memory, bytes, 256, Memory::kDevice); }
cudaError_t cudaFree(void* memory) { return Release(memory, Memory::kDevice); }
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  return Allocate(memory, bytes, kPage, Memory::kPinned);
}
cudaError_t cudaFreeHost(void* memory) { return Release(memory, Memory::kPinned); }

cudaError_t cudaHostGetDevicePointer(void** on_device, void* memory, unsigned) {
  bool pageable = false;
  Fits(memory, 0, &pageable);
  *on_device = pageable ? nullptr : memory;
  return Return(pageable ? cudaErrorInvalidValue : cudaSuccess);
}

cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  if (memory == nullptr || bytes == 0) return Return(cudaErrorInvalidValue);
  const std::lock_guard lock(state_mutex);
  const auto first = reinterpret_cast<uintptr_t>(memory);
  const auto next = regions.lower_bound(first);
  if (Find(memory) != nullptr || (next != regions.end() && next->first < first + bytes)) {
    return Return(cudaErrorHostMemoryAlreadyRegistered);
  }
  regions[first] = {bytes, Memory::kRegistered};
  return Return(cudaSuccess);
}

cudaError_t cudaHostUnregister(void* memory) {
  return Return(Forget(memory, Memory::kRegistered) != 0 ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return Return(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return Return(cudaErrorNotSupported); }
cudaError_t cudaIpcCloseMemHandle(void*) { return Return(cudaErrorNotSupported); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  cudaDeviceSynchronize();
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  if (width == 0 || height == 0) return Return(cudaSuccess);
  bool pageable = false;
  if (to == nullptr || from == nullptr || to_pitch < width || from_pitch < width || !Known(stream) ||
      !Fits(to, to_pitch * (height - 1) + width, &pageable) ||
      !Fits(from, from_pitch * (height - 1) + width, &pageable)) {
    return Return(cudaErrorInvalidValue);
  }
  return Submit(
      stream,
      [=] {
        for (size_t row = 0; row < height; ++row) {
          memcpy(static_cast<char*>(to) + to_pitch * row, static_cast<const char*>(from) + from_pitch * row, width);
        }
      },
      pageable);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return Return(cudaSuccess);
  bool pageable = false;
  if (!Known(stream) || !Fits(memory, bytes, &pageable) || pageable) return Return(cudaErrorInvalidValue);
  return Submit(stream, [=] { memset(memory, value, bytes); });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  if (broken != cudaSuccess) return Return(broken);
  *stream = new CUstream_st;
  const std::lock_guard lock(streams_mutex);
  streams.insert(*stream);
  return Return(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::lock_guard lock(streams_mutex);
    if (streams.erase(stream) == 0) return Return(cudaErrorInvalidResourceHandle);
  }
  delete stream;
  return Return(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (!Known(stream)) return Return(cudaErrorInvalidResourceHandle);
  if (Captures(stream)) return Return(cudaErrorStreamCaptureUnsupported);
  if (stream != nullptr) stream->Drain();
  return Return(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!Known(stream)) return Return(cudaErrorInvalidResourceHandle);
  if (stream == nullptr) return Return(cudaSuccess);
  const std::lock_guard lock(stream->mutex);
  return Return(stream->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!Known(stream)) return Return(cudaErrorInvalidResourceHandle);
  if (Captures(stream)) return Return(cudaErrorStreamCaptureUnsupported);
  if (event->mark == nullptr) return Return(cudaSuccess);
  return Submit(stream, [mark = event->mark] { mark->Wait(); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st{(flags & cudaEventDisableTiming) == 0, nullptr};
  return Return(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return Return(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!Known(stream)) return Return(cudaErrorInvalidResourceHandle);
  if (Captures(stream)) return Return(cudaErrorStreamCaptureUnsupported);
  if (broken != cudaSuccess) return Return(broken);
  const auto mark = std::make_shared<Mark>();
  event->mark = mark;
  if (stream == nullptr) {
    mark->Reach();
  } else {
    stream->Push([mark] { mark->Reach(); });  // in a broken context too: who waits must wake
  }
  return Return(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->mark != nullptr) event->mark->Wait();
  return Return(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return Return(event->mark == nullptr || event->mark->IsReached() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  if (!begin->timing || !end->timing || begin->mark == nullptr || end->mark == nullptr) {
    return Return(cudaErrorInvalidResourceHandle);
  }
  if (!begin->mark->IsReached() || !end->mark->IsReached()) return Return(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->mark->at - begin->mark->at).count();
  return Return(cudaSuccess);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (stream == nullptr || Captures(stream)) return Return(cudaErrorStreamCaptureUnsupported);
  if (!Known(stream)) return Return(cudaErrorInvalidResourceHandle);
  stream->captured = std::make_unique<std::vector<Work>>();
  return Return(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (!Captures(stream)) return Return(cudaErrorIllegalState);
  if (broken == cudaSuccess) *graph = new CUgraph_st{std::move(*stream->captured)};
  stream->captured = nullptr;
  return Return(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{std::make_shared<const std::vector<Work>>(graph->nodes)};
  return Return(cudaSuccess);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (!Known(stream)) return Return(cudaErrorInvalidResourceHandle);
  return Submit(stream, [nodes = exec->nodes] {
    for (const Work& node : *nodes) {
      if (broken == cudaSuccess) node();
    }
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return Return(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return Return(cudaSuccess);
}

namespace simt {

cudaError_t SetFunctionAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return Return(cudaSuccess);
  if (value < 0 || static_cast<size_t>(value) > kMostShared) return Return(cudaErrorInvalidValue);
  const std::lock_guard lock(state_mutex);
  shared_limits[function] = static_cast<size_t>(value);
  return Return(cudaSuccess);
}

cudaError_t Launch(const cudaLaunchConfig_t& config, const void* function, std::function<void()> body) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  const auto volume = [](const dim3& d) { return static_cast<uint64_t>(d.x) * d.y * d.z; };
  const bool sound = volume(grid) != 0 && volume(block) != 0 && grid.x < 1u << 31 && grid.y <= 65535 &&
                     grid.z <= 65535 && block.x <= 1024 && block.y <= 1024 && block.z <= 64 && volume(block) <= 1024;
  if (!sound) return Return(cudaErrorInvalidConfiguration);
  size_t limit = kDefaultShared;
  {
    const std::lock_guard lock(state_mutex);
    const auto found = shared_limits.find(function);
    if (found != shared_limits.end() && found->second > limit) limit = found->second;
  }
  // Without the attribute the kernel's static memory counts too; with it, it may come on top, up to the device's bound.
  const size_t together = limit > kDefaultShared ? kMostShared : kDefaultShared;
  const size_t dynamic_bytes = config.dynamicSmemBytes;
  if (dynamic_bytes > limit) return Return(cudaErrorInvalidValue);
  if (!Known(config.stream)) return Return(cudaErrorInvalidResourceHandle);
  return Submit(config.stream, [=, body = std::move(body)] {
    CountKernel();
    if (broken == cudaSuccess) RunGrid(grid, block, dynamic_bytes, together, body);
  });
}

void MendContext() {
  cudaDeviceSynchronize();
  broken = cudaSuccess;
  last_error = cudaSuccess;
  kernels_run = 0;
}

}  // namespace simt
