// The step on a CUDA device (docs/gpu.md).
//
// Start() hashes, launches a step's first layers and returns. A thread of the backend's own waits for layers to be
// written, tells whom it concerns, and launches those that did not fit at first. Steps under way have buffers and
// streams of their own, so one's copies overlap with the other's kernels.
//
// A failed call fails its step. Where the device then says that the process's context is beyond repair, the backend is
// broken: every later step fails at once, health() says why, and only a new process helps.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "kernels/kernels.h"
#include "server/engine/backend.h"
#include "server/engine/cuda_lane.h"
#include "server/engine/cuda_memory_plan.h"
#include "server/engine/cuda_model.h"
#include "server/engine/cuda_module.h"
#include "server/engine/device_arena.h"
#include "server/engine/pinned_source.h"
#include "server/model/engram_model.h"

namespace engram {

struct CudaBackendOptions {
  int threads = 1;                  // that hash and read the model
  int64_t max_batch_tokens = 1024;  // no step has more
  int64_t prepare_memory_bytes = int64_t{1} << 30;
  bool tables_on_device = true;  // else where the model has them, which is then resident in memory
  // Called on any thread, perhaps one that starts a step; must not block. A step failed:
  std::function<void(const absl::Status&)> failed = [](const absl::Status&) {};
  // The backend is broken: once, after `failed`.
  std::function<void(const absl::Status&)> broken = [](const absl::Status&) {};
};

class CudaBackend final : public Backend {
 public:
  // Takes all the memory it will ever use of the device, but for pinned staging memory, and brings the model up. `plan`
  // is of this model, device and options. RESOURCE_EXHAUSTED, or INTERNAL with the call that failed.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Create(std::shared_ptr<const CudaDevice> device,
                                                             std::shared_ptr<const EngramModel> model,
                                                             const CudaMemoryPlan& plan, CudaBackendOptions options);
  ~CudaBackend() override;

  int most_steps() const override { return kCudaSlots; }
  void Start(const Step& step, LayerDone layer_done, StepDone done) override;
  StagingMemory TakePreparedKv(int64_t bytes) override { return prepared_->Take(bytes); }
  StagingSource staging_source() const override { return pinned_->source(); }
  absl::Status health() const override;
  std::string name() const override { return "cuda"; }
  std::string numerics_id() const override { return numerics_id_; }

 private:
  // A step under way, and what it works in. Of the thread that starts it, then of the thread that completes it.
  struct Slot {
    CudaStreams streams;
    std::vector<std::unique_ptr<CudaLane>> lanes;
    std::vector<int64_t> ids;  // [tokens][layers][columns]
    const Step* step = nullptr;
    LayerDone layer_done;
    StepDone done;
    StepTimes times;
    size_t launched = 0;  // layers
    absl::Status status;  // of launching
  };

  CudaBackend(std::shared_ptr<const CudaDevice> device, std::shared_ptr<const EngramModel> model,
              CudaBackendOptions options);

  absl::Status MakeSlots(const CudaMemoryPlan& plan);
  absl::Status CheckSize(const Step& step) const;
  void Hash(Slot& slot);
  // Layers up to `end`.
  absl::Status Launch(Slot& slot, size_t end);
  void CompleteSteps();
  absl::Status CompleteLayers(Slot& slot);
  void Drain(const Slot& slot) const;
  void Note(const absl::Status& status);

  const std::shared_ptr<const CudaDevice> device_;
  const std::shared_ptr<const EngramModel> model_;
  const CudaBackendOptions options_;
  const StepShape shape_;
  kernels::Workers workers_;
  std::shared_ptr<PinnedSource> pinned_;
  std::shared_ptr<DeviceArena> prepared_;
  std::unique_ptr<CudaModel> uploaded_;
  std::string numerics_id_;
  std::array<Slot, kCudaSlots> slots_;
  size_t next_slot_ = 0;  // of the thread that starts

  mutable std::mutex mutex_;  // as in SessionTable
  std::condition_variable wake_;
  std::deque<Slot*> under_way_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status health_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace engram
