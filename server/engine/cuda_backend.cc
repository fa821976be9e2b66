#include "server/engine/cuda_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/cpu_backend.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

// The orders of sums in kernels/cuda: it changes whenever a kernel's bits do (docs/numerics.md).
constexpr char kAlgorithms[] = "p1-g1";

}  // namespace

absl::StatusOr<std::unique_ptr<CudaBackend>> CudaBackend::Create(std::shared_ptr<const CudaDevice> device,
                                                                 std::shared_ptr<const EngramModel> model,
                                                                 const CudaMemoryPlan& plan,
                                                                 CudaBackendOptions options) {
  RETURN_IF_ERROR(device->Use());
  std::unique_ptr<CudaBackend> backend(new CudaBackend(device, model, std::move(options)));
  const CudaBackendOptions& o = backend->options_;
  ASSIGN_OR_RETURN(CudaMemory prepared,
                   CudaMemory::OnDevice(device, CudaAligned(o.prepare_memory_bytes), "prepared results"));
  backend->prepared_ = std::make_shared<DeviceArena>(std::move(prepared));
  ASSIGN_OR_RETURN(backend->uploaded_,
                   CudaModel::Upload(device, model, o.tables_on_device, plan.lane.most_rows, o.threads));
  RETURN_IF_ERROR(backend->MakeSlots(plan));
  ASSIGN_OR_RETURN(const std::string gemm, backend->uploaded_->GemmNames());
  backend->numerics_id_ = absl::StrCat("cuda/", kAlgorithms, "/", device->architecture(), "/", gemm);
  backend->thread_ = std::thread([raw = backend.get()] { raw->CompleteSteps(); });
  return backend;
}

CudaBackend::CudaBackend(std::shared_ptr<const CudaDevice> device, std::shared_ptr<const EngramModel> model,
                         CudaBackendOptions options)
    : device_(std::move(device)),
      model_(std::move(model)),
      options_(std::move(options)),
      shape_(ShapeOf(*model_)),
      workers_(options_.threads),
      pinned_(std::make_shared<PinnedSource>(device_)) {}

CudaBackend::~CudaBackend() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
  // The members' memory, streams and events are given back by whichever thread this is.
  static_cast<void>(device_->Use());
}

absl::Status CudaBackend::MakeSlots(const CudaMemoryPlan& plan) {
  for (Slot& slot : slots_) {
    for (CudaStream* stream : {&slot.streams.upload, &slot.streams.compute, &slot.streams.download}) {
      ASSIGN_OR_RETURN(*stream, MakeCudaStream(device_));
    }
    ASSIGN_OR_RETURN(slot.streams.gemm_workspace,
                     CudaMemory::OnDevice(device_, device_->module().gemm_workspace_bytes(), "cuBLASLt's workspace"));
    for (int i = 0; i < plan.lanes; ++i) {
      ASSIGN_OR_RETURN(std::unique_ptr<CudaLane> lane, CudaLane::Make({.device = device_,
                                                                       .model = uploaded_.get(),
                                                                       .pinned = pinned_.get(),
                                                                       .streams = &slot.streams,
                                                                       .shape = shape_},
                                                                      plan.lane));
      slot.lanes.push_back(std::move(lane));
    }
    slot.ids.resize(static_cast<size_t>(options_.max_batch_tokens * shape_.layers * shape_.columns));
  }
  return absl::OkStatus();
}

absl::Status CudaBackend::CheckSize(const Step& step) const {
  int64_t most = step.hashed_tokens;
  for (const StepLayer& work : step.layers) {
    int64_t tokens = 0;
    for (const StepSlice& slice : work.slices) tokens += slice.tokens;
    most = std::max(most, tokens);
  }
  if (most <= options_.max_batch_tokens) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("a step of ", most, " tokens, built for ", options_.max_batch_tokens));
}

void CudaBackend::Hash(Slot& slot) {
  const absl::Time start = absl::Now();
  const int64_t per_token = int64_t{shape_.layers} * shape_.columns;
  int64_t* ids = slot.ids.data();
  for (const WindowRun& run : slot.step->runs) {
    kernels::CpuKernels().hash_window(model_->hash_tables(), run.window, run.tokens, ids, workers_);
    ids += run.tokens * per_token;
  }
  for (const IdCopy& copy : slot.step->id_copies) {
    std::memcpy(copy.to, slot.ids.data() + copy.first * per_token,
                static_cast<size_t>(copy.tokens * per_token) * sizeof(int64_t));
  }
  slot.times.hash += absl::Now() - start;
}

absl::Status CudaBackend::Launch(Slot& slot, size_t end) {
  for (; slot.launched < std::min(end, slot.step->layers.size()); ++slot.launched) {
    CudaLane& lane = *slot.lanes[slot.launched % slot.lanes.size()];
    RETURN_IF_ERROR(lane.Submit(slot.step->layers[slot.launched], slot.ids.data()));
  }
  return absl::OkStatus();
}

void CudaBackend::Start(const Step& step, LayerDone layer_done, StepDone done) {
  Slot& slot = slots_[next_slot_];  // free: its last step was done before the one before this
  next_slot_ = (next_slot_ + 1) % slots_.size();
  slot.step = &step;
  slot.layer_done = std::move(layer_done);
  slot.done = std::move(done);
  slot.times = {};
  slot.launched = 0;
  slot.status = health();
  if (slot.status.ok()) slot.status = CheckSize(step);
  if (slot.status.ok()) slot.status = device_->Use();
  if (slot.status.ok()) {
    Hash(slot);
    slot.status = Launch(slot, slot.lanes.size());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    under_way_.push_back(&slot);
  }
  wake_.notify_one();
}

void CudaBackend::CompleteSteps() {
  absl::Status used = device_->Use();
  for (;;) {
    Slot* slot = nullptr;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return stopping_ || !under_way_.empty(); });
      if (under_way_.empty()) return;
      slot = under_way_.front();
      under_way_.pop_front();
    }
    const absl::Status status = used.ok() ? CompleteLayers(*slot) : used;
    if (!status.ok()) {
      Drain(*slot);
      Note(status);
    }
    // From here on the slot is another step's.
    const StepDone done = std::move(slot->done);
    slot->layer_done = nullptr;
    const StepTimes times = slot->times;
    status.ok() ? done(times) : done(status);
  }
}

// A layer that was launched before a later one failed is written all the same; its step fails as a whole.
absl::Status CudaBackend::CompleteLayers(Slot& slot) {
  RETURN_IF_ERROR(slot.status);
  for (size_t i = 0; i < slot.step->layers.size(); ++i) {
    RETURN_IF_ERROR(slot.lanes[i % slot.lanes.size()]->Finish(slot.times));
    slot.layer_done(i);
    RETURN_IF_ERROR(Launch(slot, i + 1 + slot.lanes.size()));
  }
  return absl::OkStatus();
}

// Until nothing reads or writes the step's memory any more, or the device is past doing so.
void CudaBackend::Drain(const Slot& slot) const {
  for (const CudaStream* stream : {&slot.streams.upload, &slot.streams.compute, &slot.streams.download}) {
    static_cast<void>(device_->module().wait_stream(stream->get()));
  }
}

void CudaBackend::Note(const absl::Status& status) {
  options_.failed(status);
  const int error = device_->module().check_device();
  if (error == 0 || !device_->module().sticky(error)) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!health_.ok()) return;
    health_ = absl::InternalError(absl::StrCat("the CUDA context is broken: ", device_->module().error_text(error),
                                               "; first met in: ", status.message()));
  }
  options_.broken(health());
}

absl::Status CudaBackend::health() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return health_;
}

}  // namespace engram
