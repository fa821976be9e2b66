#include "server/engine/cuda_lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "server/model/status_macros.h"

namespace engram {
namespace {

using kernels::Bf16;
using kernels::HighwayType;
using kernels::kQ2KBlockBytes;
using kernels::kRowValues;
using kernels::cuda::GateToken;
using kernels::cuda::GemmClass;
using kernels::cuda::kProjectTokens;

// The length of a call up to which cuBLASLt computes it as tuned at 256 tokens (docs/gpu.md).
constexpr int64_t kMediumTokens = 512;

bool WantsProjection(const StepSlice& slice) { return NeedsKv(slice.form) && slice.kv == nullptr; }

}  // namespace

absl::StatusOr<std::unique_ptr<CudaLane>> CudaLane::Make(Surroundings around, const CudaLaneSizes& sizes) {
  std::unique_ptr<CudaLane> lane(new CudaLane(std::move(around)));
  const std::shared_ptr<const CudaDevice>& device = lane->around_.device;
  ASSIGN_OR_RETURN(lane->manifest_up_, CudaMemory::Pinned(device, sizes.manifest, "a step's manifest"));
  ASSIGN_OR_RETURN(lane->manifest_, CudaMemory::OnDevice(device, sizes.manifest, "a step's manifest"));
  ASSIGN_OR_RETURN(lane->io_, CudaMemory::OnDevice(device, sizes.io, "a step's highways"));
  ASSIGN_OR_RETURN(lane->x_, CudaMemory::OnDevice(device, sizes.x, "a step's rows"));
  ASSIGN_OR_RETURN(lane->kv_, CudaMemory::OnDevice(device, sizes.kv, "a step's kv"));
  ASSIGN_OR_RETURN(lane->gates_, CudaMemory::OnDevice(device, sizes.gates, "a step's gates"));
  ASSIGN_OR_RETURN(lane->bounce_, CudaMemory::Pinned(device, sizes.bounce, "a step's bounce buffer"));
  for (CudaEvent& event : lane->events_) {
    ASSIGN_OR_RETURN(event, MakeCudaEvent(device));
  }
  return lane;
}

absl::Status CudaLane::Record(Event event, const CudaStream& stream) const {
  return Check(module().record_event(events_[event].get(), stream.get()), "record_event");
}

int CudaLane::PathOf(const StepSlice& slice) {
  if (slice.call_tokens <= kProjectTokens) return 0;
  return slice.call_tokens <= kMediumTokens ? 1 : 2;
}

int64_t CudaLane::ColumnsOf(const StepSlice& slice) const {
  return slice.range.whole() ? around_.shape.columns : slice.range.end - slice.range.begin;
}

const uint8_t* CudaLane::KvOf(const StepSlice& slice, const Place& place) const {
  if (place.packed < 0) return reinterpret_cast<const uint8_t*>(slice.kv);
  return kv_.data() + place.packed * around_.shape.kv_values() * static_cast<int64_t>(sizeof(Bf16));
}

absl::Status CudaLane::Submit(const StepLayer& work, const int64_t* hashed_ids) {
  layer_ = work.layer;
  bounces_.clear();
  LayOut(work);
  WriteManifest(work, hashed_ids);
  RETURN_IF_ERROR(Up(work));
  RETURN_IF_ERROR(Compute(work));
  return Down(work);
}

// Sizes of everything follow from CudaLaneSizes: no token is in two slices of a layer, and the step has been checked to
// have no more tokens than the plan.
void CudaLane::LayOut(const StepLayer& work) {
  const StepShape& shape = around_.shape;
  places_.assign(work.slices.size(), {});
  path_tokens_.fill(0);
  for (const StepSlice& slice : work.slices) {
    if (WantsProjection(slice)) path_tokens_[static_cast<size_t>(PathOf(slice))] += slice.tokens;
  }
  std::array<int64_t, kPaths> next = {0, path_tokens_[0], path_tokens_[0] + path_tokens_[1]};
  row_ids_begin_ = (next[2] + path_tokens_[2]) * shape.columns;
  rows_gathered_ = row_ids_begin_;
  gate_f32_ = gate_bf16_ = 0;
  int64_t io = 0, bounce = 0, gates = 0, row_ids = row_ids_begin_;
  for (size_t i = 0; i < work.slices.size(); ++i) {
    const StepSlice& slice = work.slices[i];
    Place& place = places_[i];
    if (WantsProjection(slice)) {
      int64_t& packed = next[static_cast<size_t>(PathOf(slice))];
      place.packed = packed;
      packed += slice.tokens;
    }
    int64_t bytes = 0;  // of io
    if (ReadsHighway(slice.form)) {
      (slice.highway_type == HighwayType::kF32 ? gate_f32_ : gate_bf16_) += slice.tokens;
      bytes = slice.tokens * HighwayBytes(shape, slice.highway_type);
    } else if (!NeedsKv(slice.form)) {
      bytes = slice.tokens * OutBytes(shape, slice.form, slice.highway_type, slice.range);
      place.row_ids = row_ids;
      row_ids += slice.tokens * ColumnsOf(slice);
      rows_gathered_ += slice.tokens * ColumnsOf(slice);
    }
    place.io = io;
    io += CudaAligned(bytes);
    place.bounce = bounce;
    const bool kv_out = slice.form == Form::kKv;
    bounce += CudaAligned(kv_out ? slice.tokens * OutBytes(shape, slice.form, slice.highway_type, slice.range) : bytes);
    bounce += CudaAligned(slice.gates != nullptr ? slice.tokens * shape.copies * 4 : 0);
    bounce += CudaAligned(slice.value != nullptr ? slice.tokens * shape.dim * 2 : 0);
    place.gates = gates;
    if (slice.gates != nullptr) gates += slice.tokens;
  }
  gate_begin_ = CudaAligned(row_ids * static_cast<int64_t>(sizeof(int64_t)));
  manifest_bytes_ = gate_begin_ + (gate_f32_ + gate_bf16_) * static_cast<int64_t>(sizeof(GateToken));
}

void CudaLane::WriteIds(const StepSlice& slice, int layer, int64_t column, int64_t columns, const int64_t* hashed_ids,
                        int64_t* to) const {
  const StepShape& shape = around_.shape;
  int64_t stride = slice.id_stride;
  const int64_t* from = slice.ids;
  if (from == nullptr) {
    stride = int64_t{shape.layers} * shape.columns;
    from = hashed_ids + slice.first * stride + int64_t{layer} * shape.columns;
  }
  for (int64_t t = 0; t < slice.tokens; ++t) {
    std::memcpy(to + t * columns, from + t * stride + column, static_cast<size_t>(columns) * sizeof(int64_t));
  }
}

void CudaLane::WriteGateTokens(const StepSlice& slice, const Place& place, GateToken* to) const {
  const StepShape& shape = around_.shape;
  const auto* kv = reinterpret_cast<const Bf16*>(KvOf(slice, place));
  uint8_t* highway = io_.data() + place.io;
  const int64_t highway_bytes = HighwayBytes(shape, slice.highway_type);
  auto* gates = reinterpret_cast<float*>(gates_.data()) + place.gates * shape.copies;
  for (int64_t t = 0; t < slice.tokens; ++t) {
    GateToken& token = to[t];
    token.kv = kv + t * shape.kv_values();
    token.highway = highway + t * highway_bytes;
    token.out = slice.form == Form::kHighway ? highway + t * highway_bytes : nullptr;
    token.gates = slice.gates == nullptr ? nullptr : gates + t * shape.copies;
    token.live = slice.token_mask == nullptr || slice.token_mask[t] != 0 ? 1 : 0;
  }
}

void CudaLane::WriteManifest(const StepLayer& work, const int64_t* hashed_ids) {
  const int64_t columns = around_.shape.columns;
  auto* ids = reinterpret_cast<int64_t*>(manifest_up_.data());
  auto* f32 = reinterpret_cast<GateToken*>(manifest_up_.data() + gate_begin_);
  GateToken* bf16 = f32 + gate_f32_;
  for (size_t i = 0; i < work.slices.size(); ++i) {
    const StepSlice& slice = work.slices[i];
    const Place& place = places_[i];
    if (place.packed >= 0) WriteIds(slice, work.layer, 0, columns, hashed_ids, ids + place.packed * columns);
    if (!NeedsKv(slice.form)) {
      WriteIds(slice, work.layer, slice.range.begin, ColumnsOf(slice), hashed_ids, ids + place.row_ids);
    }
    if (!ReadsHighway(slice.form)) continue;
    GateToken*& next = slice.highway_type == HighwayType::kF32 ? f32 : bf16;
    WriteGateTokens(slice, place, next);
    next += slice.tokens;
  }
}

absl::Status CudaLane::Up(const StepLayer& work) {
  const CudaStream& stream = around_.streams->upload;
  RETURN_IF_ERROR(Record(kUpBegin, stream));
  if (manifest_bytes_ > 0) {
    RETURN_IF_ERROR(
        Check(module().copy(manifest_.data(), manifest_up_.data(), manifest_bytes_, stream.get()), "copy up"));
  }
  for (size_t i = 0; i < work.slices.size(); ++i) {
    const StepSlice& slice = work.slices[i];
    if (!ReadsHighway(slice.form)) continue;
    const int64_t bytes = slice.tokens * HighwayBytes(around_.shape, slice.highway_type);
    const void* from = slice.highway;
    if (!around_.pinned->Holds(from, bytes)) {
      uint8_t* bounce = bounce_.data() + places_[i].bounce;
      std::memcpy(bounce, from, static_cast<size_t>(bytes));
      from = bounce;
    }
    RETURN_IF_ERROR(Check(module().copy(io_.data() + places_[i].io, from, bytes, stream.get()), "copy up"));
  }
  return Record(kUpEnd, stream);
}

absl::Status CudaLane::Compute(const StepLayer& work) {
  const CudaStream& stream = around_.streams->compute;
  RETURN_IF_ERROR(Check(module().stream_waits(stream.get(), events_[kUpEnd].get()), "stream_waits"));
  timed_ = true;
  const CudaGraphs::Key key = {layer_, path_tokens_[0], path_tokens_[1], path_tokens_[2], gate_f32_, gate_bf16_};
  if (row_ids_begin_ + gate_f32_ + gate_bf16_ > 0) {
    // Descriptors stand behind the ids of rows forms, whose number is no part of the key.
    const bool recurs = gate_begin_ == CudaAligned(row_ids_begin_ * static_cast<int64_t>(sizeof(int64_t)));
    if (recurs) {
      RETURN_IF_ERROR(graphs_.Run(
          key, stream.get(), [this](bool timed) { return Sequence(timed); }, timed_));
    } else {
      RETURN_IF_ERROR(Sequence(true));
    }
  } else {
    for (const Event event : {kBegin, kGathered, kProjected}) RETURN_IF_ERROR(Record(event, stream));
  }
  RETURN_IF_ERROR(Record(kComputed, stream));
  RETURN_IF_ERROR(WriteRows(work));
  return KeepPrepared(work);
}

// Every pointer in it is the lane's own.
absl::Status CudaLane::Sequence(bool timed) {
  const CudaStream& stream = around_.streams->compute;
  const CudaModel::Layer& layer = around_.model->layer(layer_);
  if (timed) RETURN_IF_ERROR(Record(kBegin, stream));
  if (row_ids_begin_ > 0) {
    RETURN_IF_ERROR(
        Check(module().gather_rows({layer.table, reinterpret_cast<int64_t*>(manifest_.data()), row_ids_begin_},
                                   reinterpret_cast<Bf16*>(x_.data()), stream.get()),
              "gather_rows"));
  }
  if (timed) RETURN_IF_ERROR(Record(kGathered, stream));
  RETURN_IF_ERROR(Project());
  if (timed) RETURN_IF_ERROR(Record(kProjected, stream));
  const auto* f32 = reinterpret_cast<const GateToken*>(manifest_.data() + gate_begin_);
  if (gate_f32_ > 0) {
    RETURN_IF_ERROR(
        Check(module().apply_gate(layer.gate, {f32, gate_f32_, HighwayType::kF32}, stream.get()), "apply_gate"));
  }
  if (gate_bf16_ > 0) {
    RETURN_IF_ERROR(
        Check(module().apply_gate(layer.gate, {f32 + gate_f32_, gate_bf16_, HighwayType::kBf16}, stream.get()),
              "apply_gate"));
  }
  return absl::OkStatus();
}

// In this order: a class's padding is written where the next one's kv comes to stand.
absl::Status CudaLane::Project() {
  const CudaStream& stream = around_.streams->compute;
  const CudaModel::Layer& layer = around_.model->layer(layer_);
  const auto* x = reinterpret_cast<const Bf16*>(x_.data());
  auto* kv = reinterpret_cast<Bf16*>(kv_.data());
  for (int path = 0; path < kPaths; ++path) {
    const int64_t tokens = path_tokens_[static_cast<size_t>(path)];
    if (tokens == 0) continue;
    if (path == 0) {
      RETURN_IF_ERROR(Check(
          module().project(layer.wkv, x, tokens, kv, around_.device->info().multiprocessors, stream.get()), "project"));
    } else {
      RETURN_IF_ERROR(Check(module().run_gemm(layer.gemm, path == 1 ? GemmClass::kMedium : GemmClass::kLong, x, tokens,
                                              kv, around_.streams->gemm_workspace.data(), stream.get()),
                            "run_gemm"));
    }
    x += tokens * layer.wkv.inputs;
    kv += tokens * layer.wkv.outputs;
  }
  return absl::OkStatus();
}

absl::Status CudaLane::WriteRows(const StepLayer& work) {
  const CudaStream& stream = around_.streams->compute;
  for (size_t i = 0; i < work.slices.size(); ++i) {
    const StepSlice& slice = work.slices[i];
    if (NeedsKv(slice.form)) continue;
    const auto* ids = reinterpret_cast<const int64_t*>(manifest_.data()) + places_[i].row_ids;
    const kernels::cuda::GatherCall call = {around_.model->layer(layer_).table, ids, slice.tokens * ColumnsOf(slice)};
    uint8_t* out = io_.data() + places_[i].io;
    if (slice.form == Form::kRowsNative) {
      RETURN_IF_ERROR(Check(module().copy_rows(call, out, stream.get()), "copy_rows"));
    } else {
      RETURN_IF_ERROR(Check(module().gather_rows(call, reinterpret_cast<Bf16*>(out), stream.get()), "gather_rows"));
    }
  }
  return absl::OkStatus();
}

// A ticket's kv stays on the device.
absl::Status CudaLane::KeepPrepared(const StepLayer& work) {
  for (size_t i = 0; i < work.slices.size(); ++i) {
    const StepSlice& slice = work.slices[i];
    if (slice.form != Form::kPrepare) continue;
    const int64_t bytes = slice.tokens * around_.shape.kv_values() * static_cast<int64_t>(sizeof(Bf16));
    RETURN_IF_ERROR(
        Check(module().copy(slice.out, KvOf(slice, places_[i]), bytes, around_.streams->compute.get()), "copy of kv"));
  }
  return absl::OkStatus();
}

absl::Status CudaLane::CopyDown(void* to, const uint8_t* from, int64_t pitch, int64_t row_bytes, int64_t rows,
                                int64_t bounce) {
  CUstream_st* stream = around_.streams->download.get();
  const int64_t bytes = rows * row_bytes;
  if (!around_.pinned->Holds(to, bytes)) {
    bounces_.push_back({to, bounce_.data() + bounce, bytes});
    to = bounce_.data() + bounce;
  }
  if (pitch == row_bytes) return Check(module().copy(to, from, bytes, stream), "copy down");
  return Check(module().copy_2d(to, row_bytes, from, pitch, row_bytes, rows, stream), "copy down");
}

absl::Status CudaLane::Down(const StepLayer& work) {
  const StepShape& shape = around_.shape;
  const CudaStreams& streams = *around_.streams;
  const int64_t half = sizeof(Bf16);
  // The last event of the compute stream: rows and prepared kv come after kComputed.
  RETURN_IF_ERROR(Record(kAllComputed, streams.compute));
  RETURN_IF_ERROR(Check(module().stream_waits(streams.download.get(), events_[kAllComputed].get()), "stream_waits"));
  RETURN_IF_ERROR(Record(kDownBegin, streams.download));
  for (size_t i = 0; i < work.slices.size(); ++i) {
    const StepSlice& slice = work.slices[i];
    const Place& place = places_[i];
    const uint8_t* kv = KvOf(slice, place);
    const int64_t kv_pitch = shape.kv_values() * half;
    const int64_t out_bytes = OutBytes(shape, slice.form, slice.highway_type, slice.range);
    int64_t bounce = place.bounce;
    if (slice.form == Form::kKv) {
      RETURN_IF_ERROR(CopyDown(slice.out, kv + slice.range.begin * half, kv_pitch, out_bytes, slice.tokens, bounce));
      bounce += CudaAligned(slice.tokens * out_bytes);
    } else if (ReadsHighway(slice.form) || !NeedsKv(slice.form)) {
      if (slice.form == Form::kHighway || !NeedsKv(slice.form)) {
        RETURN_IF_ERROR(CopyDown(slice.out, io_.data() + place.io, out_bytes, out_bytes, slice.tokens, bounce));
      }
      bounce +=
          CudaAligned(slice.tokens * (ReadsHighway(slice.form) ? HighwayBytes(shape, slice.highway_type) : out_bytes));
    }
    if (slice.gates != nullptr && ReadsHighway(slice.form)) {
      const int64_t bytes = shape.copies * static_cast<int64_t>(sizeof(float));
      RETURN_IF_ERROR(CopyDown(slice.gates, gates_.data() + place.gates * bytes, bytes, bytes, slice.tokens, bounce));
      bounce += CudaAligned(slice.tokens * bytes);
    }
    if (slice.value != nullptr && NeedsKv(slice.form)) {
      RETURN_IF_ERROR(
          CopyDown(slice.value, kv + shape.highway_values() * half, kv_pitch, shape.dim * half, slice.tokens, bounce));
    }
  }
  return Record(kDownEnd, streams.download);
}

absl::Status CudaLane::Finish(StepTimes& times) {
  RETURN_IF_ERROR(Check(module().wait_event(events_[kDownEnd].get()), "wait_event"));
  for (const BounceDown& bounce : bounces_) {
    std::memcpy(bounce.to, bounce.from, static_cast<size_t>(bounce.bytes));
  }
  times.rows_gathered += rows_gathered_;
  times.stages_timed &= timed_;
  const auto add = [this](Event begin, Event end, absl::Duration& total) {
    float seconds = 0;
    RETURN_IF_ERROR(Check(module().event_seconds(events_[begin].get(), events_[end].get(), &seconds), "event_seconds"));
    total += absl::Seconds(seconds);
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(add(kUpBegin, kUpEnd, times.h2d));
  RETURN_IF_ERROR(add(kDownBegin, kDownEnd, times.d2h));
  if (!timed_) return absl::OkStatus();
  RETURN_IF_ERROR(add(kBegin, kGathered, times.gather));
  RETURN_IF_ERROR(add(kGathered, kProjected, times.project));
  RETURN_IF_ERROR(add(kProjected, kComputed, times.gate));
  return add(kComputed, kAllComputed, times.gather);
}

}  // namespace engram
