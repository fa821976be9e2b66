#include "client/bench/recompute/recomputer.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"
#include "server/engine/cpu_backend.h"
#include "server/engine/step.h"
#include "server/model/engram_model.h"

namespace engram::bench {
namespace {

// Tokens computed at a time; longer steps are cut, which changes no bit. 80 KB each at the released geometry.
constexpr int64_t kMostBatchTokens = 256;

engram::Form EngineForm(client::Form form) {
  switch (form) {
    case client::Form::kHighway:
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
    case client::Form::kAuto:
      break;
  }
  return engram::Form::kGate;
}

absl::string_view Bytes(const Digest& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

absl::Status OtherModel(const std::string& path, absl::string_view which, absl::string_view own,
                        absl::string_view served) {
  return absl::FailedPreconditionError(absl::StrCat(
      "DIGEST_MISMATCH: --model ", path, " has ", which, " digest ", absl::BytesToHexString(own),
      ", the server serves ", absl::BytesToHexString(served), ": another model's replies cannot be verified"));
}

}  // namespace

struct Recomputer::Parts {
  std::shared_ptr<const EngramModel> model;
  std::unique_ptr<CpuBackend> backend;
  StepShape shape;
  std::string numerics_id;
  bool same_numerics = false;
};

Recomputer::Recomputer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Recomputer::~Recomputer() = default;

bool Recomputer::same_numerics() const { return parts_->same_numerics; }
const std::string& Recomputer::numerics_id() const { return parts_->numerics_id; }

absl::StatusOr<std::unique_ptr<Recomputer>> Recomputer::Load(const std::string& path, const client::ModelInfo& served) {
  auto parts = std::make_unique<Parts>();
  engram::LoadOptions load;
  load.residency = Residency::kMmap;
  absl::StatusOr<std::shared_ptr<const EngramModel>> model = EngramModel::Load(path, load);
  if (!model.ok()) return model.status();
  parts->model = *std::move(model);
  if (Bytes(parts->model->config_digest()) != served.config_digest) {
    return OtherModel(path, "config", Bytes(parts->model->config_digest()), served.config_digest);
  }
  const std::optional<Digest>& content = parts->model->content_digest();
  if (content.has_value() && !served.content_digest.empty() && Bytes(*content) != served.content_digest) {
    return OtherModel(path, "content", Bytes(*content), served.content_digest);
  }
  absl::StatusOr<std::unique_ptr<CpuBackend>> backend =
      CpuBackend::Create(parts->model, kernels::CpuKernels(), {.threads = 1, .max_batch_tokens = kMostBatchTokens});
  if (!backend.ok()) return backend.status();
  parts->backend = *std::move(backend);
  parts->shape = ShapeOf(*parts->model);
  parts->numerics_id = parts->backend->numerics_id();
  parts->same_numerics = parts->numerics_id == served.numerics_id;
  return std::unique_ptr<Recomputer>(new Recomputer(std::move(parts)));
}

absl::StatusOr<std::vector<ExpectedLayer>> Recomputer::Compute(const Step& step, const std::vector<int32_t>& layer_ids,
                                                               client::HighwayDtype dtype,
                                                               const std::vector<const char*>& highways) {
  const EngramModel& model = *parts_->model;
  const StepShape& shape = parts_->shape;
  const auto compressed = [&model](int32_t token) {
    return token < 0 ? kernels::kDead : model.token_map()[static_cast<size_t>(token)];
  };
  Call call;
  call.form = EngineForm(step.form);
  call.highway_type = dtype == client::HighwayDtype::kBf16 ? kernels::HighwayType::kBf16 : kernels::HighwayType::kF32;
  for (const StepSequence& sequence : step.sequences) {
    call.sequences.push_back({.tokens = static_cast<int64_t>(sequence.token_ids.size())});
    for (auto id = sequence.lookback.rbegin(); id != sequence.lookback.rend(); ++id) {
      call.windows.push_back(compressed(*id));
    }
    for (const int32_t id : sequence.token_ids) call.windows.push_back(compressed(id));
  }
  call.tokens = step.tokens();

  std::vector<ExpectedLayer> expected(layer_ids.size());
  std::vector<std::vector<float>> gates(layer_ids.size());
  std::vector<std::vector<kernels::Bf16>> values(layer_ids.size());
  const bool gated = ReadsHighway(call.form);
  for (size_t i = 0; i < layer_ids.size(); ++i) {
    const auto layer = std::find_if(model.layers().begin(), model.layers().end(),
                                    [&](const EngramLayer& known) { return known.layer_id == layer_ids[i]; });
    if (layer == model.layers().end()) return absl::InternalError(absl::StrCat("no layer ", layer_ids[i]));
    expected[i].layer_id = layer_ids[i];
    expected[i].out.resize(static_cast<size_t>(call.tokens * OutBytes(shape, call.form, call.highway_type, {})));
    CallLayer wanted = {.layer = static_cast<int>(layer - model.layers().begin())};
    if (gated) wanted.highway = highways[i];
    if (!expected[i].out.empty()) wanted.out = expected[i].out.data();
    if (call.form == engram::Form::kUpdate || call.form == engram::Form::kGate) {
      gates[i].resize(static_cast<size_t>(call.tokens * shape.copies));
      wanted.gates = gates[i].data();
    }
    if (call.form == engram::Form::kUpdate) {
      values[i].resize(static_cast<size_t>(call.tokens * shape.dim));
      wanted.value = values[i].data();
    }
    call.layers.push_back(wanted);
  }
  const auto run = [this](Call& whole) {
    for (int64_t begin = 0; begin < whole.tokens; begin += kMostBatchTokens) {
      const int64_t end = std::min(whole.tokens, begin + kMostBatchTokens);
      const auto times = parts_->backend->Run(BuildStep({{&whole, begin, end}}, parts_->shape), [](size_t) {});
      if (!times.ok()) return times.status();
    }
    return absl::OkStatus();
  };
  if (absl::Status status = run(call); !status.ok()) return status;
  const auto bytes = [](const auto& values_of) {
    return std::string(reinterpret_cast<const char*>(values_of.data()), values_of.size() * sizeof values_of[0]);
  };
  for (size_t i = 0; i < layer_ids.size(); ++i) {
    expected[i].gates = bytes(gates[i]);
    expected[i].value = bytes(values[i]);
  }
  // Tolerances follow from kv.
  if (!parts_->same_numerics && NeedsKv(call.form)) {
    call.form = engram::Form::kKv;
    for (size_t i = 0; i < layer_ids.size(); ++i) {
      expected[i].kv.resize(static_cast<size_t>(call.tokens * shape.kv_values()) * sizeof(kernels::Bf16));
      call.layers[i] = {.layer = call.layers[i].layer, .out = expected[i].kv.data()};
    }
    if (absl::Status status = run(call); !status.ok()) return status;
  }
  return expected;
}

}  // namespace engram::bench
