// What a model and its steps take of a device's memory, to the byte, before any of it is taken.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/module.h"
#include "server/model/engram_model.h"

namespace engram {

// Steps under way at a time: while one computes, the next goes up and the last comes down.
inline constexpr int kCudaSlots = 2;
// Layers of one step under way at a time, for the same reason; a model of one layer has one.
inline constexpr int kMostCudaLanes = 2;
// Blocks of 256 bytes: what a device's allocator aligns to, and copies are fastest at.
inline constexpr int64_t kCudaAlignment = 256;
// Of the model on its way to the device: two of them, so that one is read while the other is copied. 16 MiB are 0.3 ms
// of PCIe 5 x16 and a few ms of a disk: latency of neither shows.
inline constexpr int64_t kUploadBytes = int64_t{16} << 20;
// Left free for what the driver, cuBLAS and graphs take by themselves.
inline constexpr int64_t kCudaMarginBytes = int64_t{512} << 20;

constexpr int64_t CudaAligned(int64_t bytes) { return (bytes + kCudaAlignment - 1) / kCudaAlignment * kCudaAlignment; }

struct CudaPlanOptions {
  int64_t max_batch_tokens = 1024;
  int64_t prepare_memory_bytes = 0;
  bool tables_on_device = true;
};

// Byte sizes of one lane: the buffers of one layer of a step, in both memories.
struct CudaLaneSizes {
  int64_t most_rows = 0;  // tokens that x and kv have room for, with cuBLASLt's padding
  int64_t manifest = 0;   // row ids and gate descriptors; pinned too
  int64_t io = 0;         // highways, which are updated in place, and rows on their way out
  int64_t x = 0;
  int64_t kv = 0;
  int64_t gates = 0;
  int64_t bounce = 0;  // pinned: for host memory that the device does not reach
};

struct CudaMemoryPlan {
  struct Item {
    std::string name;  // "tables", as the label of engram_gpu_memory_bytes has it
    int64_t bytes = 0;
    bool on_device = true;  // else pinned host memory
  };
  std::vector<Item> items;
  CudaLaneSizes lane;
  int lanes = 0;  // of a slot

  int64_t DeviceBytes() const;
};

// OutOfRange where a size leaves 63 bits.
absl::StatusOr<CudaMemoryPlan> PlanCudaMemory(const EngramModel& model, const CudaPlanOptions& options,
                                              const kernels::cuda::Module& module);

// RESOURCE_EXHAUSTED says what is needed, what is free and which flags would help.
absl::Status CheckCudaMemory(const CudaMemoryPlan& plan, const CudaPlanOptions& options, int64_t free_bytes);

}  // namespace engram
