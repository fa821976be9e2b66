// What libengram_cuda.so offers to whoever opened it: a device's memory, streams and graphs, and our kernels, as plain
// functions. The server is not linked to it, so it starts where there is no driver and no cuBLAS
// (server/engine/cuda_module.h opens it).
//
// Every function returns a cudaError_t as an int, 0 = done, and works on the device that the calling thread chose with
// use_device(). Thread-safe as the CUDA runtime is: a stream belongs to one thread at a time. Nothing here logs or ends
// the process.
#pragma once

#include <cstdint>

#include "kernels/cuda/calls.h"

// The CUDA runtime's own handles: cudaStream_t, cudaEvent_t, cudaGraphExec_t.
struct CUstream_st;
struct CUevent_st;
struct CUgraphExec_st;

namespace engram::kernels::cuda {

struct Gemm;  // cuBLASLt, and what it chose for one shape of weights

// Of this header: a server opens modules of its own version alone.
inline constexpr int32_t kModuleVersion = 1;
inline constexpr char kModuleSymbol[] = "engram_cuda_module";
inline constexpr int kIpcHandleBytes = 64;

struct DeviceInfo {
  char name[256] = {};
  int compute_major = 0, compute_minor = 0;  // 9, 0: sm_90
  int multiprocessors = 0;
  int64_t total_bytes = 0, free_bytes = 0;  // of its memory, at this moment
  uint8_t uuid[16] = {};
};

// Calls of more than kProjectTokens tokens go through cuBLASLt, by the length of the call they belong to.
enum class GemmClass : int32_t {
  kMedium,  // tuned at 256 tokens
  kLong,    // tuned at 2048 tokens
};

// Where cuBLASLt's bits come from, for numerics_id.
struct GemmInfo {
  char library[64] = {};         // "cublasLt-13.0.2"
  char algorithms[2][128] = {};  // by GemmClass: the configuration's numbers
};

struct Module {
  int32_t version = kModuleVersion;

  const char* (*error_text)(int error);  // "an illegal memory access was encountered"; never null
  // Is the process's context beyond repair, so that every later call fails too?
  bool (*sticky)(int error);
  int (*versions)(int* driver, int* runtime);  // 13000 = 13.0; driver 0 = there is none
  int (*device_count)(int* count);
  int (*device_info)(int device, DeviceInfo* info);
  int (*use_device)(int device);
  // The last sticky error, or 0: asks the device, for health checks.
  int (*check_device)();

  // Memory. allocate_pinned gives host memory that the device reaches at the same address. free_* take null.
  int (*allocate)(int64_t bytes, void** memory);
  int (*free)(void* memory);
  int (*allocate_pinned)(int64_t bytes, void** memory);
  int (*free_pinned)(void* memory);
  int (*pin)(void* memory, int64_t bytes);  // whole pages of ordinary host memory
  int (*unpin)(void* memory);

  // Memory of this process for another process on the device, and the other way round.
  int (*export_memory)(void* memory, uint8_t handle[kIpcHandleBytes]);
  int (*open_memory)(const uint8_t handle[kIpcHandleBytes], void** memory);
  int (*close_memory)(void* memory);

  // Streams and events. Work of one stream runs in order.
  int (*create_stream)(CUstream_st** stream);
  int (*destroy_stream)(CUstream_st* stream);
  int (*wait_stream)(CUstream_st* stream);  // blocks the thread, sleeping
  int (*create_event)(CUevent_st** event, bool timing);
  int (*destroy_event)(CUevent_st* event);
  int (*record_event)(CUevent_st* event, CUstream_st* stream);
  int (*stream_waits)(CUstream_st* stream, CUevent_st* event);  // for what was recorded last
  int (*wait_event)(CUevent_st* event);                         // blocks the thread, sleeping
  int (*event_seconds)(CUevent_st* begin, CUevent_st* end, float* seconds);

  // In the stream's order. Host memory that is not pinned makes a copy block until it is staged.
  int (*copy)(void* to, const void* from, int64_t bytes, CUstream_st* stream);
  int (*copy_2d)(void* to, int64_t to_pitch, const void* from, int64_t from_pitch, int64_t row_bytes, int64_t rows,
                 CUstream_st* stream);
  int (*fill)(void* memory, int value, int64_t bytes, CUstream_st* stream);

  // What this thread launches into `stream` between the two becomes a graph, and does not run until launch_graph.
  int (*begin_graph)(CUstream_st* stream);
  int (*end_graph)(CUstream_st* stream, CUgraphExec_st** graph);
  int (*launch_graph)(CUgraphExec_st* graph, CUstream_st* stream);
  int (*destroy_graph)(CUgraphExec_st* graph);

  // The kernels, as in kernels/cuda/kernels.h.
  int (*gather_rows)(const GatherCall& call, Bf16* out, CUstream_st* stream);
  int (*copy_rows)(const GatherCall& call, uint8_t* out, CUstream_st* stream);
  int (*tile_q2k)(const uint8_t* blocks, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
                  CUstream_st* stream);
  int (*tile_bf16)(const Bf16* wkv, int64_t first, int64_t count, const TiledWeights& weights, uint8_t* tiles,
                   CUstream_st* stream);
  int (*project)(const TiledWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, int multiprocessors,
                 CUstream_st* stream);
  int (*apply_gate)(const GateWeights& weights, const GateTokens& call, CUstream_st* stream);

  // cuBLASLt for kv = wkv * x with wkv [outputs, inputs] bf16, row-major: bf16 products, f32 sums, no split of k. The
  // algorithm of each class is chosen once here, by trying it on the device, and never depends on tokens. Workspace
  // is the caller's: gemm_workspace_bytes() of it, one per stream. x and kv have room for padded_tokens(tokens).
  int (*create_gemm)(const Bf16* wkv, int64_t outputs, int64_t inputs, int64_t most_tokens, Gemm** gemm);
  int (*destroy_gemm)(Gemm* gemm);
  int (*gemm_info)(const Gemm* gemm, GemmInfo* info);
  int64_t (*gemm_workspace_bytes)();
  int64_t (*padded_tokens)(int64_t tokens);
  int (*run_gemm)(const Gemm* gemm, GemmClass shape, const Bf16* x, int64_t tokens, Bf16* kv, void* workspace,
                  CUstream_st* stream);
};

using ModuleFn = const Module*();

}  // namespace engram::kernels::cuda
