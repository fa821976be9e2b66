// Writes GGUF: whole small files in memory, headers of large ones, and (for tests) files that break the rules.
//
// Keys and tensors stand in the file in the order they were added. Nothing is checked: a key may be added twice, counts
// and offsets may be overridden with lies. Not for several threads at once.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/model/gguf_types.h"

namespace engram {

template <typename T>
constexpr GgufValueType GgufValueTypeOf() {
  if constexpr (std::is_same_v<T, bool>) return GgufValueType::kBool;
  if constexpr (std::is_same_v<T, float>) return GgufValueType::kF32;
  if constexpr (std::is_same_v<T, double>) return GgufValueType::kF64;
  constexpr bool kSigned = std::is_signed_v<T>;
  if constexpr (sizeof(T) == 1) return kSigned ? GgufValueType::kI8 : GgufValueType::kU8;
  if constexpr (sizeof(T) == 2) return kSigned ? GgufValueType::kI16 : GgufValueType::kU16;
  if constexpr (sizeof(T) == 4) return kSigned ? GgufValueType::kI32 : GgufValueType::kU32;
  return kSigned ? GgufValueType::kI64 : GgufValueType::kU64;
}

class GgufWriter {
 public:
  void set_version(uint32_t version) { version_ = version; }
  // Lays tensors out by `alignment` and adds the key general.alignment.
  void SetAlignment(uint32_t alignment);

  template <typename T>
  void Add(const std::string& key, T value) {
    static_assert(std::is_arithmetic_v<T>);
    AddRaw(key, GgufValueTypeOf<T>(), absl::string_view(reinterpret_cast<const char*>(&value), sizeof value));
  }
  template <typename T>
  void AddArray(const std::string& key, absl::Span<const T> values) {
    AddRawArray(key, GgufValueTypeOf<T>(), values.size(),
                absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)));
  }
  template <typename T>
  void AddArray(const std::string& key, const std::vector<T>& values) {
    AddArray(key, absl::MakeConstSpan(values));
  }
  void AddText(const std::string& key, absl::string_view text);
  void AddTexts(const std::string& key, const std::vector<std::string>& texts);
  // A value by its type and bytes, whatever they are.
  void AddRaw(const std::string& key, GgufValueType type, absl::string_view bytes);
  void AddRawArray(const std::string& key, GgufValueType element, uint64_t count, absl::string_view bytes);
  void RemoveKey(const std::string& key);

  // Declares a tensor. Its size follows from type and shape (0 for a type of unknown size); File() takes its bytes from
  // `data` and fills up with zeros.
  void AddTensor(const std::string& name, const std::vector<uint64_t>& ne, GgufType type, std::string data = "");
  void RemoveTensor(const std::string& name);

  // Lies.
  void OverrideKeyCount(uint64_t count) { key_count_ = count; }
  void OverrideTensorCount(uint64_t count) { tensor_count_ = count; }
  void OverrideOffset(const std::string& name, uint64_t offset) { offsets_[name] = offset; }

  // Everything before the tensors' data, padded to the alignment.
  std::string Header() const;
  // Where a declared tensor's data begins, from the beginning of the file; overrides do not count.
  int64_t DataOffset(const std::string& name) const;
  // Bytes of the whole file; the last tensor is not padded.
  int64_t FileBytes() const;
  // Header and data.
  std::string File() const;

 private:
  struct Key {
    std::string name, bytes;  // bytes: type and value
  };
  struct Tensor {
    std::string name;
    std::vector<uint64_t> ne;
    GgufType type;
    std::string data;
    int64_t bytes;
  };

  // Offsets of the tensors into the data, and the end of the last.
  std::vector<int64_t> Layout() const;

  uint32_t version_ = 3;
  int64_t alignment_ = 32;
  std::vector<Key> keys_;
  std::vector<Tensor> tensors_;
  std::optional<uint64_t> key_count_, tensor_count_;
  std::map<std::string, uint64_t> offsets_;
};

}  // namespace engram
