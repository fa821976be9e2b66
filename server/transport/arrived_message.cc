#include "server/transport/arrived_message.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "engram/v1/engram.pb.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/wire_format_lite.h"
#include "server/refusal/refusal.h"

namespace engram {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;

// protobuf's own bounds: a tag or a length is a varint of at most 5 bytes, a value one of at most 10.
constexpr int kMostTagBytes = 5;
constexpr int kMostVarintBytes = 10;
// Messages in messages; unknown groups in groups. protobuf's default.
constexpr int kMostDepth = 100;

// A walk of some 30 ms: a handler thread reads other calls too, and 60 MB of empty fields would hold it for seconds.
// The largest calls have eight fields for each of 65,536 sequences.
constexpr int64_t kMostFields = int64_t{1} << 20;

// Of a message's bytes from slice to slice.
class Cursor {
 public:
  explicit Cursor(const std::vector<grpc::Slice>& slices) : slices_(slices) { Settle(); }

  int64_t position() const { return before_ + static_cast<int64_t>(offset_); }
  size_t slice() const { return slice_; }
  size_t offset() const { return offset_; }

  // Appends what it reads to `raw` unless that is null. False: the message ends first, or the varint is too long.
  bool Varint(int most_bytes, uint64_t* value, std::string* raw) {
    *value = 0;
    for (int i = 0; i < most_bytes; ++i) {
      if (slice_ == slices_.size()) return false;
      const uint8_t byte = slices_[slice_].begin()[offset_];
      ++offset_;
      Settle();
      if (raw != nullptr) raw->push_back(static_cast<char>(byte));
      *value |= uint64_t{byte & 0x7fu} << (7 * i);
      if (byte < 0x80) return true;
    }
    return false;
  }

  // The caller knows that so many bytes are left.
  void Bytes(int64_t count, std::string* raw) {
    while (count > 0) {
      const auto here = std::min<int64_t>(count, static_cast<int64_t>(slices_[slice_].size() - offset_));
      if (raw != nullptr) {
        raw->append(reinterpret_cast<const char*>(slices_[slice_].begin()) + offset_, static_cast<size_t>(here));
      }
      offset_ += static_cast<size_t>(here);
      count -= here;
      Settle();
    }
  }

 private:
  // On to the slice that holds the next byte.
  void Settle() {
    while (slice_ < slices_.size() && offset_ == slices_[slice_].size()) {
      before_ += static_cast<int64_t>(offset_);
      offset_ = 0;
      ++slice_;
    }
  }

  const std::vector<grpc::Slice>& slices_;
  size_t slice_ = 0;
  size_t offset_ = 0;
  int64_t before_ = 0;  // bytes of the slices passed
};

bool Fits(const FieldDescriptor& field, int wire_type) {
  const auto own = WireFormatLite::WireTypeForFieldType(static_cast<WireFormatLite::FieldType>(field.type()));
  return wire_type == own || (field.is_packable() && wire_type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

absl::Status Malformed(int64_t position, absl::string_view type, absl::string_view what) {
  return Refuse({Reason::kMalformed, std::string(type), absl::StrCat("byte ", position), "a protobuf message",
                 absl::StrCat("the message is no ", type, ": byte ", position, " ", what)});
}

// A list that holds more than it may.
absl::Status TooMany(const std::string& list, int64_t given, int64_t most) {
  const std::string value = absl::StrCat(given), bound = absl::StrCat("<= ", most);
  if (list == "layers") {
    return Refuse({Reason::kLayerUnknown, list, value, bound,
                   absl::StrCat("the model has ", most, " engram layers, the call names ", given)});
  }
  if (list == "sequences") {
    return Refuse({Reason::kTooManyTokens, list, value, bound,
                   absl::StrCat("a call may have ", most, " tokens, this one has ", given, " sequences")});
  }
  return Refuse({Reason::kMessageBytes, list, value, bound,
                 absl::StrCat("a call may name ", most, " ", list, ", this one names ", given)});
}

}  // namespace

// One walk over the message: what is known is copied to `out`, without the tensors.
class MessageScan {
 public:
  MessageScan(ArrivedMessage& message, const ListLimits& limits, const Descriptor& type)
      : message_(message), limits_(limits), type_(type), cursor_(message.slices_) {}

  absl::StatusOr<std::string> Run() {
    std::string out;
    out.reserve(256);
    if (!Message(type_, message_.bytes_, 0, out)) return fault_;
    for (const List& list : lists_) {
      if (list.elements > list.most) return TooMany(list.field->name(), list.elements, list.most);
    }
    return out;
  }

 private:
  bool Fail(absl::string_view what) {
    fault_ = Malformed(cursor_.position(), type_.name(), what);
    return false;
  }

  bool TooManyFields() {
    fault_ = Refuse({Reason::kMessageBytes, type_.name(), absl::StrCat("> ", kMostFields, " fields"),
                     absl::StrCat("<= ", kMostFields),
                     absl::StrCat("a message may have ", kMostFields, " fields, packed lists counted as one")});
    return false;
  }

  // A length that ends by `end`.
  bool Length(int64_t end, int64_t* length) {
    uint64_t claimed = 0;
    if (!cursor_.Varint(kMostTagBytes, &claimed, nullptr)) return Fail("begins no length");
    const int64_t left = end - cursor_.position();
    if (left < 0 || claimed > static_cast<uint64_t>(left)) return Fail("follows a length beyond its message's end");
    *length = static_cast<int64_t>(claimed);
    return true;
  }

  // The value of a field without a length: fixed or varint.
  bool Scalar(int wire_type, int64_t end, std::string* raw) {
    uint64_t ignored = 0;
    switch (wire_type) {
      case WireFormatLite::WIRETYPE_VARINT:
        if (!cursor_.Varint(kMostVarintBytes, &ignored, raw)) return Fail("ends no varint");
        break;
      case WireFormatLite::WIRETYPE_FIXED64:
      case WireFormatLite::WIRETYPE_FIXED32: {
        const int64_t size = wire_type == WireFormatLite::WIRETYPE_FIXED64 ? 8 : 4;
        if (end - cursor_.position() < size) return Fail("ends a message within a field");
        cursor_.Bytes(size, raw);
        break;
      }
      default:
        return Fail("follows an unknown wire type");
    }
    return cursor_.position() <= end || Fail("lies beyond its message's end");
  }

  bool Skip(uint64_t tag, int64_t end, int depth) {
    const int wire_type = static_cast<int>(tag & 7);
    if (wire_type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      int64_t length = 0;
      if (!Length(end, &length)) return false;
      cursor_.Bytes(length, nullptr);
      return true;
    }
    if (wire_type != WireFormatLite::WIRETYPE_START_GROUP) return Scalar(wire_type, end, nullptr);
    if (depth >= kMostDepth) return Fail("is nested too deeply");
    while (cursor_.position() < end) {
      uint64_t inner = 0;
      if (!Tag(end, &inner)) return false;
      if (++fields_ > kMostFields) return TooManyFields();
      if ((inner & 7) == WireFormatLite::WIRETYPE_END_GROUP) {
        return inner >> 3 == tag >> 3 || Fail("follows the end of another group");
      }
      if (!Skip(inner, end, depth + 1)) return false;
    }
    return Fail("ends a message within a group");
  }

  bool Tag(int64_t end, uint64_t* tag) {
    if (!cursor_.Varint(kMostTagBytes, tag, nullptr) || cursor_.position() > end) return Fail("ends no tag");
    *tag &= 0xffffffffu;  // as protobuf reads it
    return *tag >> 3 != 0 || Fail("follows a tag of no field");
  }

  static void AppendVarint(uint64_t value, std::string& out) {
    for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
    out.push_back(static_cast<char>(value));
  }

  bool Message(const Descriptor& type, int64_t end, int depth, std::string& out) {
    if (depth > kMostDepth) return Fail("is nested too deeply");
    while (cursor_.position() < end) {
      uint64_t tag = 0;
      if (!Tag(end, &tag)) return false;
      if (++fields_ > kMostFields) return TooManyFields();
      const FieldDescriptor* field = type.FindFieldByNumber(static_cast<int>(tag >> 3));
      if (field == nullptr || !Fits(*field, static_cast<int>(tag & 7))) {
        if (!Skip(tag, end, depth)) return false;
        continue;
      }
      if (!Known(*field, tag, end, depth, out)) return false;
    }
    return true;
  }

  bool Known(const FieldDescriptor& field, uint64_t tag, int64_t end, int depth, std::string& out) {
    const int wire_type = static_cast<int>(tag & 7);
    if (wire_type != WireFormatLite::WIRETYPE_LENGTH_DELIMITED) {
      AppendVarint(tag, out);
      return Scalar(wire_type, end, &out);
    }
    int64_t length = 0;
    if (!Length(end, &length)) return false;
    if (field.is_repeated() && !field.is_packable() && !Counts(field)) {
      cursor_.Bytes(length, nullptr);  // refused in the end, whatever it holds
      return true;
    }
    if (&field == highway_) {
      // Of a field that stands twice the last one counts, as ever.
      message_.highways_.back() = {cursor_.slice(), cursor_.offset()};
      message_.highway_bytes_.back() = length;
      cursor_.Bytes(length, nullptr);
      return true;
    }
    AppendVarint(tag, out);
    if (field.message_type() == nullptr) {
      AppendVarint(static_cast<uint64_t>(length), out);
      cursor_.Bytes(length, &out);
      return true;
    }
    return Inner(field, cursor_.position() + length, depth, out);
  }

  // One more element of a list. False: more than it may hold.
  bool Counts(const FieldDescriptor& field) {
    auto list = std::find_if(lists_.begin(), lists_.end(), [&field](const List& one) { return one.field == &field; });
    if (list == lists_.end()) {
      lists_.push_back({&field, 0, field.message_type() == layer_input_ ? limits_.layers : limits_.others});
      list = std::prev(lists_.end());
    }
    return ++list->elements <= list->most;
  }

  bool Inner(const FieldDescriptor& field, int64_t end, int depth, std::string& out) {
    if (field.message_type() == layer_input_) {
      message_.highways_.emplace_back();
      message_.highway_bytes_.push_back(0);
    } else if (field.real_containing_oneof() != nullptr) {
      // Another member of a oneof makes an end of the one before it; the same one again is merged into it.
      if (member_ != nullptr && member_ != &field) {
        message_.highways_.clear();
        message_.highway_bytes_.clear();
      }
      member_ = &field;
    }
    std::string inner;
    if (!Message(*field.message_type(), end, depth + 1, inner)) return false;
    AppendVarint(inner.size(), out);
    out += inner;
    return true;
  }

  struct List {
    const FieldDescriptor* field = nullptr;
    int64_t elements = 0;
    int64_t most = 0;
  };

  ArrivedMessage& message_;
  const ListLimits& limits_;
  const Descriptor& type_;
  const Descriptor* const layer_input_ = v1::LayerInput::descriptor();
  const FieldDescriptor* const highway_ = layer_input_->FindFieldByNumber(v1::LayerInput::kHighwayFieldNumber);
  Cursor cursor_;
  std::vector<List> lists_;
  int64_t fields_ = 0;
  const FieldDescriptor* member_ = nullptr;  // of StreamRequest's oneof, the last one seen
  absl::Status fault_;
};

ArrivedMessage::ArrivedMessage(const grpc::ByteBuffer& buffer) : came_(buffer.Valid()) {
  // An empty message has no slices. Dump takes references, no bytes are copied.
  if (came_ && !buffer.Dump(&slices_).ok()) slices_.clear();
  for (const grpc::Slice& slice : slices_) bytes_ += static_cast<int64_t>(slice.size());
}

absl::Status ArrivedMessage::Parse(const ListLimits& limits, google::protobuf::Message& small) {
  // Generated code takes it for an empty message, which the caller would then be blamed for.
  if (!came_) return absl::CancelledError("the call ended before its message came");
  const absl::StatusOr<std::string> known = MessageScan(*this, limits, *small.GetDescriptor()).Run();
  if (!known.ok()) return known.status();
  // What is left to find is in packed lists: whole elements only.
  if (!small.ParseFromString(*known)) {
    return Malformed(bytes_, small.GetDescriptor()->name(), "ends a list within an element");
  }
  return absl::OkStatus();
}

void ArrivedMessage::CopyHighway(size_t index, uint8_t* to) const {
  auto [slice, offset] = highways_[index];
  for (int64_t left = highway_bytes_[index]; left > 0; ++slice, offset = 0) {
    const auto here = std::min<int64_t>(left, static_cast<int64_t>(slices_[slice].size() - offset));
    std::memcpy(to, slices_[slice].begin() + offset, static_cast<size_t>(here));
    to += here;
    left -= here;
  }
}

}  // namespace engram
