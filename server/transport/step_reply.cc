#include "server/transport/step_reply.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "server/transport/wire_status.h"

namespace engram {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

// Below it a copy costs less than a slice of its own on its way through gRPC and the system.
constexpr int64_t kLeastSliceBytes = 2048;

uint32_t BytesTag(int field) { return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED); }

int64_t HeadBytes(int field, int64_t length) {
  return static_cast<int64_t>(CodedOutputStream::VarintSize32(BytesTag(field)) +
                              CodedOutputStream::VarintSize64(static_cast<uint64_t>(length)));
}

// proto3 leaves empty fields out.
int64_t TensorBytes(int field, int64_t bytes) { return bytes == 0 ? 0 : HeadBytes(field, bytes) + bytes; }

// Removes the tokens of refused sequences from a payload of `per_token` bytes each.
void Compact(const std::vector<CallSequence>& sequences, int64_t per_token, Payload& payload) {
  if (payload.bytes == 0) return;
  uint8_t* const begin = payload.memory.get();
  uint8_t* to = begin;
  const uint8_t* from = begin;
  for (const CallSequence& sequence : sequences) {
    const int64_t bytes = sequence.tokens * per_token;
    if (!sequence.refused) {
      if (to != from) std::memmove(to, from, static_cast<size_t>(bytes));
      to += bytes;
    }
    from += bytes;
  }
  payload.bytes = to - begin;
}

}  // namespace

absl::StatusOr<CallLayer> LayOut(const StepCall& call, size_t index, const EngramModel& model, const StepShape& shape,
                                 StagingPool& staging, const StagingMemory& highway, LayerResult& result) {
  const int layer_index = call.layers[index];
  result.layer_id = static_cast<int32_t>(model.layers()[static_cast<size_t>(layer_index)].layer_id);
  CallLayer layer{.layer = layer_index, .highway = highway.get(), .out = nullptr, .gates = nullptr, .value = nullptr};
  bool short_of_memory = false;
  const auto take = [&](Payload& payload, int64_t bytes_per_token) {
    payload.bytes = call.tokens * bytes_per_token;
    payload.memory = staging.Take(payload.bytes);
    short_of_memory |= payload.memory == nullptr;
    return payload.memory.get();
  };
  const auto whole = [&](int field) {
    result.out_field = field;
    layer.out = take(result.out, OutBytes(shape, call.form, call.highway_type, call.slice));
  };
  const auto gates = [&] {
    const int64_t bytes = shape.copies * static_cast<int64_t>(sizeof(float));
    layer.gates = reinterpret_cast<float*>(take(result.gates, bytes));
  };
  const auto value = [&] {
    const int64_t bytes = shape.dim * static_cast<int64_t>(sizeof(kernels::Bf16));
    layer.value = reinterpret_cast<kernels::Bf16*>(take(result.value, bytes));
  };
  const bool in_region = call.in_region.region != nullptr;
  if (in_region) {
    layer.highway = call.in_region.layers[index].highway;
    layer.out = call.in_region.layers[index].out;
  }
  switch (call.form) {
    case Form::kHighway:
      if (in_region) break;
      result.out_field = v1::LayerOutput::kHighwayFieldNumber;
      result.out = {highway, call.tokens * HighwayBytes(shape, call.highway_type)};
      layer.out = highway.get();
      break;
    case Form::kKv:
      whole(v1::LayerOutput::kKvFieldNumber);
      break;
    case Form::kRowsNative:
    case Form::kRowsBf16:
      whole(v1::LayerOutput::kRowsFieldNumber);
      break;
    case Form::kUpdate:
      gates();
      value();
      break;
    case Form::kGate:
      gates();
      break;
    case Form::kPrepare:
      if (call.return_values) value();
      break;
  }
  if (short_of_memory) return OutOfMemory(call.reply_bytes);
  return layer;
}

absl::Status OutOfMemory(int64_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("the server has no memory for ", bytes, " bytes of tensors"));
}

void DropRefused(const StepCall& call, const std::vector<CallSequence>& sequences, const StepShape& shape,
                 LayerResult& result) {
  Compact(sequences, OutBytes(shape, call.form, call.highway_type, call.slice), result.out);
  Compact(sequences, shape.copies * static_cast<int64_t>(sizeof(float)), result.gates);
  Compact(sequences, shape.dim * static_cast<int64_t>(sizeof(kernels::Bf16)), result.value);
}

void ReplyWriter::Fields(const google::protobuf::MessageLite& fields) { fields.AppendToString(&small_); }

void ReplyWriter::Head(int field, int64_t length) {
  uint8_t head[16];
  uint8_t* end = CodedOutputStream::WriteTagToArray(BytesTag(field), head);
  end = CodedOutputStream::WriteVarint64ToArray(static_cast<uint64_t>(length), end);
  small_.append(reinterpret_cast<const char*>(head), static_cast<size_t>(end - head));
}

void ReplyWriter::Layer(int field, LayerResult result) {
  v1::LayerOutput fields;
  fields.set_layer_id(result.layer_id);
  const int64_t length = static_cast<int64_t>(fields.ByteSizeLong()) + TensorBytes(result.out_field, result.out.bytes) +
                         TensorBytes(v1::LayerOutput::kGatesFieldNumber, result.gates.bytes) +
                         TensorBytes(v1::LayerOutput::kValueFieldNumber, result.value.bytes);
  Head(field, length);
  Fields(fields);
  Tensor(result.out_field, std::move(result.out));
  Tensor(v1::LayerOutput::kGatesFieldNumber, std::move(result.gates));
  Tensor(v1::LayerOutput::kValueFieldNumber, std::move(result.value));
}

void ReplyWriter::Tensor(int field, Payload payload) {
  if (payload.bytes == 0) return;
  Head(field, payload.bytes);
  if (payload.bytes < kLeastSliceBytes) {
    small_.append(reinterpret_cast<const char*>(payload.memory.get()), static_cast<size_t>(payload.bytes));
    return;
  }
  EndSlice();
  uint8_t* const begin = payload.memory.get();
  const auto let_go = [](void* memory) { delete static_cast<StagingMemory*>(memory); };
  slices_.emplace_back(begin, static_cast<size_t>(payload.bytes), let_go, new StagingMemory(std::move(payload.memory)));
  slice_bytes_ += payload.bytes;
}

void ReplyWriter::Nest(int field, ReplyWriter message) {
  Head(field, message.bytes());
  if (message.slices_.empty()) {
    small_ += message.small_;
    return;
  }
  message.EndSlice();
  EndSlice();
  slices_.insert(slices_.end(), message.slices_.begin(), message.slices_.end());
  slice_bytes_ += message.slice_bytes_;
}

void ReplyWriter::EndSlice() {
  if (small_.empty()) return;
  slices_.emplace_back(small_);
  slice_bytes_ += static_cast<int64_t>(small_.size());
  small_.clear();
}

grpc::ByteBuffer ReplyWriter::Take() {
  EndSlice();
  if (slices_.empty()) slices_.emplace_back();  // an empty message is one, too
  return {slices_.data(), slices_.size()};
}

void AddSequenceStatus(const absl::Status& status, v1::SequenceStatus& out) {
  if (!status.ok()) *out.mutable_refused() = ToStatusMessage(status);
}

ReplyWriter WriteReply(StepReply& reply, uint64_t server_epoch) {
  ReplyWriter writer;
  if (reply.call.form == Form::kPrepare) {
    v1::PrepareResponse ticket;
    ticket.set_ticket(reply.ticket);
    writer.Fields(ticket);
    if (reply.call.return_values) {
      for (LayerResult& result : reply.results) {
        writer.Layer(v1::PrepareResponse::kLayersFieldNumber, std::move(result));
      }
    }
    v1::PrepareResponse rest;
    rest.set_server_epoch(server_epoch);
    writer.Fields(rest);
    return writer;
  }
  // Lookup's numbers are Apply's.
  static_assert(int{v1::ApplyResponse::kLayersFieldNumber} == int{v1::LookupResponse::kLayersFieldNumber});
  static_assert(int{v1::ApplyResponse::kServerEpochFieldNumber} == int{v1::LookupResponse::kServerEpochFieldNumber});
  static_assert(int{v1::ApplyResponse::kSequencesFieldNumber} == int{v1::LookupResponse::kSequencesFieldNumber});
  for (LayerResult& result : reply.results) writer.Layer(v1::ApplyResponse::kLayersFieldNumber, std::move(result));
  v1::ApplyResponse rest;
  rest.set_server_epoch(server_epoch);
  for (const absl::Status& status : reply.statuses) AddSequenceStatus(status, *rest.add_sequences());
  writer.Fields(rest);
  return writer;
}

}  // namespace engram
