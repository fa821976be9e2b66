#include "client/bench/local/local_table.h"

#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/bench/worker/arrival.h"
#include "client/bench/worker/wire_fetch.h"
#include "kernels/kernels.h"
#include "server/engine/cpu_backend.h"
#include "server/engine/step.h"
#include "server/model/engram_model.h"
#include "server/model/progress_meter.h"

namespace engram::bench {
namespace {

engram::Form EngineForm(client::Form form) {
  switch (form) {
    case client::Form::kHighway:
    case client::Form::kAuto:
      return engram::Form::kHighway;
    case client::Form::kKv:
      return engram::Form::kKv;
    case client::Form::kRowsNative:
      return engram::Form::kRowsNative;
    case client::Form::kRowsBf16:
      return engram::Form::kRowsBf16;
    case client::Form::kUpdate:
      return engram::Form::kUpdate;
    case client::Form::kGate:
      return engram::Form::kGate;
  }
  return engram::Form::kHighway;
}

// Runs what it is given, in order, on one thread.
class Line {
 public:
  Line() : thread_([this] { Loop(); }) {}
  ~Line() {
    {
      absl::MutexLock lock(&mutex_);
      ending_ = true;
    }
    thread_.join();
  }

  void Do(std::function<void()> work) {
    absl::MutexLock lock(&mutex_);
    waiting_.push_back(std::move(work));
  }

 private:
  void Loop() {
    while (true) {
      std::function<void()> work;
      {
        const auto more = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || !waiting_.empty(); };
        absl::MutexLock lock(&mutex_, absl::Condition(&more));
        if (waiting_.empty()) return;
        work = std::move(waiting_.front());
        waiting_.pop_front();
      }
      work();
    }
  }

  absl::Mutex mutex_;
  std::deque<std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all of the above
};

// As the server's engine does it: rows and kv at the top of the step, layer after layer; else kv at the top, and the
// gate when the layer is reached.
class LocalFetch : public StepFetch {
 public:
  LocalFetch(std::shared_ptr<const EngramModel> model, std::unique_ptr<CpuBackend> backend, const LocalOptions& options)
      : model_(std::move(model)),
        backend_(std::move(backend)),
        shape_(ShapeOf(*model_)),
        form_(EngineForm(options.form)),
        early_(ReadsHighway(form_) ? client::Form::kKv : options.form),
        plain_(options.plain),
        type_(options.dtype == client::HighwayDtype::kF32 ? kernels::HighwayType::kF32 : kernels::HighwayType::kBf16) {
    const auto tokens = static_cast<size_t>(options.max_step_tokens);
    const auto of_tokens = [tokens](int64_t each) { return tokens * static_cast<size_t>(each); };
    const engram::Form early = EarlyForm();
    if (ReadsHighway(form_)) highway_.resize(of_tokens(HighwayBytes(shape_, type_)));
    for (int i = 0; i < shape_.layers; ++i) {
      Layer& layer = layers_.emplace_back();
      layer.early.resize(of_tokens(OutBytes(shape_, early, type_, {})));
      if (!ReadsHighway(form_)) continue;
      layer.gates.resize(of_tokens(shape_.copies));
      layer.value.resize(of_tokens(shape_.dim));
      layer.out.resize(of_tokens(OutBytes(shape_, form_, type_, {})));
    }
  }

  void Begin(const PlannedStep& step) override {
    made_ = ClockNow();
    for (Layer& layer : layers_) layer.ahead.Expect(1);
    line_.Do([this, &step] { Ahead(step); });
  }

  LayerArrival Await(size_t index) override {
    Layer& layer = layers_[index];
    Arrival::Outcome outcome = layer.ahead.Await();
    LayerArrival arrival;
    // Layers are made one after the other: each took what it added.
    arrival.ahead = {std::exchange(made_, outcome.at), outcome.at};
    if (ReadsHighway(form_) && outcome.failures.empty()) {
      const absl::Duration reached = ClockNow();
      layer.gated.Expect(1);
      line_.Do([this, index] { layers_[index].gated.Answered(Gate(index)); });
      outcome = layer.gated.Await();
      arrival.then = {reached, outcome.at};
    }
    for (const absl::Status& status : outcome.failures) ++totals_.errors[absl::StatusCodeToString(status.code())];
    return arrival;
  }

  // Gates are not looked at: what they come from is.
  absl::Status Verify(const PlannedStep& step) override {
    for (size_t i = 0; i < layers_.size(); ++i) {
      const int64_t bytes = step.tokens * OutBytes(shape_, EarlyForm(), type_, {});
      std::vector<char> plain(static_cast<size_t>(bytes));
      client::LookupCall call;
      call.sequences = RunsOf(step);
      call.form = early_;
      const auto layer_id = static_cast<int32_t>(model_->layers()[i].layer_id);
      call.layers = {{.layer_id = layer_id, .out = absl::MakeSpan(plain)}};
      if (absl::Status status = plain_->Lookup(call); !status.ok()) return status;
      const absl::Span<const char> got(reinterpret_cast<const char*>(layers_[i].early.data()), plain.size());
      if (absl::Status status = SameBytes(layer_id, got, plain); !status.ok()) return status;
      ++totals_.verified;
    }
    return absl::OkStatus();
  }

  FetchTotals TakeTotals() override { return std::exchange(totals_, {}); }

 private:
  struct Layer {
    std::vector<uint8_t> early;  // rows, or kv
    std::vector<float> gates;
    std::vector<kernels::Bf16> value;
    std::vector<uint8_t> out;  // the highway
    Arrival ahead, gated;
  };

  engram::Form EarlyForm() const { return EngineForm(early_); }

  int32_t Compressed(int32_t id) const {
    return id < 0 ? kernels::kDead : model_->token_map()[static_cast<size_t>(id)];
  }

  // What the ids alone decide. On the line's thread.
  void Ahead(const PlannedStep& step) {
    call_ = Call();
    call_.form = EarlyForm();
    call_.highway_type = type_;
    call_.tokens = step.tokens;
    for (const StepRun& run : step.runs) {
      call_.sequences.push_back({.tokens = static_cast<int64_t>(run.token_ids.size())});
      for (auto id = run.lookback.rbegin(); id != run.lookback.rend(); ++id) call_.windows.push_back(Compressed(*id));
      for (const int32_t id : run.token_ids) call_.windows.push_back(Compressed(id));
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
      call_.layers.push_back({.layer = static_cast<int>(i), .out = layers_[i].early.data()});
    }
    size_t done = 0;
    const auto layer_done = [this, &done](size_t i) {
      layers_[i].ahead.Answered(absl::OkStatus());
      done = i + 1;
    };
    const absl::Status status = backend_->Run(BuildStep({{&call_, 0, call_.tokens}}, shape_), layer_done).status();
    for (; done < layers_.size(); ++done) layers_[done].ahead.Answered(status);
  }

  // What the highway decides, for a layer whose kv is there. On the line's thread.
  absl::Status Gate(size_t index) {
    Layer& layer = layers_[index];
    StepSlice slice;
    slice.tokens = call_.tokens;
    slice.form = form_;
    slice.highway_type = type_;
    slice.kv = reinterpret_cast<const kernels::Bf16*>(layer.early.data());
    slice.highway = highway_.data();
    slice.gates = layer.gates.data();
    if (form_ == engram::Form::kUpdate) slice.value = layer.value.data();
    if (form_ == engram::Form::kHighway) slice.out = layer.out.data();
    if (form_ == engram::Form::kHighway) slice.gates = nullptr;
    Step step;
    step.layers = {{.layer = static_cast<int>(index), .slices = {slice}}};
    return backend_->Run(step, [](size_t) {}).status();
  }

  const std::shared_ptr<const EngramModel> model_;
  const std::unique_ptr<CpuBackend> backend_;  // used by the line's thread alone
  const StepShape shape_;
  const engram::Form form_;
  const client::Form early_;  // of what depends on ids alone
  client::Client* const plain_;
  const kernels::HighwayType type_;
  std::vector<uint8_t> highway_;  // zeros: what it holds costs nothing
  std::deque<Layer> layers_;      // a deque, since an Arrival stays where it is
  Call call_;
  absl::Duration made_;  // when the last layer awaited was; at first, when the step began
  FetchTotals totals_;
  Line line_;  // last: its thread uses all of the above
};

}  // namespace

absl::StatusOr<LocalTable> LocalTable::Load(const std::string& path, const std::string& residency,
                                            const client::ModelInfo& served) {
  ProgressMeter meter("loading");
  LoadOptions load;
  load.residency = residency == "mmap" ? Residency::kMmap : Residency::kRam;
  load.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  load.progress = [&meter](const LoadProgress& progress) { meter.Update(progress.bytes_done, progress.bytes_total); };
  absl::StatusOr<std::shared_ptr<const EngramModel>> model = EngramModel::Load(path, load);
  if (!model.ok()) return model.status();
  const std::string served_hex = absl::BytesToHexString(served.config_digest);
  const std::string hex = DigestHex((*model)->config_digest());
  if (hex != served_hex) {
    return absl::FailedPreconditionError(
        absl::StrCat("--model ", path, " has config digest ", hex, "; the server's model has ", served_hex));
  }
  return LocalTable(*std::move(model));
}

absl::StatusOr<std::unique_ptr<StepFetch>> LocalTable::MakeFetch(const LocalOptions& options) const {
  absl::StatusOr<std::unique_ptr<CpuBackend>> backend = CpuBackend::Create(
      model_, kernels::CpuKernels(), {.threads = options.threads, .max_batch_tokens = options.max_step_tokens});
  if (!backend.ok()) return backend.status();
  return std::make_unique<LocalFetch>(model_, *std::move(backend), options);
}

}  // namespace engram::bench
