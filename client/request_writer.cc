#include "client/request_writer.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "engram/v1/engram.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "grpc/slice.h"
#include "grpcpp/support/slice.h"

namespace engram::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t BytesTag(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

// Lengths are below 2^31: the plan keeps messages there.
int64_t LengthDelimitedBytes(int field, int64_t length) {
  return static_cast<int64_t>(CodedOutputStream::VarintSize32(BytesTag(field)) +
                              CodedOutputStream::VarintSize32(static_cast<uint32_t>(length))) +
         length;
}

// Writes into memory that was measured first.
class Pen {
 public:
  explicit Pen(uint8_t* at) : at_(at) {}

  void Head(int field, int64_t length) {
    at_ = CodedOutputStream::WriteTagToArray(BytesTag(field), at_);
    at_ = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(length), at_);
  }

  void Int32(int field, int32_t value) { at_ = WireFormatLite::WriteInt32ToArray(field, value, at_); }

  void Bytes(const void* from, int64_t bytes) {
    std::memcpy(at_, from, static_cast<size_t>(bytes));
    at_ += bytes;
  }

 private:
  uint8_t* at_;
};

struct Buffer {
  explicit Buffer(int64_t bytes)
      : slice(grpc_slice_malloc(static_cast<size_t>(bytes))), pen(GRPC_SLICE_START_PTR(slice)) {}

  grpc::ByteBuffer Take() {
    const grpc::Slice owned(slice, grpc::Slice::STEAL_REF);
    return {&owned, 1};
  }

  grpc_slice slice;
  Pen pen;
};

v1::Priority WirePriority(Priority priority) {
  switch (priority) {
    case Priority::kAuto:
      return v1::PRIORITY_UNSPECIFIED;
    case Priority::kDecode:
      return v1::PRIORITY_DECODE;
    case Priority::kPrefill:
      return v1::PRIORITY_PREFILL;
  }
  return v1::PRIORITY_UNSPECIFIED;
}

class Writer {
 public:
  Writer(const ModelInfo& model, const CheckedCall& call, const CallPlan& plan, const Part& part, bool by_ids)
      : model_(model), call_(call), plan_(plan), part_(part), by_ticket_(part.ticket.has_value() && !by_ids) {}

  grpc::ByteBuffer Write() {
    switch (call_.method) {
      case Method::kApply:
        return Apply();
      case Method::kPrepare:
        return Prepare();
      case Method::kLookup:
        return Lookup();
    }
    return {};
  }

 private:
  // The fields in the order of their numbers, as protobuf writes them: sequences, the tensors, the rest.
  grpc::ByteBuffer Apply() {
    v1::ApplyRequest head;
    if (!by_ticket_) AddSequences(head);
    if (call_.region != nullptr) AddSpans(head);
    v1::ApplyRequest tail;
    tail.set_form(WireForm(call_.form));
    tail.set_highway_dtype(WireDtype(call_.dtype));
    tail.set_model_key(model_.config_digest);
    tail.set_priority(WirePriority(plan_.priority));
    tail.set_partial_ok(call_.partial_ok);
    if (by_ticket_) {
      tail.set_ticket(Ticket().ticket);
      if (part_.tokens != Ticket().tokens) {
        tail.mutable_token_slice()->set_begin(part_.ticket_slice.begin);
        tail.mutable_token_slice()->set_end(part_.ticket_slice.end);
      }
    }
    if (call_.region != nullptr) {
      tail.set_region(call_.region->id());
      return Whole(head.SerializeAsString() + tail.SerializeAsString());
    }
    const int64_t token_bytes = call_.reads_highway() ? model_.HighwayTokenBytes(call_.dtype) : 0;
    const int64_t highway = part_.tokens * token_bytes;
    const std::string before = head.SerializeAsString();
    const std::string after = tail.SerializeAsString();
    auto bytes = static_cast<int64_t>(before.size() + after.size());
    for (size_t i = 0; i < part_.layers; ++i) {
      bytes += LengthDelimitedBytes(v1::ApplyRequest::kLayersFieldNumber, LayerBytes(Layer(i), highway));
    }
    Buffer buffer(bytes);
    buffer.pen.Bytes(before.data(), static_cast<int64_t>(before.size()));
    for (size_t i = 0; i < part_.layers; ++i) WriteLayer(Layer(i), highway, token_bytes, buffer.pen);
    buffer.pen.Bytes(after.data(), static_cast<int64_t>(after.size()));
    return buffer.Take();
  }

  // The layers, where highways do not travel. The part's pieces are one run of the call's tokens (call_plan.h).
  void AddSpans(v1::ApplyRequest& head) const {
    const int64_t token_bytes = model_.HighwayTokenBytes(call_.dtype);
    const auto first = static_cast<size_t>(PlaceOf(call_, part_.pieces.front()) * token_bytes);
    const auto bytes = static_cast<size_t>(part_.tokens * token_bytes);
    const auto set = [&](v1::RegionSpan& span, const char* of) {
      span.set_offset(*call_.region->OffsetOf({of + first, bytes}));
      span.set_bytes(bytes);
    };
    for (size_t i = 0; i < part_.layers; ++i) {
      v1::LayerInput& layer = *head.add_layers();
      layer.set_layer_id(Layer(i).layer_id);
      set(*layer.mutable_highway_in_region(), Layer(i).highway);
      if (Layer(i).updated != nullptr) set(*layer.mutable_out_in_region(), Layer(i).updated);
    }
  }

  // proto3 leaves zeros and empty fields out.
  static int64_t LayerBytes(const CheckedLayer& layer, int64_t highway) {
    int64_t bytes = 0;
    if (layer.layer_id != 0) bytes += 1 + static_cast<int64_t>(WireFormatLite::Int32Size(layer.layer_id));
    if (highway > 0) bytes += LengthDelimitedBytes(v1::LayerInput::kHighwayFieldNumber, highway);
    return bytes;
  }

  void WriteLayer(const CheckedLayer& layer, int64_t highway, int64_t token_bytes, Pen& pen) const {
    pen.Head(v1::ApplyRequest::kLayersFieldNumber, LayerBytes(layer, highway));
    if (layer.layer_id != 0) pen.Int32(v1::LayerInput::kLayerIdFieldNumber, layer.layer_id);
    if (highway == 0) return;
    pen.Head(v1::LayerInput::kHighwayFieldNumber, highway);
    for (const Piece& piece : part_.pieces) {
      pen.Bytes(layer.highway + PlaceOf(call_, piece) * token_bytes, piece.tokens * token_bytes);
    }
  }

  grpc::ByteBuffer Prepare() const {
    v1::PrepareRequest request;
    AddSequences(request);
    for (size_t i = 0; i < part_.layers; ++i) request.add_layer_ids(Layer(i).layer_id);
    request.set_return_values(call_.return_values);
    request.set_model_key(model_.config_digest);
    request.set_priority(WirePriority(plan_.priority));
    return Whole(request.SerializeAsString());
  }

  grpc::ByteBuffer Lookup() const {
    v1::LookupRequest head;
    if (by_ticket_) head.set_ticket(Ticket().ticket);
    if (!by_ticket_ && call_.row_ids == nullptr) AddSequences(head);
    v1::LookupRequest tail;
    for (size_t i = 0; i < part_.layers; ++i) tail.add_layer_ids(Layer(i).layer_id);
    tail.set_form(WireForm(call_.form));
    if (call_.slice.has_value()) {
      tail.mutable_slice()->set_begin(call_.slice->begin);
      tail.mutable_slice()->set_end(call_.slice->end);
    }
    tail.set_model_key(model_.config_digest);
    tail.set_priority(WirePriority(plan_.priority));
    tail.set_partial_ok(call_.partial_ok);
    if (call_.row_ids == nullptr) return Whole(head.SerializeAsString() + tail.SerializeAsString());

    // [tokens, layers, cols]: of each token those of the part's layers.
    const int64_t token_ids = static_cast<int64_t>(part_.layers) * model_.n_hash_cols;
    const int64_t ids = part_.tokens * token_ids * 4;
    const std::string after = tail.SerializeAsString();
    Buffer buffer(LengthDelimitedBytes(v1::LookupRequest::kRowIdsFieldNumber, ids) +
                  static_cast<int64_t>(after.size()));
    buffer.pen.Head(v1::LookupRequest::kRowIdsFieldNumber, ids);
    const int64_t stride = static_cast<int64_t>(call_.layers.size()) * model_.n_hash_cols;
    for (const Piece& piece : part_.pieces) {
      const int32_t* from =
          call_.row_ids + PlaceOf(call_, piece) * stride + static_cast<int64_t>(part_.first_layer) * model_.n_hash_cols;
      for (int64_t t = 0; t < piece.tokens; ++t) buffer.pen.Bytes(from + t * stride, token_ids * 4);
    }
    buffer.pen.Bytes(after.data(), static_cast<int64_t>(after.size()));
    return buffer.Take();
  }

  static grpc::ByteBuffer Whole(const std::string& message) {
    const grpc::Slice slice(message);
    return {&slice, 1};
  }

  const CheckedLayer& Layer(size_t i) const { return call_.layers[part_.first_layer + i]; }
  const PreparedPart& Ticket() const { return call_.prepared.state()->parts[*part_.ticket]; }

  template <typename Request>
  void AddSequences(Request& request) const {
    for (const Piece& piece : part_.pieces) Encode(piece, *request.add_sequences());
  }

  void Encode(const Piece& piece, v1::Sequence& out) const {
    const CheckedSequence& sequence = call_.sequences[piece.sequence];
    const auto first = static_cast<size_t>(piece.first);
    const auto tokens = static_cast<size_t>(piece.tokens);
    std::vector<int32_t> lookback;
    // Prepared sequences name no session: where the ids alone do not say it all, they do not come here.
    if (!sequence.by_session()) lookback = LookbackOf(sequence, piece.first, model_.lookback_length());
    out.set_session(sequence.session);
    out.set_start_pos(sequence.start_pos + piece.first);
    const absl::Span<const int32_t> ids = sequence.token_ids.subspan(first, tokens);
    out.mutable_token_ids()->Add(ids.begin(), ids.end());
    if (!sequence.token_mask.empty()) out.set_token_mask(sequence.token_mask.data() + first, tokens);
    out.mutable_lookback_token_ids()->Add(lookback.begin(), lookback.end());
    if (sequence.step.has_value() && !sequence.session.empty()) out.set_step(*sequence.step);
    // Only the beginning of the child is the parent's; parts of more layers repeat it with the same outcome.
    if (!sequence.fork_from.empty() && piece.first == 0) out.mutable_fork_from()->set_session(sequence.fork_from);
  }

  const ModelInfo& model_;
  const CheckedCall& call_;
  const CallPlan& plan_;
  const Part& part_;
  const bool by_ticket_;
};

}  // namespace

grpc::ByteBuffer WriteRequest(const ModelInfo& model, const CheckedCall& call, const CallPlan& plan, const Part& part,
                              bool by_ids) {
  return Writer(model, call, plan, part, by_ids).Write();
}

}  // namespace engram::client
