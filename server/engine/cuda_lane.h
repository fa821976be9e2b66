// One layer of a step on a device, in buffers of its own: what goes up, is computed and comes down.
//
// Row ids and gate descriptors of all tokens are the lane's manifest, one copy. Tokens without a ready kv stand packed
// by the length of their call (docs/gpu.md), so each path is one launch; the gate is one launch per type of highway.
// Host memory that the device does not reach goes through a pinned buffer: copied up here by Submit(), down by
// Finish().
//
// A lane has one layer at a time: Submit(), then Finish(), on any thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/backend.h"
#include "server/engine/cuda_graphs.h"
#include "server/engine/cuda_memory_plan.h"
#include "server/engine/cuda_model.h"
#include "server/engine/cuda_resources.h"
#include "server/engine/pinned_source.h"
#include "server/engine/step.h"

namespace engram {

// Of one slot: copies and kernels of a step overlap with those of the next.
struct CudaStreams {
  CudaStream upload, compute, download;
  CudaMemory gemm_workspace;
};

class CudaLane {
 public:
  // All of these outlive the lane.
  struct Surroundings {
    std::shared_ptr<const CudaDevice> device;
    const CudaModel* model = nullptr;
    const PinnedSource* pinned = nullptr;
    CudaStreams* streams = nullptr;
    StepShape shape;
  };

  static absl::StatusOr<std::unique_ptr<CudaLane>> Make(Surroundings around, const CudaLaneSizes& sizes);

  // Launches everything and waits for nothing. `hashed_ids`: of the step, [tokens][layers][columns], host memory that
  // is good until this returns. After an error some of it may be under way: wait for the streams.
  absl::Status Submit(const StepLayer& work, const int64_t* hashed_ids);

  // Waits until all outputs are written, and adds to `times`.
  absl::Status Finish(StepTimes& times);

 private:
  // The ways to kv: the projection kernel, then cuBLASLt's two classes.
  static constexpr int kPaths = 3;
  enum Event {
    kUpBegin,
    kUpEnd,
    kBegin,
    kGathered,
    kProjected,
    kComputed,
    kAllComputed,
    kDownBegin,
    kDownEnd,
    kEvents
  };

  // Where a slice's things stand in the lane.
  struct Place {
    int64_t packed = -1;  // its first token among x and kv; -1: not computed here
    int64_t io = 0;       // bytes from io_'s begin: its highway, or its rows
    int64_t bounce = 0;   // bytes from bounce_'s begin: of its highway, or of what comes out
    int64_t gates = 0;    // its first token among gates_
    int64_t row_ids = 0;  // its first id among the manifest's, of a rows form
  };
  struct BounceDown {
    void* to = nullptr;
    const uint8_t* from = nullptr;
    int64_t bytes = 0;
  };

  explicit CudaLane(Surroundings around) : around_(std::move(around)), graphs_(around_.device) {}

  const kernels::cuda::Module& module() const { return around_.device->module(); }
  absl::Status Check(int error, const char* call) const { return around_.device->ToStatus(error, call); }
  absl::Status Record(Event event, const CudaStream& stream) const;

  static int PathOf(const StepSlice& slice);
  int64_t ColumnsOf(const StepSlice& slice) const;
  const uint8_t* KvOf(const StepSlice& slice, const Place& place) const;  // device memory

  void LayOut(const StepLayer& work);
  void WriteManifest(const StepLayer& work, const int64_t* hashed_ids);
  void WriteIds(const StepSlice& slice, int layer, int64_t column, int64_t columns, const int64_t* hashed_ids,
                int64_t* to) const;
  void WriteGateTokens(const StepSlice& slice, const Place& place, kernels::cuda::GateToken* to) const;

  absl::Status Up(const StepLayer& work);
  absl::Status Compute(const StepLayer& work);
  absl::Status Sequence(bool timed);
  absl::Status Project();
  absl::Status WriteRows(const StepLayer& work);
  absl::Status KeepPrepared(const StepLayer& work);
  absl::Status Down(const StepLayer& work);
  // Into host memory, `rows` of `row_bytes` that stand `pitch` apart on the device, `bounce` bytes into bounce_ where
  // the device does not reach it.
  absl::Status CopyDown(void* to, const uint8_t* from, int64_t pitch, int64_t row_bytes, int64_t rows, int64_t bounce);

  const Surroundings around_;
  CudaMemory manifest_up_, manifest_, io_, x_, kv_, gates_, bounce_;
  std::array<CudaEvent, kEvents> events_;
  CudaGraphs graphs_;

  // Of the layer at hand.
  int layer_ = 0;
  std::vector<Place> places_;                // of each slice
  std::array<int64_t, kPaths> path_tokens_;  // computed on each path
  int64_t gate_f32_ = 0, gate_bf16_ = 0;     // tokens
  int64_t row_ids_begin_ = 0;                // of rows forms among the manifest's ids: their number before
  int64_t gate_begin_ = 0;                   // bytes from the manifest's begin to its descriptors, f32 first
  int64_t manifest_bytes_ = 0;
  int64_t rows_gathered_ = 0;
  bool timed_ = false;
  std::vector<BounceDown> bounces_;
};

}  // namespace engram
