#include "kernels/cuda/module.h"

#include <cuda_runtime.h>

#include <cstring>

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/kernels.h"

namespace engram::kernels::cuda {
namespace {

static_assert(kIpcHandleBytes == CUDA_IPC_HANDLE_SIZE && sizeof(cudaIpcMemHandle_t) == kIpcHandleBytes);

// The runtime also keeps an error for whoever asks later. Told is told: taken out here, so that the next call of the
// thread does not report it again. Errors that break the context stay, whatever is taken out.
int Told(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return static_cast<int>(error);
}

constexpr int Invalid() { return static_cast<int>(cudaErrorInvalidValue); }

const char* ErrorText(int error) {
  const char* text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return text != nullptr ? text : "an error that the CUDA runtime does not know";
}

// As the runtime's manual says of them: "leaves the process in an inconsistent state and any further CUDA work will
// return the same error", or the device or its context is gone.
bool Sticky(int error) {
  switch (static_cast<cudaError_t>(error)) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
    case cudaErrorDevicesUnavailable:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
    case cudaErrorMpsRpcFailure:
#if CUDART_VERSION >= 12080
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
#endif
      return true;
    default:
      return false;
  }
}

int Versions(int* driver, int* runtime) {
  if (const cudaError_t error = cudaDriverGetVersion(driver); error != cudaSuccess) return Told(error);
  return Told(cudaRuntimeGetVersion(runtime));
}

int DeviceCount(int* count) { return Told(cudaGetDeviceCount(count)); }

// Waits sleep: a step's thread must not keep a core busy that handlers need.
int UseDevice(int device) {
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return Told(error);
  return Told(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
}

int Describe(int device, DeviceInfo* info) {
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess) return Told(error);
  *info = {};
  static_assert(sizeof(properties.name) == sizeof(info->name));
  std::memcpy(info->name, properties.name, sizeof(info->name));
  info->name[sizeof(info->name) - 1] = 0;
  info->compute_major = properties.major;
  info->compute_minor = properties.minor;
  info->multiprocessors = properties.multiProcessorCount;
  static_assert(sizeof(properties.uuid.bytes) == sizeof(info->uuid));
  std::memcpy(info->uuid, properties.uuid.bytes, sizeof(info->uuid));
  // Only the thread's own device says what is free.
  int chosen = 0;
  if (const cudaError_t error = cudaGetDevice(&chosen); error != cudaSuccess) return Told(error);
  if (const int error = UseDevice(device); error != 0) return error;
  size_t free_bytes = 0, total_bytes = 0;
  const cudaError_t asked = cudaMemGetInfo(&free_bytes, &total_bytes);
  info->free_bytes = static_cast<int64_t>(free_bytes);
  info->total_bytes = static_cast<int64_t>(total_bytes);
  const cudaError_t restored = chosen == device ? cudaSuccess : cudaSetDevice(chosen);
  return Told(asked != cudaSuccess ? asked : restored);
}

int CheckDevice() {
  // What a kernel broke shows in any call; a lost device only in one that the driver has to pass on.
  for (const cudaError_t error : {cudaStreamQuery(cudaStreamPerThread), [] {
                                    size_t free_bytes = 0, total_bytes = 0;
                                    return cudaMemGetInfo(&free_bytes, &total_bytes);
                                  }()}) {
    const int told = Told(error);
    if (Sticky(told)) return told;
  }
  return 0;
}

int Allocate(int64_t bytes, void** memory) {
  return bytes < 0 ? Invalid() : Told(cudaMalloc(memory, static_cast<size_t>(bytes)));
}

int Free(void* memory) { return Told(cudaFree(memory)); }

// Does the device reach it under the host's own address? Then one pointer serves both, as GatherCall and others want.
cudaError_t AtOneAddress(void* memory) {
  void* on_device = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&on_device, memory, 0);
  if (error != cudaSuccess) return error;
  return on_device == memory ? cudaSuccess : cudaErrorNotSupported;
}

int AllocatePinned(int64_t bytes, void** memory) {
  if (bytes < 0) return Invalid();
  void* made = nullptr;
  cudaError_t error = cudaHostAlloc(&made, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped);
  if (error == cudaSuccess && made != nullptr) error = AtOneAddress(made);
  if (error != cudaSuccess) {
    if (made != nullptr) cudaFreeHost(made);
    return Told(error);
  }
  *memory = made;
  return 0;
}

int FreePinned(void* memory) { return Told(cudaFreeHost(memory)); }

int Pin(void* memory, int64_t bytes) {
  if (bytes < 0) return Invalid();
  cudaError_t error =
      cudaHostRegister(memory, static_cast<size_t>(bytes), cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error != cudaSuccess) return Told(error);
  error = AtOneAddress(memory);
  if (error != cudaSuccess) cudaHostUnregister(memory);
  return Told(error);
}

int Unpin(void* memory) { return Told(cudaHostUnregister(memory)); }

int ExportMemory(void* memory, uint8_t handle[kIpcHandleBytes]) {
  cudaIpcMemHandle_t made;
  const cudaError_t error = cudaIpcGetMemHandle(&made, memory);
  if (error == cudaSuccess) std::memcpy(handle, &made, sizeof(made));
  return Told(error);
}

int OpenMemory(const uint8_t handle[kIpcHandleBytes], void** memory) {
  cudaIpcMemHandle_t given;
  std::memcpy(&given, handle, sizeof(given));
  return Told(cudaIpcOpenMemHandle(memory, given, cudaIpcMemLazyEnablePeerAccess));
}

int CloseMemory(void* memory) { return Told(cudaIpcCloseMemHandle(memory)); }

// Not tied to the default stream, which orders itself against all others.
int CreateStream(CUstream_st** stream) { return Told(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking)); }
int DestroyStream(CUstream_st* stream) { return stream == nullptr ? 0 : Told(cudaStreamDestroy(stream)); }
int WaitStream(CUstream_st* stream) { return Told(cudaStreamSynchronize(stream)); }

int CreateEvent(CUevent_st** event, bool timing) {
  const unsigned flags = cudaEventBlockingSync | (timing ? 0U : static_cast<unsigned>(cudaEventDisableTiming));
  return Told(cudaEventCreateWithFlags(event, flags));
}

int DestroyEvent(CUevent_st* event) { return event == nullptr ? 0 : Told(cudaEventDestroy(event)); }
int RecordEvent(CUevent_st* event, CUstream_st* stream) { return Told(cudaEventRecord(event, stream)); }
int StreamWaits(CUstream_st* stream, CUevent_st* event) { return Told(cudaStreamWaitEvent(stream, event, 0)); }
int WaitEvent(CUevent_st* event) { return Told(cudaEventSynchronize(event)); }

int EventSeconds(CUevent_st* begin, CUevent_st* end, float* seconds) {
  float milliseconds = 0;
  const cudaError_t error = cudaEventElapsedTime(&milliseconds, begin, end);
  *seconds = milliseconds / 1000;
  return Told(error);
}

int Copy(void* to, const void* from, int64_t bytes, CUstream_st* stream) {
  if (bytes <= 0) return bytes == 0 ? 0 : Invalid();
  return Told(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream));
}

int Copy2d(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t row_bytes, int64_t rows,
           CUstream_st* stream) {
  if (row_bytes < 0 || rows < 0 || to_pitch < row_bytes || from_pitch < row_bytes) return Invalid();
  if (row_bytes == 0 || rows == 0) return 0;
  return Told(cudaMemcpy2DAsync(to, static_cast<size_t>(to_pitch), from, static_cast<size_t>(from_pitch),
                                static_cast<size_t>(row_bytes), static_cast<size_t>(rows), cudaMemcpyDefault, stream));
}

int Fill(void* memory, int value, int64_t bytes, CUstream_st* stream) {
  if (bytes <= 0) return bytes == 0 ? 0 : Invalid();
  return Told(cudaMemsetAsync(memory, value, static_cast<size_t>(bytes), stream));
}

// Other threads go on allocating and waiting while this one captures.
int BeginGraph(CUstream_st* stream) { return Told(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)); }

int EndGraph(CUstream_st* stream, CUgraphExec_st** graph) {
  cudaGraph_t captured = nullptr;
  cudaError_t error = cudaStreamEndCapture(stream, &captured);
  if (error == cudaSuccess) error = cudaGraphInstantiateWithFlags(graph, captured, 0);
  if (captured != nullptr) cudaGraphDestroy(captured);
  return Told(error);
}

int LaunchGraph(CUgraphExec_st* graph, CUstream_st* stream) { return Told(cudaGraphLaunch(graph, stream)); }
int DestroyGraph(CUgraphExec_st* graph) { return graph == nullptr ? 0 : Told(cudaGraphExecDestroy(graph)); }

// The functions of kernels.h and gemm.h with the int that a table of plain functions wants.
template <auto function>
struct AsInt;
template <typename... Args, cudaError_t (*function)(Args...)>
struct AsInt<function> {
  static int Call(Args... args) { return Told(function(args...)); }
};

int DescribeTo(const Gemm* gemm, GemmInfo* info) { return Told(DescribeGemm(*gemm, *info)); }

int RunGemmOf(const Gemm* gemm, GemmClass shape, const Bf16* x, int64_t tokens, Bf16* kv, void* workspace,
              CUstream_st* stream) {
  return Told(RunGemm(*gemm, shape, x, tokens, kv, workspace, stream));
}

constexpr Module kModule = {
    .version = kModuleVersion,
    .error_text = ErrorText,
    .sticky = Sticky,
    .versions = Versions,
    .device_count = DeviceCount,
    .device_info = Describe,
    .use_device = UseDevice,
    .check_device = CheckDevice,
    .allocate = Allocate,
    .free = Free,
    .allocate_pinned = AllocatePinned,
    .free_pinned = FreePinned,
    .pin = Pin,
    .unpin = Unpin,
    .export_memory = ExportMemory,
    .open_memory = OpenMemory,
    .close_memory = CloseMemory,
    .create_stream = CreateStream,
    .destroy_stream = DestroyStream,
    .wait_stream = WaitStream,
    .create_event = CreateEvent,
    .destroy_event = DestroyEvent,
    .record_event = RecordEvent,
    .stream_waits = StreamWaits,
    .wait_event = WaitEvent,
    .event_seconds = EventSeconds,
    .copy = Copy,
    .copy_2d = Copy2d,
    .fill = Fill,
    .begin_graph = BeginGraph,
    .end_graph = EndGraph,
    .launch_graph = LaunchGraph,
    .destroy_graph = DestroyGraph,
    .gather_rows = AsInt<GatherRows>::Call,
    .copy_rows = AsInt<CopyRows>::Call,
    .tile_q2k = AsInt<TileQ2K>::Call,
    .tile_bf16 = AsInt<TileBf16>::Call,
    .project = AsInt<Project>::Call,
    .apply_gate = AsInt<ApplyGate>::Call,
    .create_gemm = AsInt<CreateGemm>::Call,
    .destroy_gemm = AsInt<DestroyGemm>::Call,
    .gemm_info = DescribeTo,
    .gemm_workspace_bytes = GemmWorkspaceBytes,
    .padded_tokens = PaddedTokens,
    .run_gemm = RunGemmOf,
};

}  // namespace
}  // namespace engram::kernels::cuda

// kModuleSymbol: the one name that the module exports.
extern "C" __attribute__((visibility("default"))) const engram::kernels::cuda::Module* engram_cuda_module() {
  return &engram::kernels::cuda::kModule;
}
