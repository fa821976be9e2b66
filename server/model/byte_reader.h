// The one way that bytes from outside are read: every length is checked before anything is touched or allocated.
//
// The reader walks a file whose beginning is in memory. It keeps two ends apart: past the end of the *file* the bytes
// are wrong (InvalidArgument), past the end of what is in *memory* the caller has read too little of a file that may
// still be right (OutOfRange: read more and start again). Positions and lengths are 64-bit and never wrap.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace engram {

// Little-endian load of an integer or IEEE float; `bytes` may have any alignment.
template <typename T>
T LoadLittle(const uint8_t* bytes) {
  static_assert(std::is_arithmetic_v<T>);
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF bytes are used in place");
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

class ByteReader {
 public:
  // `bytes` are the first bytes of a file of `file_size` >= bytes.size() bytes; they must outlive the reader.
  ByteReader(absl::Span<const uint8_t> bytes, uint64_t file_size) : bytes_(bytes), file_size_(file_size) {}

  uint64_t position() const { return position_; }
  uint64_t left_in_file() const { return file_size_ - position_; }

  absl::StatusOr<absl::Span<const uint8_t>> Take(uint64_t length) {
    if (length > left_in_file()) {
      return absl::InvalidArgumentError(
          absl::StrCat("needs ", length, " bytes at byte ", position_, ", the file ends at byte ", file_size_));
    }
    if (length > bytes_.size() - position_) return absl::OutOfRangeError("more of the file is needed");
    absl::Span<const uint8_t> taken = bytes_.subspan(position_, length);
    position_ += length;
    return taken;
  }

  template <typename T>
  absl::StatusOr<T> TakeLittle() {
    absl::StatusOr<absl::Span<const uint8_t>> taken = Take(sizeof(T));
    if (!taken.ok()) return taken.status();
    return LoadLittle<T>(taken->data());
  }

 private:
  absl::Span<const uint8_t> bytes_;
  uint64_t file_size_;
  uint64_t position_ = 0;  // <= bytes_.size() <= file_size_
};

}  // namespace engram
