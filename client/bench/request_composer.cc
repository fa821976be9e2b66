#include "client/bench/request_composer.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "client/bench/token_source.h"
#include "engram/v1/engram.pb.h"
#include "grpcpp/support/slice.h"

namespace engram::bench {
namespace {

using client::Form;

constexpr char kApply[] = "/engram.v1.EngramService/Apply";
constexpr char kPrepare[] = "/engram.v1.EngramService/Prepare";
constexpr char kLookup[] = "/engram.v1.EngramService/Lookup";

int64_t VarintBytes(uint64_t value) {
  int64_t bytes = 1;
  while (value >>= 7) ++bytes;
  return bytes;
}

// Appends protobuf's wire format; zeros and empty fields are left out, as proto3 does.
class Writer {
 public:
  explicit Writer(std::string* to) : to_(*to) {}

  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) to_.push_back(static_cast<char>(value | 0x80));
    to_.push_back(static_cast<char>(value));
  }
  void Int(int field, int64_t value) {
    if (value == 0) return;
    Varint(static_cast<uint64_t>(field) << 3);
    Varint(static_cast<uint64_t>(value));
  }
  void Head(int field, int64_t length) {
    Varint(static_cast<uint64_t>(field) << 3 | 2);
    Varint(static_cast<uint64_t>(length));
  }
  void Bytes(int field, absl::string_view bytes) {
    if (bytes.empty()) return;
    Head(field, static_cast<int64_t>(bytes.size()));
    to_.append(bytes.data(), bytes.size());
  }
  // sfixed32, little endian as this machine is.
  void Ids(int field, const std::vector<int32_t>& ids) {
    Bytes(field, {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t)});
  }
  void PackedInts(int field, const std::vector<int32_t>& values) {
    int64_t length = 0;
    for (const int32_t value : values) length += VarintBytes(static_cast<uint64_t>(value));
    Head(field, length);
    for (const int32_t value : values) Varint(static_cast<uint64_t>(value));
  }
  void Sequences(int field, const Step& step) {
    std::string& one = scratch_;
    for (const StepSequence& sequence : step.sequences) {
      one.clear();
      Writer inner(&one);
      inner.Bytes(v1::Sequence::kSessionFieldNumber, sequence.session);
      inner.Int(v1::Sequence::kStartPosFieldNumber, sequence.start_pos);
      inner.Ids(v1::Sequence::kTokenIdsFieldNumber, sequence.token_ids);
      if (sequence.session.empty()) inner.Ids(v1::Sequence::kLookbackTokenIdsFieldNumber, sequence.lookback);
      Bytes(field, one);
    }
  }

 private:
  std::string& to_;
  std::string scratch_;
};

// Slices of one message: written bytes, cut where memory of others stands between.
class Message {
 public:
  std::string& written() { return written_; }

  void Borrow(const char* bytes, int64_t size) {
    Cut();
    slices_.emplace_back(bytes, static_cast<size_t>(size), grpc::Slice::STATIC_SLICE);
  }

  grpc::ByteBuffer Take() {
    Cut();
    return {slices_.data(), slices_.size()};
  }

 private:
  void Cut() {
    if (!written_.empty()) slices_.emplace_back(written_.data(), written_.size());
    written_.clear();
  }

  std::string written_;
  std::vector<grpc::Slice> slices_;
};

// Values around 1, as a highway has them: a sum of four uniform ones is near a normal distribution. Never rounded when
// stored as bf16, so both dtypes send the same values.
std::vector<char> HighwayPool(int64_t values, client::HighwayDtype dtype, uint64_t seed) {
  const int64_t width = client::BytesOf(dtype);
  std::vector<char> pool(static_cast<size_t>(values * width));
  uint64_t state = Mix(seed);
  for (int64_t i = 0; i < values; ++i) {
    const uint64_t bits = state = Mix(state);
    double sum = -2;
    for (int part = 0; part < 4; ++part) sum += static_cast<double>((bits >> (16 * part)) & 0xFFFF) / 65536;
    const auto value = static_cast<float>(sum * 1.7);
    uint32_t word = 0;
    std::memcpy(&word, &value, sizeof word);
    word &= 0xFFFF0000u;
    std::memcpy(pool.data() + i * width, reinterpret_cast<const char*>(&word) + (4 - width),
                static_cast<size_t>(width));
  }
  return pool;
}

}  // namespace

bool IsLookup(Form form) { return form == Form::kKv || form == Form::kRowsNative || form == Form::kRowsBf16; }

bool SendsHighway(Form form) { return form == Form::kHighway || form == Form::kUpdate || form == Form::kGate; }

RequestComposer::RequestComposer(const client::ModelInfo& model, std::vector<int32_t> layer_ids,
                                 client::HighwayDtype dtype, int64_t most_tokens, uint64_t seed)
    : model_(model),
      layer_ids_(std::move(layer_ids)),
      dtype_(dtype),
      token_bytes_(model.HighwayTokenBytes(dtype)),
      pool_(HighwayPool((most_tokens + kSpareTokens + static_cast<int64_t>(layer_ids_.size())) * model.hc * model.dim,
                        dtype, seed)) {}

const char* RequestComposer::HighwayOf(const Step& step, size_t layer) const {
  return pool_.data() + (step.highway_at + static_cast<int64_t>(layer)) * token_bytes_;
}

int64_t RequestComposer::ReplyTokenBytes(Form form, size_t layer) const {
  switch (form) {
    case Form::kHighway:
      return token_bytes_;
    case Form::kKv:
      return model_.KvTokenBytes();
    case Form::kUpdate:
      return model_.GatesTokenBytes() + model_.ValueTokenBytes();
    case Form::kGate:
      return model_.GatesTokenBytes();
    case Form::kRowsNative:
      return int64_t{model_.n_hash_cols} * model_.FindLayer(layer_ids_[layer])->row_bytes;
    case Form::kRowsBf16:
      return model_.n_hash_cols * model_.RowBf16Bytes();
    case Form::kAuto:
      break;
  }
  return 0;
}

// The payloads with their tags and lengths, and server_epoch.
int64_t RequestComposer::ReplyMessageBytes(const Step& step) const {
  int64_t bytes = 9;
  for (size_t layer = 0; layer < layer_ids_.size(); ++layer) {
    const int64_t payload = step.tokens() * ReplyTokenBytes(step.form, layer);
    const int64_t inner = payload + 1 + VarintBytes(static_cast<uint64_t>(payload)) + 2;
    bytes += inner + 1 + VarintBytes(static_cast<uint64_t>(inner));
  }
  return bytes;
}

Composed RequestComposer::Start(const Step& step, const std::string& ticket) const {
  Composed composed;
  composed.tokens = step.tokens();
  composed.method = IsLookup(step.form) && (ticket.empty() || step.form != Form::kKv) ? kLookup : kApply;
  const auto layers = static_cast<int64_t>(layer_ids_.size());
  if (ticket.empty()) composed.payload_up += 4 * composed.tokens;
  if (SendsHighway(step.form)) composed.payload_up += layers * composed.tokens * token_bytes_;
  for (size_t layer = 0; layer < layer_ids_.size(); ++layer) {
    composed.payload_down += composed.tokens * ReplyTokenBytes(step.form, layer);
  }
  return composed;
}

Composed RequestComposer::Write(const Step& step, const std::string& ticket, bool echo) const {
  Composed composed = Start(step, ticket);
  Message message;
  Writer writer(&message.written());
  if (composed.method == kLookup) {
    if (ticket.empty()) writer.Sequences(v1::LookupRequest::kSequencesFieldNumber, step);
    writer.Bytes(v1::LookupRequest::kTicketFieldNumber, ticket);
    writer.PackedInts(v1::LookupRequest::kLayerIdsFieldNumber, layer_ids_);
    writer.Int(v1::LookupRequest::kFormFieldNumber, client::WireForm(step.form));
    writer.Bytes(v1::LookupRequest::kModelKeyFieldNumber, model_.config_digest);
  } else {
    if (ticket.empty()) writer.Sequences(v1::ApplyRequest::kSequencesFieldNumber, step);
    const int64_t highway = SendsHighway(step.form) ? composed.tokens * token_bytes_ : 0;
    for (size_t layer = 0; layer < layer_ids_.size(); ++layer) {
      const auto id = static_cast<uint64_t>(layer_ids_[layer]);
      int64_t inner = id == 0 ? 0 : 1 + VarintBytes(id);
      if (highway > 0) inner += 1 + VarintBytes(static_cast<uint64_t>(highway)) + highway;
      writer.Head(v1::ApplyRequest::kLayersFieldNumber, inner);
      writer.Int(v1::LayerInput::kLayerIdFieldNumber, layer_ids_[layer]);
      if (highway == 0) continue;
      writer.Head(v1::LayerInput::kHighwayFieldNumber, highway);
      message.Borrow(HighwayOf(step, layer), highway);
    }
    writer.Int(v1::ApplyRequest::kFormFieldNumber, client::WireForm(step.form));
    if (highway > 0) writer.Int(v1::ApplyRequest::kHighwayDtypeFieldNumber, client::WireDtype(dtype_));
    writer.Bytes(v1::ApplyRequest::kModelKeyFieldNumber, model_.config_digest);
    writer.Bytes(v1::ApplyRequest::kTicketFieldNumber, ticket);
  }
  if (echo) {
    // Both messages end with the model's key or a ticket, so these bytes are there.
    const int64_t reply = ReplyMessageBytes(step);
    std::memcpy(message.written().data() + message.written().size() - sizeof reply, &reply, sizeof reply);
    composed.method = kApply;
  }
  composed.message = message.Take();
  return composed;
}

Composed RequestComposer::Compose(const Step& step, const std::string& ticket) const {
  return Write(step, ticket, false);
}

Composed RequestComposer::ComposeEcho(const Step& step, const std::string& ticket) const {
  return Write(step, ticket, true);
}

Composed RequestComposer::ComposePrepare(const Step& step) const {
  Composed composed;
  composed.method = kPrepare;
  composed.tokens = step.tokens();
  composed.payload_up = 4 * composed.tokens;
  Message message;
  Writer writer(&message.written());
  writer.Sequences(v1::PrepareRequest::kSequencesFieldNumber, step);
  writer.PackedInts(v1::PrepareRequest::kLayerIdsFieldNumber, layer_ids_);
  writer.Bytes(v1::PrepareRequest::kModelKeyFieldNumber, model_.config_digest);
  composed.message = message.Take();
  return composed;
}

}  // namespace engram::bench
