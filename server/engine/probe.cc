#include "server/engine/probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "kernels/scalar.h"
#include "server/engine/cpu_backend.h"
#include "server/model/chunk_threads.h"

namespace engram {
namespace {

using kernels::Bf16;

constexpr int64_t kRowBytes = kernels::kQ2KBlockBytes;
constexpr int64_t kRowValues = kernels::kRowValues;

// Rows of each layer's sample that are anywhere, beside those at the ends of the columns' ranges.
constexpr int kRandomRows = 16;

// The step: two live tokens, then a masked one. Two, so that a mix-up of tokens shows.
constexpr int64_t kLive = 2;
constexpr int64_t kStepTokens = kLive + 1;
const std::vector<uint8_t> kStepMask = {1, 1, 0};

// Outputs of the reference projection that a thread takes at a time: of 6144 inputs, some milliseconds.
constexpr int64_t kReferenceOutputs = 256;

// Rows where an off-by-one or a wrapped offset would read another: the first and the last of the table and of every
// column's range; and some others. Fixed for a model.
std::vector<int64_t> SampleRows(const kernels::HashTables& tables, size_t layer, int64_t rows) {
  std::vector<int64_t> sample = {0, rows - 1};
  const auto first = static_cast<int64_t>(layer) * tables.columns();
  for (int64_t column = first; column < first + tables.columns(); ++column) {
    const int64_t begin = tables.offsets[column];
    const int64_t end = begin + tables.primes[column];
    sample.push_back(begin);
    sample.push_back(end - 1);
    if (end < rows) sample.push_back(end);
  }
  std::mt19937_64 random(layer);
  for (int i = 0; i < kRandomRows; ++i) sample.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(rows)));
  std::sort(sample.begin(), sample.end());
  sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
  sample.insert(sample.begin(), -1);
  return sample;
}

// Hands the engine a call as a client's would be, and waits for its end.
absl::Status Await(Engine& engine, std::unique_ptr<Call> call) {
  absl::Notification over;
  absl::Status outcome;
  call->priority = Priority::kPrefill;
  call->uncounted = true;
  call->sequences = {{.tokens = call->tokens}};
  call->commit = [](Call&) { return absl::OkStatus(); };
  call->cancelled = [] { return false; };
  call->done = [&](Call&, absl::Status status) {
    outcome = std::move(status);
    over.Notify();
  };
  engine.Submit(std::move(call));
  over.WaitForNotification();
  return outcome;
}

// Equal, or both not a number, or within `bound`.
bool Agree(float got, float want, double bound) {
  if (std::isnan(want) || std::isinf(want)) return std::isnan(want) ? std::isnan(got) : got == want;
  return std::fabs(static_cast<double>(got) - static_cast<double>(want)) <= bound;
}

}  // namespace

absl::StatusOr<std::unique_ptr<const Probe>> Probe::Make(std::shared_ptr<const EngramModel> model, int threads) {
  const StepShape shape = ShapeOf(*model);
  std::unique_ptr<Probe> probe(new Probe(std::move(model), shape));
  probe->layers_.resize(probe->model_->layers().size());
  if (const absl::Status status = probe->Sample(); !status.ok()) return status;
  if (const absl::Status status = probe->MakeStep(threads); !status.ok()) return status;
  return probe;
}

int64_t Probe::rows() const {
  int64_t rows = 0;
  for (const Layer& layer : layers_) {
    rows += std::count_if(layer.ids.begin(), layer.ids.end(), [](int64_t id) { return id >= 0; });
  }
  return rows;
}

// Rows of the file: their bytes, and what the scalar decoder makes of them. Id -1 is a row of zeros.
absl::Status Probe::ReadAndDecode(size_t layer, const int64_t* ids, int64_t count, uint8_t* bytes, Bf16* rows) const {
  for (int64_t i = 0; i < count; ++i, bytes += kRowBytes, rows += kRowValues) {
    std::memset(bytes, 0, kRowBytes);
    if (ids[i] >= 0) {
      const absl::Status status = model_->ReadRowsFromFile(layer, ids[i], 1, bytes);
      if (!status.ok()) return status;
    }
    float values[kRowValues];
    kernels::DecodeQ2K(bytes, values);
    std::transform(values, values + kRowValues, rows, kernels::Bf16FromF32);
  }
  return absl::OkStatus();
}

absl::Status Probe::Sample() {
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].ids = SampleRows(model_->hash_tables(), i, model_->layers()[i].table.rows);
    const auto ids = static_cast<int64_t>(layers_[i].ids.size());
    sample_tokens_ = std::max(sample_tokens_, (ids + shape_.columns - 1) / shape_.columns);
  }
  const int64_t count = sample_tokens_ * shape_.columns;
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    layer.ids.resize(static_cast<size_t>(count), -1);
    layer.bytes.resize(static_cast<size_t>(count * kRowBytes));
    layer.rows.resize(static_cast<size_t>(count * kRowValues));
    const absl::Status status = ReadAndDecode(i, layer.ids.data(), count, layer.bytes.data(), layer.rows.data());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Probe::MakeStep(int threads) {
  const EngramGeometry& geometry = model_->geometry();
  std::mt19937_64 random(1);
  window_.assign(1, kernels::kDead);  // as at a sequence's beginning
  while (static_cast<int64_t>(window_.size()) < geometry.max_ngram - 1 + kLive) {
    window_.push_back(static_cast<int32_t>(random() % static_cast<uint64_t>(geometry.compressed_vocab)));
  }
  window_.push_back(kernels::kDead);
  highway_.resize(static_cast<size_t>(kStepTokens * geometry.highway_values()));
  for (float& h : highway_) h = static_cast<float>(static_cast<int64_t>(random() % 4096) - 2048) / 1024;

  kernels::Workers alone(1);
  const kernels::Kernels& reference = kernels::ReferenceKernels();
  const int64_t per_token = int64_t{shape_.layers} * shape_.columns;
  std::vector<int64_t> ids(static_cast<size_t>(kLive * per_token));
  reference.hash_window(model_->hash_tables(), window_.data(), kLive, ids.data(), alone);
  std::vector<uint8_t> bytes(static_cast<size_t>(shape_.columns * kRowBytes));
  std::vector<Bf16> rows(static_cast<size_t>(kLive * geometry.inputs()));
  for (size_t i = 0; i < layers_.size(); ++i) {
    const EngramLayer& weights = model_->layers()[i];
    for (int64_t t = 0; t < kLive; ++t) {
      const int64_t* token_ids = ids.data() + t * per_token + static_cast<int64_t>(i) * shape_.columns;
      const absl::Status status =
          ReadAndDecode(i, token_ids, shape_.columns, bytes.data(), rows.data() + t * geometry.inputs());
      if (!status.ok()) return status;
    }
    const float* qk = weights.gate.qk;
    layers_[i].qk.assign(qk, qk + geometry.highway_values());
    layers_[i].kv.resize(static_cast<size_t>(kLive * shape_.kv_values()));
    const int64_t ranges = (shape_.kv_values() + kReferenceOutputs - 1) / kReferenceOutputs;
    const absl::Status status = RunChunks(kLive * ranges, threads, [&](int64_t chunk) {
      const int64_t t = chunk / ranges;
      const int64_t begin = chunk % ranges * kReferenceOutputs;
      kernels::ProjectionWeights part = weights.wkv;
      if (part.q2k != nullptr) part.q2k += begin * (part.inputs / kRowValues) * kRowBytes;
      if (part.bf16 != nullptr) part.bf16 += begin * part.inputs;
      part.outputs = std::min(kReferenceOutputs, shape_.kv_values() - begin);
      kernels::Workers one(1);
      reference.project(part, rows.data() + t * part.inputs, 1, layers_[i].kv.data() + t * shape_.kv_values() + begin,
                        nullptr, one);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Probe::Run(Engine& engine) const {
  if (const absl::Status status = CheckRows(engine); !status.ok()) return status;
  return CheckStep(engine);
}

std::string Probe::Where(size_t layer) const {
  return absl::StrCat(model_->path(), ": probe: layer ", model_->layers()[layer].layer_id);
}

absl::Status Probe::CheckRows(Engine& engine) const {
  const int64_t count = sample_tokens_ * shape_.columns;
  std::vector<int64_t> ids;
  for (int64_t t = 0; t < sample_tokens_; ++t) {
    for (const Layer& layer : layers_) {
      const auto token = layer.ids.begin() + t * shape_.columns;
      ids.insert(ids.end(), token, token + shape_.columns);
    }
  }
  std::vector<std::vector<uint8_t>> native, decoded;
  for (const auto& [form, row_bytes, got] : {std::tuple{Form::kRowsNative, kRowBytes, &native},
                                             std::tuple{Form::kRowsBf16, int64_t{kRowValues * 2}, &decoded}}) {
    got->assign(layers_.size(), std::vector<uint8_t>(static_cast<size_t>(count * row_bytes)));
    auto call = std::make_unique<Call>();
    call->form = form;
    call->tokens = sample_tokens_;
    call->row_ids = ids;
    for (size_t i = 0; i < layers_.size(); ++i) {
      call->layers.push_back({.layer = static_cast<int>(i), .out = (*got)[i].data()});
    }
    if (const absl::Status status = Await(engine, std::move(call)); !status.ok()) return status;
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const auto byte = std::mismatch(layer.bytes.begin(), layer.bytes.end(), native[i].begin());
    if (byte.first != layer.bytes.end()) {
      const int64_t at = byte.first - layer.bytes.begin();
      return absl::DataLossError(absl::StrFormat(
          "%s, row %d: byte %d of the row is read as 0x%02x; expected 0x%02x, as the file held it at load", Where(i),
          layer.ids[static_cast<size_t>(at / kRowBytes)], at % kRowBytes, *byte.second, *byte.first));
    }
    for (int64_t at = 0; at < count * kRowValues; ++at) {
      const auto value = kernels::LoadUnaligned<Bf16>(decoded[i].data() + at * 2);
      const Bf16 want = layer.rows[static_cast<size_t>(at)];
      if (value == want) continue;
      return absl::DataLossError(
          absl::StrFormat("%s, row %d: value %d of the row is decoded as bf16 0x%04x (%g); expected 0x%04x (%g)",
                          Where(i), layer.ids[static_cast<size_t>(at / kRowValues)], at % kRowValues, value,
                          kernels::F32FromBf16(value), want, kernels::F32FromBf16(want)));
    }
  }
  return absl::OkStatus();
}

absl::Status Probe::CheckStep(Engine& engine) const {
  std::vector<std::vector<Bf16>> kv(layers_.size());
  std::vector<std::vector<float>> updated(layers_.size());
  auto kv_call = std::make_unique<Call>();
  kv_call->form = Form::kKv;
  kv_call->tokens = kLive;
  kv_call->windows.assign(window_.begin(), window_.end() - (kStepTokens - kLive));
  auto call = std::make_unique<Call>();
  call->form = Form::kHighway;
  call->tokens = kStepTokens;
  call->windows = window_;
  call->token_mask = kStepMask;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const int layer = static_cast<int>(i);
    kv[i].resize(static_cast<size_t>(kStepTokens * shape_.kv_values()));  // none of the masked token: zeros
    updated[i].resize(highway_.size());
    kv_call->layers.push_back({.layer = layer, .out = kv[i].data()});
    call->layers.push_back({.layer = layer, .highway = highway_.data(), .out = updated[i].data()});
  }
  if (const absl::Status status = Await(engine, std::move(kv_call)); !status.ok()) return status;
  if (const absl::Status status = Await(engine, std::move(call)); !status.ok()) return status;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (const absl::Status status = CompareKv(i, kv[i]); !status.ok()) return status;
    if (const absl::Status status = CompareHighway(i, kv[i], updated[i]); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Probe::CompareKv(size_t layer, const std::vector<Bf16>& got) const {
  const int64_t values = shape_.kv_values();
  for (int64_t t = 0; t < kLive; ++t) {
    const Bf16* want = layers_[layer].kv.data() + t * values;
    double squares = 0;
    for (int64_t o = 0; o < values; ++o) squares += std::pow(kernels::F32FromBf16(want[o]), 2);
    const double rms = std::sqrt(squares / static_cast<double>(values));
    for (int64_t o = 0; o < values; ++o) {
      const float expected = kernels::F32FromBf16(want[o]);
      const double size = std::fabs(expected);
      const float value = kernels::F32FromBf16(got[static_cast<size_t>(t * values + o)]);
      // Both are within max(one ulp, rms / 256) of the exact sum; 2^-7 of the value is at least its ulp.
      const double bound = 2 * std::max(std::ldexp(size, -7), std::ldexp(rms, -8));
      if (Agree(value, expected, bound)) continue;
      return absl::DataLossError(absl::StrFormat("%s, token %d of the step: kv value %d is %g; expected %g within %g",
                                                 Where(layer), t, o, value, expected, bound));
    }
  }
  return absl::OkStatus();
}

// Against the reference gate on the kv that came back: kv's own tolerance does not come in a second time.
absl::Status Probe::CompareHighway(size_t layer, const std::vector<Bf16>& kv, const std::vector<float>& got) const {
  std::vector<float> want(highway_.size());
  kernels::Workers alone(1);
  kernels::GateWeights weights = model_->layers()[layer].gate;
  weights.qk = layers_[layer].qk.data();
  kernels::ReferenceKernels().apply_gate(weights,
                                         {.kv = kv.data(),
                                          .token_mask = kStepMask.data(),
                                          .tokens = kStepTokens,
                                          .type = kernels::HighwayType::kF32,
                                          .highway = highway_.data(),
                                          .out = want.data()},
                                         alone);
  for (size_t i = 0; i < want.size(); ++i) {
    const int64_t t = static_cast<int64_t>(i) / shape_.highway_values();
    const int64_t of_value = shape_.highway_values() + static_cast<int64_t>(i) % shape_.dim;
    const double value = std::fabs(kernels::F32FromBf16(kv[static_cast<size_t>(t * shape_.kv_values() + of_value)]));
    const double h = std::fabs(highway_[i]);
    const double bound = kStepMask[static_cast<size_t>(t)] == 0 ? 0 : std::ldexp(h + value, -19);
    if (Agree(got[i], want[i], bound)) continue;
    return absl::DataLossError(
        absl::StrFormat("%s, token %d of the step: highway value %d is %.9g; expected %.9g within %g", Where(layer), t,
                        static_cast<int64_t>(i) % shape_.highway_values(), got[i], want[i], bound));
  }
  return absl::OkStatus();
}

}  // namespace engram
