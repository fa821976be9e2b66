// Typed reads of a header's keys, with ranges.
//
// Every error names the file, the key, what it holds and what was expected; a missing key is NotFound.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/model/gguf.h"

namespace engram {

class KeyReader {
 public:
  // `header` must outlive the reader.
  explicit KeyReader(const GgufHeader& header) : header_(header) {}

  // A value of any integer type in [least, most].
  absl::StatusOr<int64_t> Integer(absl::string_view key, int64_t least, int64_t most) const;

  // An array of any integer type, each value in [least, most].
  absl::StatusOr<std::vector<int64_t>> Integers(absl::string_view key, int64_t least, int64_t most) const;

  // An F32 or F64; the caller checks what it is.
  absl::StatusOr<double> Float(absl::string_view key) const;

  absl::StatusOr<std::string> Text(absl::string_view key) const;

  // "FILE: key 'KEY' holds HELD; expected EXPECTED".
  absl::Status Refuse(absl::string_view key, absl::AlphaNum held, absl::string_view expected) const;
  // The same for element `index` of an array.
  absl::Status RefuseElement(absl::string_view key, int64_t index, absl::AlphaNum held,
                             absl::string_view expected) const;

 private:
  absl::StatusOr<const GgufValue*> Get(absl::string_view key) const;
  absl::Status RefuseType(absl::string_view key, const GgufValue& value, absl::string_view expected) const;

  const GgufHeader& header_;
};

}  // namespace engram
