#include "server/model/gguf.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/model/byte_reader.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
// The least that a key (length, type, a one-byte value) and a tensor (length, rank, type, offset) occupy.
constexpr uint64_t kLeastKeyBytes = 8 + 4 + 1;
constexpr uint64_t kLeastTensorBytes = 8 + 4 + 4 + 8;
constexpr uint64_t kLongestName = 65535;

// Names the place of an error; "read more" passes through unchanged.
absl::Status At(const std::string& place, const absl::Status& status) {
  if (status.ok() || absl::IsOutOfRange(status)) return status;
  return absl::Status(status.code(), absl::StrCat(place, " ", status.message()));
}

absl::Status Bad(const std::string& place, const std::string& complaint) {
  return absl::InvalidArgumentError(absl::StrCat(place, " ", complaint));
}

template <typename T>
absl::StatusOr<T> Named(const std::string& place, absl::StatusOr<T> value) {
  if (!value.ok()) return At(place, value.status());
  return value;
}

absl::StatusOr<absl::string_view> TakeText(ByteReader& reader) {
  ASSIGN_OR_RETURN(const uint64_t length, reader.TakeLittle<uint64_t>());
  ASSIGN_OR_RETURN(absl::Span<const uint8_t> bytes, reader.Take(length));
  return absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

absl::StatusOr<GgufValue> TakeArray(ByteReader& reader) {
  GgufValue value;
  value.type = GgufValueType::kArray;
  ASSIGN_OR_RETURN(const uint32_t element, reader.TakeLittle<uint32_t>());
  value.element = static_cast<GgufValueType>(element);
  ASSIGN_OR_RETURN(value.count, reader.TakeLittle<uint64_t>());
  if (value.element == GgufValueType::kArray) {
    return absl::InvalidArgumentError("holds an array of arrays; expected an array of scalars or strings");
  }
  if (value.element == GgufValueType::kString) {
    // Each string has at least its length, so the count is known to be possible before the walk begins.
    if (value.count > reader.left_in_file() / sizeof(uint64_t)) {
      return absl::InvalidArgumentError(absl::StrCat("holds an array of ", value.count, " strings; the ",
                                                     reader.left_in_file(),
                                                     " bytes left in the file cannot hold them"));
    }
    for (uint64_t i = 0; i < value.count; ++i) {
      absl::StatusOr<absl::string_view> text = TakeText(reader);
      if (!text.ok()) return At(absl::StrCat("element ", i), text.status());
    }
    return value;
  }
  const int64_t element_bytes = GgufValueBytes(value.element);
  if (element_bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("holds an array of ", GgufValueTypeName(value.element), "; expected a type from 0 to 12"));
  }
  if (value.count > reader.left_in_file() / element_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("holds an array of ", value.count, " ",
                                                   GgufValueTypeName(value.element), "; the ", reader.left_in_file(),
                                                   " bytes left in the file cannot hold them"));
  }
  ASSIGN_OR_RETURN(value.bytes, reader.Take(value.count * element_bytes));
  return value;
}

absl::StatusOr<GgufValue> TakeValue(ByteReader& reader) {
  GgufValue value;
  ASSIGN_OR_RETURN(const uint32_t type, reader.TakeLittle<uint32_t>());
  value.type = value.element = static_cast<GgufValueType>(type);
  if (value.type == GgufValueType::kArray) return TakeArray(reader);
  if (value.type == GgufValueType::kString) {
    ASSIGN_OR_RETURN(const absl::string_view text, TakeText(reader));
    value.bytes = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size());
    return value;
  }
  const int64_t bytes = GgufValueBytes(value.type);
  if (bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("is of ", GgufValueTypeName(value.type), "; expected a type from 0 to 12"));
  }
  ASSIGN_OR_RETURN(value.bytes, reader.Take(bytes));
  return value;
}

absl::Status TakeKeys(ByteReader& reader, uint64_t count, GgufHeader& header) {
  for (uint64_t i = 0; i < count; ++i) {
    std::string place = absl::StrCat(header.file, ": key number ", i);
    ASSIGN_OR_RETURN(const absl::string_view name, Named(place, TakeText(reader)));
    if (name.empty() || name.size() > kLongestName) {
      return Bad(place, absl::StrCat("has a name of ", name.size(), " bytes; expected 1 to ", kLongestName));
    }
    place = absl::StrCat(header.file, ": key ", GgufQuote(name));
    ASSIGN_OR_RETURN(const GgufValue value, Named(place, TakeValue(reader)));
    if (!header.keys.emplace(name, value).second) return Bad(place, "stands twice; expected once");
  }
  return absl::OkStatus();
}

// Bytes of a tensor, all of it checked; 0 for a type whose blocks are not known.
absl::StatusOr<int64_t> TensorBytes(const GgufTensor& tensor) {
  const GgufTypeTraits* traits = GgufTypeTraitsOf(tensor.type);
  int64_t values = 1;
  for (int64_t ne : tensor.ne) {
    if (__builtin_mul_overflow(values, ne, &values)) {
      return absl::InvalidArgumentError(
          absl::StrCat("has shape ", GgufShape(tensor), "; expected fewer than 2^63 values"));
    }
  }
  if (traits == nullptr) return 0;
  if (tensor.ne[0] % traits->block_values != 0) {
    return absl::InvalidArgumentError(absl::StrCat("has shape ", GgufShape(tensor), "; expected rows of a multiple of ",
                                                   traits->block_values, " values, as ", traits->name, " has"));
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(values / traits->block_values, traits->block_bytes, &bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("has shape ", GgufShape(tensor), "; expected fewer than 2^63 bytes"));
  }
  return bytes;
}

absl::StatusOr<GgufTensor> TakeTensor(ByteReader& reader, std::string name) {
  GgufTensor tensor;
  tensor.name = std::move(name);
  ASSIGN_OR_RETURN(const uint32_t dimensions, reader.TakeLittle<uint32_t>());
  if (dimensions > tensor.ne.size()) {
    return absl::InvalidArgumentError(absl::StrCat("has ", dimensions, " dimensions; expected at most 4"));
  }
  tensor.dimensions = static_cast<int>(dimensions);
  for (uint32_t i = 0; i < dimensions; ++i) {
    ASSIGN_OR_RETURN(const uint64_t ne, reader.TakeLittle<uint64_t>());
    if (ne > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return absl::InvalidArgumentError(absl::StrCat("holds ", ne, " as dimension ", i, "; expected less than 2^63"));
    }
    tensor.ne[i] = static_cast<int64_t>(ne);
  }
  ASSIGN_OR_RETURN(const uint32_t type, reader.TakeLittle<uint32_t>());
  tensor.type = static_cast<GgufType>(type);
  ASSIGN_OR_RETURN(const uint64_t offset, reader.TakeLittle<uint64_t>());
  // Inside the file at least; the exact check follows when it is known where the data begins.
  if (offset > reader.left_in_file()) {
    return absl::InvalidArgumentError(
        absl::StrCat("begins ", offset, " bytes into the data; the file has ", reader.left_in_file(), " bytes left"));
  }
  tensor.offset = static_cast<int64_t>(offset);
  ASSIGN_OR_RETURN(tensor.bytes, TensorBytes(tensor));
  return tensor;
}

absl::Status TakeTensors(ByteReader& reader, uint64_t count, GgufHeader& header) {
  for (uint64_t i = 0; i < count; ++i) {
    std::string place = absl::StrCat(header.file, ": tensor number ", i);
    ASSIGN_OR_RETURN(const absl::string_view name, Named(place, TakeText(reader)));
    if (name.empty() || name.size() > kLongestName) {
      return Bad(place, absl::StrCat("has a name of ", name.size(), " bytes; expected 1 to ", kLongestName));
    }
    place = absl::StrCat(header.file, ": tensor ", GgufQuote(name));
    ASSIGN_OR_RETURN(GgufTensor tensor, Named(place, TakeTensor(reader, std::string(name))));
    if (!header.tensor_index.emplace(tensor.name, header.tensors.size()).second) {
      return Bad(place, "stands twice; expected once");
    }
    header.tensors.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

absl::Status ReadAlignment(GgufHeader& header) {
  const GgufValue* value = header.Find("general.alignment");
  if (value == nullptr) return absl::OkStatus();
  uint64_t alignment = 0;
  if (value->type == GgufValueType::kU32) {
    alignment = LoadLittle<uint32_t>(value->bytes.data());
  } else if (value->type == GgufValueType::kU64) {
    alignment = LoadLittle<uint64_t>(value->bytes.data());
  } else {
    return Bad(absl::StrCat(header.file, ": key 'general.alignment'"),
               absl::StrCat("is of type ", GgufValueKind(*value), "; expected U32"));
  }
  if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > static_cast<uint64_t>(kGgufMaxAlignment)) {
    return Bad(absl::StrCat(header.file, ": key 'general.alignment'"),
               absl::StrCat("holds ", alignment, "; expected a power of two up to ", kGgufMaxAlignment));
  }
  header.alignment = static_cast<int64_t>(alignment);
  return absl::OkStatus();
}

// ggml's own writer lays tensors out by its default of 32 even where it was told to write another general.alignment.
// Such a file gives itself away: some offset is no multiple of the alignment it claims.
void FallBackToDefaultAlignment(GgufHeader& header) {
  if (header.alignment <= kGgufDefaultAlignment) return;
  for (const GgufTensor& tensor : header.tensors) {
    if (tensor.offset % header.alignment == 0) continue;
    header.alignment = kGgufDefaultAlignment;
    return;
  }
}

// Turns data-relative offsets into offsets from the beginning of the file and checks every extent.
absl::Status PlaceTensors(int64_t header_bytes, GgufHeader& header) {
  FallBackToDefaultAlignment(header);
  // Both are far below 2^62: a header is at most a file, an alignment at most 2^30.
  header.data_offset = (header_bytes + header.alignment - 1) / header.alignment * header.alignment;
  for (GgufTensor& tensor : header.tensors) {
    const std::string place = absl::StrCat(header.file, ": tensor ", GgufQuote(tensor.name));
    if (tensor.offset % header.alignment != 0) {
      return Bad(place, absl::StrCat("begins ", tensor.offset, " bytes into the data; expected a multiple of ",
                                     header.alignment));
    }
    tensor.offset += header.data_offset;
    if (tensor.offset > header.file_size || tensor.bytes > header.file_size - tensor.offset) {
      return Bad(place, absl::StrCat("has ", tensor.bytes, " bytes at byte ", tensor.offset, "; the file ends at byte ",
                                     header.file_size));
    }
  }
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& tensor : header.tensors) {
    if (tensor.bytes > 0) order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const GgufTensor* a, const GgufTensor* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    const int64_t end = order[i - 1]->offset + order[i - 1]->bytes;
    if (order[i]->offset < end) {
      return Bad(absl::StrCat(header.file, ": tensor ", GgufQuote(order[i]->name)),
                 absl::StrCat("begins at byte ", order[i]->offset, ", inside tensor ", GgufQuote(order[i - 1]->name),
                              "; expected byte ", end, " or later"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCount(const GgufHeader& header, const char* what, uint64_t count, uint64_t most, uint64_t least_bytes,
                        uint64_t left) {
  if (count <= most && count <= left / least_bytes) return absl::OkStatus();
  return Bad(absl::StrCat(header.file, ":"),
             absl::StrCat("counts ", count, " ", what, "; expected at most ", std::min(most, left / least_bytes),
                          " in the ", left, " bytes that follow"));
}

}  // namespace

std::string GgufValueKind(const GgufValue& value) {
  if (value.type != GgufValueType::kArray) return GgufValueTypeName(value.type);
  return absl::StrCat("array of ", value.count, " ", GgufValueTypeName(value.element));
}

std::string GgufShape(const GgufTensor& tensor) {
  const int shown = std::max(tensor.dimensions, 1);
  return absl::StrCat("[", absl::StrJoin(absl::MakeConstSpan(tensor.ne).subspan(0, shown), ", "), "]");
}

const GgufValue* GgufHeader::Find(absl::string_view key) const {
  auto found = keys.find(key);
  return found == keys.end() ? nullptr : &found->second;
}

const GgufTensor* GgufHeader::FindTensor(absl::string_view name) const {
  auto found = tensor_index.find(name);
  return found == tensor_index.end() ? nullptr : &tensors[found->second];
}

absl::StatusOr<GgufHeader> ParseGgufHeader(const std::string& file, absl::Span<const uint8_t> bytes,
                                           int64_t file_size) {
  GgufHeader header;
  header.file = file;
  header.file_size = file_size;
  const std::string place = absl::StrCat(file, ":");
  if (file_size == 0) return Bad(place, "is empty; expected a GGUF file");
  ByteReader reader(bytes, file_size);

  ASSIGN_OR_RETURN(const uint32_t magic, Named(absl::StrCat(place, " the magic"), reader.TakeLittle<uint32_t>()));
  if (magic != kMagic) {
    return Bad(place,
               absl::StrCat("begins with ",
                            GgufQuote(absl::string_view(reinterpret_cast<const char*>(bytes.data()), sizeof magic)),
                            "; expected 'GGUF'"));
  }
  ASSIGN_OR_RETURN(header.version, Named(absl::StrCat(place, " the version"), reader.TakeLittle<uint32_t>()));
  if (header.version != 2 && header.version != 3) {
    const bool swapped = header.version == 0x02000000 || header.version == 0x03000000;
    return Bad(place, swapped ? std::string("is a big-endian GGUF; expected little endian")
                              : absl::StrCat("is GGUF version ", header.version, "; expected 2 or 3"));
  }
  ASSIGN_OR_RETURN(const uint64_t tensors,
                   Named(absl::StrCat(place, " the tensor count"), reader.TakeLittle<uint64_t>()));
  ASSIGN_OR_RETURN(const uint64_t keys, Named(absl::StrCat(place, " the key count"), reader.TakeLittle<uint64_t>()));
  RETURN_IF_ERROR(CheckCount(header, "keys", keys, kGgufMaxKeys, kLeastKeyBytes, reader.left_in_file()));
  RETURN_IF_ERROR(CheckCount(header, "tensors", tensors, kGgufMaxTensors, kLeastTensorBytes, reader.left_in_file()));
  RETURN_IF_ERROR(TakeKeys(reader, keys, header));
  RETURN_IF_ERROR(ReadAlignment(header));
  RETURN_IF_ERROR(TakeTensors(reader, tensors, header));
  RETURN_IF_ERROR(PlaceTensors(static_cast<int64_t>(reader.position()), header));
  return header;
}

}  // namespace engram
