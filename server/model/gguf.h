// The header of one GGUF file (version 2 or 3, little endian): its keys and where its tensors lie.
//
// Parsing is over a span and never touches the tensors' data, so a 350 GB file is described by its first megabytes.
// Nothing that the file says is believed: counts and lengths are compared with the bytes that are left before anything
// is allocated, sums and products are 64-bit and checked, and every tensor of a known type lies wholly inside the file
// and overlaps no other. Errors are one line: file, key or tensor, what it holds, what was expected.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/model/gguf_types.h"

namespace engram {

// A key's value, still as the file's bytes (which GgufHeader does not own).
struct GgufValue {
  GgufValueType type = GgufValueType::kU8;
  GgufValueType element = GgufValueType::kU8;  // of an array; else equal to `type`
  uint64_t count = 1;                          // elements of an array; else 1
  absl::Span<const uint8_t> bytes;  // scalars and arrays of scalars: the values; a string: its text; strings: as stored
};

// "U32", "array of 48 U64": for messages.
std::string GgufValueKind(const GgufValue& value);

struct GgufTensor {
  std::string name;
  std::array<int64_t, 4> ne = {1, 1, 1, 1};  // fastest first
  int dimensions = 0;
  GgufType type = GgufType::kF32;  // may be a number that GgufType does not list: then `bytes` is 0
  int64_t offset = 0;              // from the beginning of the file
  int64_t bytes = 0;
};

// "[256, 6660]".
std::string GgufShape(const GgufTensor& tensor);

struct GgufHeader {
  std::string file;  // as errors name it
  uint32_t version = 0;
  int64_t alignment = 32;   // that the tensors are laid out by
  int64_t data_offset = 0;  // where the tensors' data begins
  int64_t file_size = 0;
  absl::flat_hash_map<std::string, GgufValue> keys;
  std::vector<GgufTensor> tensors;  // in file order
  absl::flat_hash_map<std::string, size_t> tensor_index;

  const GgufValue* Find(absl::string_view key) const;          // null when absent
  const GgufTensor* FindTensor(absl::string_view name) const;  // null when absent
};

// More than any model has, and small enough that a hostile header cannot eat the memory of the machine.
inline constexpr uint64_t kGgufMaxKeys = 1 << 20;
inline constexpr uint64_t kGgufMaxTensors = 1 << 20;
inline constexpr int64_t kGgufMaxHeaderBytes = int64_t{256} << 20;
inline constexpr int64_t kGgufDefaultAlignment = 32;
inline constexpr int64_t kGgufMaxAlignment = int64_t{1} << 30;

// Parses the header of a file of `file_size` bytes that begins with `bytes`; `file` is its name in errors.
//
// OutOfRange: the header goes on behind `bytes`; call again with more of the file. Any other error: the file is bad.
// The values of the returned header point into `bytes`.
absl::StatusOr<GgufHeader> ParseGgufHeader(const std::string& file, absl::Span<const uint8_t> bytes, int64_t file_size);

}  // namespace engram
