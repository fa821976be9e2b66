#include "server/model/gguf_keys.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "server/model/byte_reader.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

bool IsInteger(GgufValueType type) {
  return type != GgufValueType::kF32 && type != GgufValueType::kF64 && type != GgufValueType::kBool &&
         GgufValueBytes(type) > 0;
}

// An integer of any of the eight types, which together need 65 bits: negative ones and those above INT64_MAX.
struct WideInteger {
  int64_t value = 0;
  bool above_int64 = false;
  uint64_t bits = 0;

  std::string Text() const { return above_int64 ? absl::StrCat(bits) : absl::StrCat(value); }
};

WideInteger LoadInteger(GgufValueType type, const uint8_t* bytes) {
  switch (type) {
    case GgufValueType::kU8:
      return {bytes[0]};
    case GgufValueType::kI8:
      return {LoadLittle<int8_t>(bytes)};
    case GgufValueType::kU16:
      return {LoadLittle<uint16_t>(bytes)};
    case GgufValueType::kI16:
      return {LoadLittle<int16_t>(bytes)};
    case GgufValueType::kU32:
      return {LoadLittle<uint32_t>(bytes)};
    case GgufValueType::kI32:
      return {LoadLittle<int32_t>(bytes)};
    case GgufValueType::kI64:
      return {LoadLittle<int64_t>(bytes)};
    default: {
      const uint64_t bits = LoadLittle<uint64_t>(bytes);
      if (bits > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return {0, true, bits};
      return {static_cast<int64_t>(bits)};
    }
  }
}

std::string Range(int64_t least, int64_t most) {
  if (least == most) return absl::StrCat(least);
  if (most == std::numeric_limits<int64_t>::max()) return absl::StrCat("an integer from ", least, " to 2^63 - 1");
  return absl::StrCat("an integer from ", least, " to ", most);
}

}  // namespace

absl::Status KeyReader::Refuse(absl::string_view key, absl::AlphaNum held, absl::string_view expected) const {
  return absl::InvalidArgumentError(
      absl::StrCat(header_.file, ": key ", GgufQuote(key), " holds ", held, "; expected ", expected));
}

absl::Status KeyReader::RefuseElement(absl::string_view key, int64_t index, absl::AlphaNum held,
                                      absl::string_view expected) const {
  return absl::InvalidArgumentError(absl::StrCat(header_.file, ": key ", GgufQuote(key), " holds ", held,
                                                 " as element ", index, "; expected ", expected));
}

absl::StatusOr<const GgufValue*> KeyReader::Get(absl::string_view key) const {
  const GgufValue* value = header_.Find(key);
  if (value == nullptr) return absl::NotFoundError(absl::StrCat(header_.file, ": key ", GgufQuote(key), " is missing"));
  return value;
}

absl::Status KeyReader::RefuseType(absl::string_view key, const GgufValue& value, absl::string_view expected) const {
  return absl::InvalidArgumentError(absl::StrCat(header_.file, ": key ", GgufQuote(key), " is of type ",
                                                 GgufValueKind(value), "; expected ", expected));
}

absl::StatusOr<int64_t> KeyReader::Integer(absl::string_view key, int64_t least, int64_t most) const {
  ASSIGN_OR_RETURN(const GgufValue* value, Get(key));
  if (!IsInteger(value->type)) return RefuseType(key, *value, "an integer");
  const WideInteger integer = LoadInteger(value->type, value->bytes.data());
  if (integer.above_int64 || integer.value < least || integer.value > most) {
    return Refuse(key, integer.Text(), Range(least, most));
  }
  return integer.value;
}

absl::StatusOr<std::vector<int64_t>> KeyReader::Integers(absl::string_view key, int64_t least, int64_t most) const {
  ASSIGN_OR_RETURN(const GgufValue* value, Get(key));
  if (value->type != GgufValueType::kArray || !IsInteger(value->element)) {
    return RefuseType(key, *value, "an array of integers");
  }
  const int64_t bytes = GgufValueBytes(value->element);
  std::vector<int64_t> integers(value->count);
  for (uint64_t i = 0; i < value->count; ++i) {
    const WideInteger integer = LoadInteger(value->element, value->bytes.data() + i * bytes);
    if (integer.above_int64 || integer.value < least || integer.value > most) {
      return RefuseElement(key, static_cast<int64_t>(i), integer.Text(), Range(least, most));
    }
    integers[i] = integer.value;
  }
  return integers;
}

absl::StatusOr<double> KeyReader::Float(absl::string_view key) const {
  ASSIGN_OR_RETURN(const GgufValue* value, Get(key));
  if (value->type == GgufValueType::kF32) return LoadLittle<float>(value->bytes.data());
  if (value->type == GgufValueType::kF64) return LoadLittle<double>(value->bytes.data());
  return RefuseType(key, *value, "F32");
}

absl::StatusOr<std::string> KeyReader::Text(absl::string_view key) const {
  ASSIGN_OR_RETURN(const GgufValue* value, Get(key));
  if (value->type != GgufValueType::kString) return RefuseType(key, *value, "STRING");
  return std::string(reinterpret_cast<const char*>(value->bytes.data()), value->bytes.size());
}

}  // namespace engram
