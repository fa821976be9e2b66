#include "client/reply_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/error_details.h"
#include "engram/v1/engram.pb.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "grpcpp/support/status.h"

namespace engram::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Of fields that are copied out of the message: a ticket, a sequence's refusal with its offenders.
constexpr int64_t kMostTicketBytes = 4096;
constexpr int64_t kMostStatusBytes = int64_t{1} << 20;

const char* MethodName(Method method) {
  switch (method) {
    case Method::kApply:
      return "Apply";
    case Method::kPrepare:
      return "Prepare";
    case Method::kLookup:
      return "Lookup";
  }
  return "";
}

const char* PayloadName(int field) {
  constexpr std::array<const char*, 7> kNames = {"", "", "highway", "kv", "gates", "value", "rows"};
  return kNames[static_cast<size_t>(field)];
}

// The numbers of the fields that a response has; 0: it has none such.
struct Fields {
  int layers = 0;
  int server_epoch = 0;
  int sequences = 0;
  int ticket = 0;
};

Fields FieldsOf(Method method) {
  if (method == Method::kPrepare) {
    return {v1::PrepareResponse::kLayersFieldNumber, v1::PrepareResponse::kServerEpochFieldNumber, 0,
            v1::PrepareResponse::kTicketFieldNumber};
  }
  // Lookup's numbers are Apply's.
  static_assert(int{v1::ApplyResponse::kLayersFieldNumber} == int{v1::LookupResponse::kLayersFieldNumber});
  static_assert(int{v1::ApplyResponse::kServerEpochFieldNumber} == int{v1::LookupResponse::kServerEpochFieldNumber});
  static_assert(int{v1::ApplyResponse::kSequencesFieldNumber} == int{v1::LookupResponse::kSequencesFieldNumber});
  return {v1::ApplyResponse::kLayersFieldNumber, v1::ApplyResponse::kServerEpochFieldNumber,
          v1::ApplyResponse::kSequencesFieldNumber, 0};
}

}  // namespace

// Walks the message once. Every range is [position, end) of the whole message.
class ReplyParser {
 public:
  ReplyParser(Method method, const Part& part, grpc::ByteBuffer* body)
      : method_(method),
        fields_(FieldsOf(method)),
        most_layers_(part.layers),
        most_sequences_(part.pieces.size()),
        length_(static_cast<int64_t>(body->Length())),
        reader_(body),
        in_(&reader_) {}

  absl::Status Parse(Reply* reply) {
    while (in_.CurrentPosition() < length_) {
      const uint32_t tag = in_.ReadTag();
      const int field = WireFormatLite::GetTagFieldNumber(tag);
      absl::Status status;
      if (tag != 0 && field == fields_.layers) {
        status = Layer(tag, reply);
      } else if (tag != 0 && field == fields_.server_epoch) {
        status = Epoch(tag, reply);
      } else if (tag != 0 && field == fields_.sequences) {
        status = Sequence(tag, reply);
      } else if (tag != 0 && field == fields_.ticket) {
        status = Ticket(tag, reply);
      } else {
        status = PassOver(tag, length_, "the message");
      }
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Fault(absl::string_view text) const {
    return absl::InternalError(absl::StrCat("the server's ", MethodName(method_), " reply: ", text));
  }

  absl::Status PassOver(uint32_t tag, int64_t end, absl::string_view what) {
    if (tag == 0 || !WireFormatLite::SkipField(&in_, tag) || in_.CurrentPosition() > end) {
      return Fault(absl::StrCat(what, " breaks off at byte ", in_.CurrentPosition(), " of ", end));
    }
    return absl::OkStatus();
  }

  // The length of a field of bytes that must end by `end`.
  absl::Status Length(uint32_t tag, int64_t end, absl::string_view what, int64_t* bytes) {
    const auto type = WireFormatLite::GetTagWireType(tag);
    if (type != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      return Fault(absl::StrCat(what, " has wire type ", static_cast<int>(type), ", expected 2"));
    }
    uint32_t claimed = 0;
    const bool read = in_.ReadVarint32(&claimed);
    const int64_t left = end - in_.CurrentPosition();
    if (!read || int64_t{claimed} > left) {
      return Fault(absl::StrCat(what, " claims ", claimed, " bytes, ", std::max<int64_t>(left, 0), " are left"));
    }
    *bytes = claimed;
    return absl::OkStatus();
  }

  // What a field of bytes holds, of one that is small.
  absl::Status Small(uint32_t tag, absl::string_view what, int64_t most, std::string* content) {
    int64_t bytes = 0;
    if (absl::Status status = Length(tag, length_, what, &bytes); !status.ok()) return status;
    if (bytes > most) return Fault(absl::StrCat(what, " has ", bytes, " bytes, expected at most ", most));
    if (!in_.ReadString(content, static_cast<int>(bytes))) return Fault(absl::StrCat(what, " breaks off"));
    return absl::OkStatus();
  }

  absl::Status Layer(uint32_t tag, Reply* reply) {
    if (reply->layers_.size() == most_layers_) {
      return Fault(absl::StrCat("more than the ", most_layers_, " layers that were asked for"));
    }
    const std::string at = absl::StrCat("layers[", reply->layers_.size(), "]");
    int64_t bytes = 0;
    if (absl::Status status = Length(tag, length_, at, &bytes); !status.ok()) return status;
    const int64_t end = in_.CurrentPosition() + bytes;
    ReplyLayer layer;
    std::array<bool, 7> seen = {};
    while (in_.CurrentPosition() < end) {
      const uint32_t inner = in_.ReadTag();
      const int field = WireFormatLite::GetTagFieldNumber(inner);
      if (inner == 0 || field < v1::LayerOutput::kLayerIdFieldNumber || field > v1::LayerOutput::kRowsFieldNumber) {
        if (absl::Status status = PassOver(inner, end, at); !status.ok()) return status;
        continue;
      }
      const bool id = field == v1::LayerOutput::kLayerIdFieldNumber;
      const std::string what = absl::StrCat(at, ".", id ? "layer_id" : PayloadName(field));
      if (std::exchange(seen[static_cast<size_t>(field)], true)) return Fault(absl::StrCat(what, " is there twice"));
      absl::Status status = id ? LayerId(inner, end, what, &layer)
                               : Payload(inner, end, what, &layer.payloads[static_cast<size_t>(field)]);
      if (!status.ok()) return status;
    }
    reply->layers_.push_back(layer);
    return absl::OkStatus();
  }

  absl::Status LayerId(uint32_t tag, int64_t end, absl::string_view what, ReplyLayer* layer) {
    uint64_t value = 0;
    const auto type = WireFormatLite::GetTagWireType(tag);
    if (type != WireFormatLite::WIRETYPE_VARINT || !in_.ReadVarint64(&value) || in_.CurrentPosition() > end) {
      return Fault(absl::StrCat(what, " is no number of its field"));
    }
    layer->layer_id = static_cast<int32_t>(value);
    return absl::OkStatus();
  }

  absl::Status Payload(uint32_t tag, int64_t end, absl::string_view what, PayloadPlace* place) {
    if (absl::Status status = Length(tag, end, what, &place->bytes); !status.ok()) return status;
    place->offset = in_.CurrentPosition();
    if (!in_.Skip(static_cast<int>(place->bytes))) return Fault(absl::StrCat(what, " breaks off"));
    return absl::OkStatus();
  }

  absl::Status Epoch(uint32_t tag, Reply* reply) {
    const auto type = WireFormatLite::GetTagWireType(tag);
    if (type != WireFormatLite::WIRETYPE_FIXED64 || !in_.ReadLittleEndian64(&reply->server_epoch_)) {
      return Fault("server_epoch is no number of its field");
    }
    return absl::OkStatus();
  }

  absl::Status Ticket(uint32_t tag, Reply* reply) {
    if (!reply->ticket_.empty()) return Fault("ticket is there twice");
    return Small(tag, "ticket", kMostTicketBytes, &reply->ticket_);
  }

  absl::Status Sequence(uint32_t tag, Reply* reply) {
    if (reply->sequences_.size() == most_sequences_) {
      return Fault(absl::StrCat("more than the ", most_sequences_, " sequences that were sent"));
    }
    const std::string what = absl::StrCat("sequences[", reply->sequences_.size(), "]");
    std::string content;
    if (absl::Status status = Small(tag, what, kMostStatusBytes, &content); !status.ok()) return status;
    v1::SequenceStatus sequence;
    if (!sequence.ParseFromString(content)) return Fault(absl::StrCat(what, " is no SequenceStatus"));
    absl::Status refused;
    if (sequence.has_refused()) {
      const google::rpc::Status& status = sequence.refused();
      refused = StatusFromGrpc(
          grpc::Status(static_cast<grpc::StatusCode>(status.code()), status.message(), status.SerializeAsString()));
      if (refused.ok()) return Fault(absl::StrCat(what, ".refused has code 0, expected an error"));
    }
    reply->sequences_.push_back(std::move(refused));
    return absl::OkStatus();
  }

  const Method method_;
  const Fields fields_;
  // Empty messages take two bytes on the wire and many more here: their number is bounded before they are kept.
  const size_t most_layers_;
  const size_t most_sequences_;
  const int64_t length_;
  grpc::ProtoBufferReader reader_;
  CodedInputStream in_;
};

absl::StatusOr<Reply> Reply::Parse(Method method, const Part& part, grpc::ByteBuffer body) {
  Reply reply;
  // References to what was received, not copies.
  if (!body.Dump(&reply.slices_).ok()) return absl::InternalError("the server's reply has no readable bytes");
  int64_t start = 0;
  for (const grpc::Slice& slice : reply.slices_) {
    reply.starts_.push_back(start);
    start += static_cast<int64_t>(slice.size());
  }
  if (absl::Status status = ReplyParser(method, part, &body).Parse(&reply); !status.ok()) return status;
  return reply;
}

size_t Reply::SliceAt(int64_t offset) const {
  // The last one that starts at or before it; of empty slices the last, which is the one with bytes.
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), offset);
  return static_cast<size_t>(after - starts_.begin()) - 1;
}

void Reply::Copy(int64_t offset, int64_t bytes, char* out) const {
  if (bytes == 0) return;
  for (size_t i = SliceAt(offset); bytes > 0; ++i) {
    const int64_t within = offset - starts_[i];
    const int64_t some = std::min(bytes, static_cast<int64_t>(slices_[i].size()) - within);
    std::memcpy(out, slices_[i].begin() + within, static_cast<size_t>(some));
    out += some;
    offset += some;
    bytes -= some;
  }
}

const char* Reply::Contiguous(int64_t offset, int64_t bytes) const {
  if (bytes == 0) return nullptr;
  const size_t i = SliceAt(offset);
  const int64_t within = offset - starts_[i];
  if (within + bytes > static_cast<int64_t>(slices_[i].size())) return nullptr;
  return reinterpret_cast<const char*>(slices_[i].begin()) + within;
}

absl::Status CheckReply(const CheckedCall& call, const Part& part, const Reply& reply) {
  const std::string whose = absl::StrCat("the server's ", MethodName(call.method), " reply has ");
  int64_t served = part.tokens;
  if (call.partial_ok) {
    if (reply.sequences().size() != part.pieces.size()) {
      return absl::InternalError(
          absl::StrCat(whose, reply.sequences().size(), " sequences, ", part.pieces.size(), " were sent"));
    }
    for (size_t i = 0; i < part.pieces.size(); ++i) {
      if (!reply.sequences()[i].ok()) served -= part.pieces[i].tokens;
    }
  }
  if (call.method == Method::kPrepare) {
    if (reply.ticket().empty()) return absl::InternalError(absl::StrCat(whose, "no ticket"));
    if (!call.return_values) return absl::OkStatus();
  }
  if (reply.layers().size() != part.layers) {
    return absl::InternalError(absl::StrCat(whose, reply.layers().size(), " layers, ", part.layers, " were asked for"));
  }
  for (size_t i = 0; i < part.layers; ++i) {
    const CheckedLayer& asked = call.layers[part.first_layer + i];
    const ReplyLayer& got = reply.layers()[i];
    if (got.layer_id != asked.layer_id) {
      return absl::InternalError(
          absl::StrCat(whose, "layers[", i, "].layer_id ", got.layer_id, ", expected ", asked.layer_id));
    }
    for (const Landing& landing : asked.landings) {
      const int64_t bytes = got.payloads[static_cast<size_t>(landing.field)].bytes;
      if (bytes != served * landing.token_bytes) {
        return absl::InternalError(absl::StrCat(whose, bytes, " bytes in layers[", i, "].", PayloadName(landing.field),
                                                ", expected ", served * landing.token_bytes));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace engram::client
