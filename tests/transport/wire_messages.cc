#include "tests/transport/wire_messages.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/unknown_field_set.h"
#include "google/protobuf/util/message_differencer.h"
#include "google/protobuf/wire_format_lite.h"
#include "server/transport/arrived_message.h"

namespace engram {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::internal::WireFormatLite;

// Sometimes with bytes that add nothing, as protobuf's own parser allows.
void AppendVarint(uint64_t value, int most_bytes, std::mt19937& random, std::string& out) {
  int bytes = 1;
  for (uint64_t rest = value; rest >= 0x80; rest >>= 7) ++bytes;
  if (random() % 8 == 0) bytes += static_cast<int>(random() % static_cast<unsigned>(most_bytes - bytes + 1));
  for (int i = 0; i < bytes; ++i) {
    out.push_back(static_cast<char>((value & 0x7f) | (i + 1 < bytes ? 0x80 : 0)));
    value >>= 7;
  }
}

void AppendTag(int field, int wire_type, std::mt19937& random, std::string& out) {
  AppendVarint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire_type), 5, random, out);
}

std::string Noise(std::mt19937& random, size_t most) {
  std::string bytes(random() % (most + 1), '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// The value of a field without a length.
void AppendScalar(int wire_type, std::mt19937& random, std::string& out) {
  const uint64_t value = random() % 3 == 0 ? (uint64_t{random()} << 32 | random()) : random() % 200;
  switch (wire_type) {
    case WireFormatLite::WIRETYPE_VARINT:
      return AppendVarint(value, 10, random, out);
    case WireFormatLite::WIRETYPE_FIXED64:
      out.append(reinterpret_cast<const char*>(&value), 8);
      return;
    default:
      out.append(reinterpret_cast<const char*>(&value), 4);
  }
}

void AppendBytes(int field, const std::string& content, std::mt19937& random, std::string& out) {
  AppendTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED, random, out);
  AppendVarint(content.size(), 5, random, out);
  out += content;
}

// Of any number, a known field's with another wire type too.
void AppendUnknown(std::mt19937& random, int depth, std::string& out) {
  const int field = random() % 2 == 0 ? 1 + static_cast<int>(random() % 12) : 100 + static_cast<int>(random() % 3000);
  switch (random() % 5) {
    case 0:
      AppendTag(field, WireFormatLite::WIRETYPE_VARINT, random, out);
      return AppendScalar(WireFormatLite::WIRETYPE_VARINT, random, out);
    case 1:
      AppendTag(field, WireFormatLite::WIRETYPE_FIXED64, random, out);
      return AppendScalar(WireFormatLite::WIRETYPE_FIXED64, random, out);
    case 2:
      AppendTag(field, WireFormatLite::WIRETYPE_FIXED32, random, out);
      return AppendScalar(WireFormatLite::WIRETYPE_FIXED32, random, out);
    case 3:
      // A number beyond all of ours: a known field's noise would be no message.
      return AppendBytes(field + 100, Noise(random, 20), random, out);
    default:
      AppendTag(field, WireFormatLite::WIRETYPE_START_GROUP, random, out);
      for (int i = static_cast<int>(random() % 3); i > 0 && depth < 4; --i) AppendUnknown(random, depth + 1, out);
      AppendTag(field, WireFormatLite::WIRETYPE_END_GROUP, random, out);
  }
}

void AppendKnown(const FieldDescriptor& field, std::mt19937& random, int depth, std::string& out) {
  if (field.message_type() != nullptr) {
    return AppendBytes(field.number(), RandomWire(*field.message_type(), random, depth + 1), random, out);
  }
  if (field.type() == FieldDescriptor::TYPE_BYTES) {
    return AppendBytes(field.number(), Noise(random, random() % 10 == 0 ? 400 : 20), random, out);
  }
  const int wire_type = WireFormatLite::WireTypeForFieldType(static_cast<WireFormatLite::FieldType>(field.type()));
  if (field.is_packable() && random() % 3 != 0) {
    std::string packed;
    for (int i = static_cast<int>(random() % 6); i > 0; --i) AppendScalar(wire_type, random, packed);
    if (random() % 50 == 0) packed += "\x80";  // an element that is none
    return AppendBytes(field.number(), packed, random, out);
  }
  AppendTag(field.number(), wire_type, random, out);
  AppendScalar(wire_type, random, out);
}

// The highways of the request, which are taken out of it.
std::vector<std::string> TakeHighways(v1::ApplyRequest& request) {
  std::vector<std::string> highways;
  for (v1::LayerInput& layer : *request.mutable_layers()) {
    highways.push_back(layer.highway());
    layer.clear_highway();
  }
  return highways;
}
std::vector<std::string> TakeHighways(v1::StreamRequest& request) {
  return request.has_apply() ? TakeHighways(*request.mutable_apply()) : std::vector<std::string>{};
}
std::vector<std::string> TakeHighways(Message&) { return {}; }

}  // namespace

grpc::ByteBuffer InSlices(const std::string& bytes, const std::vector<size_t>& lengths) {
  std::vector<grpc::Slice> slices;
  size_t from = 0;
  for (size_t i = 0; from < bytes.size() || i == 0; ++i) {
    const size_t length = std::min(lengths[i % lengths.size()], bytes.size() - from);
    slices.emplace_back(bytes.data() + from, length);
    from += length;
  }
  return {slices.data(), slices.size()};
}

std::string RandomWire(const Descriptor& type, std::mt19937& random, int depth) {
  std::string out;
  for (int i = static_cast<int>(random() % 9); i > 0; --i) {
    if (random() % 4 == 0) {
      AppendUnknown(random, depth, out);
    } else {
      AppendKnown(*type.field(static_cast<int>(random() % static_cast<unsigned>(type.field_count()))), random, depth,
                  out);
    }
  }
  return out;
}

template <typename Request>
std::string Disagreement(const std::string& bytes, const std::vector<size_t>& slices) {
  Request whole;
  const bool parses = whole.ParseFromString(bytes);
  ArrivedMessage arrived(InSlices(bytes, slices));
  Request small;
  const absl::Status status = arrived.Parse({.layers = 1 << 20, .others = 1 << 20}, small);
  if (parses != status.ok()) {
    return absl::StrCat("protobuf ", parses ? "parses it" : "does not parse it",
                        ", ArrivedMessage: ", status.ToString());
  }
  if (!parses) return "";
  const std::vector<std::string> expected = TakeHighways(whole);
  whole.DiscardUnknownFields();
  if (!google::protobuf::util::MessageDifferencer::Equals(whole, small)) {
    return absl::StrCat("protobuf: ", whole.ShortDebugString(), "\nArrivedMessage: ", small.ShortDebugString());
  }
  if (arrived.bytes() != static_cast<int64_t>(bytes.size())) return absl::StrCat(arrived.bytes(), " bytes arrived");
  if (arrived.highway_bytes().size() != expected.size()) {
    return absl::StrCat(expected.size(), " layers, highways of ", arrived.highway_bytes().size());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    std::string got(static_cast<size_t>(arrived.highway_bytes()[i]), '\0');
    arrived.CopyHighway(i, reinterpret_cast<uint8_t*>(got.data()));
    if (got != expected[i]) return absl::StrCat("the highway of layers[", i, "] differs");
  }
  return "";
}

template std::string Disagreement<v1::StreamRequest>(const std::string&, const std::vector<size_t>&);
template std::string Disagreement<v1::ApplyRequest>(const std::string&, const std::vector<size_t>&);
template std::string Disagreement<v1::LookupRequest>(const std::string&, const std::vector<size_t>&);

}  // namespace engram
