// Types of tensors and of key values in a GGUF, by the numbers that ggml gives them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace engram {

// Element types of tensors. A file may hold numbers that are not listed: their size is unknown (GgufTypeTraitsOf).
enum class GgufType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ8_1 = 9,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kQ8_K = 15,
  kIQ2_XXS = 16,
  kIQ2_XS = 17,
  kIQ3_XXS = 18,
  kIQ1_S = 19,
  kIQ4_NL = 20,
  kIQ3_S = 21,
  kIQ2_S = 22,
  kIQ4_XS = 23,
  kI8 = 24,
  kI16 = 25,
  kI32 = 26,
  kI64 = 27,
  kF64 = 28,
  kIQ1_M = 29,
  kBF16 = 30,
  kTQ1_0 = 34,
  kTQ2_0 = 35,
  kMXFP4 = 39,
};

struct GgufTypeTraits {
  const char* name = nullptr;
  int64_t block_values = 0;  // a tensor's ne[0] is a multiple of it
  int64_t block_bytes = 0;
};

// Null for a number that is not in GgufType.
const GgufTypeTraits* GgufTypeTraitsOf(GgufType type);

// "Q2_K", or "type 77" where the number is not known.
std::string GgufTypeName(GgufType type);

// Types of key values.
enum class GgufValueType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// Bytes of one value; 0 for strings, arrays and numbers that are not in GgufValueType.
int64_t GgufValueBytes(GgufValueType type);

// "U32", "STRING", or "type 77" where the number is not known.
std::string GgufValueTypeName(GgufValueType type);

// A name or text out of a file, fit for a one-line message: quoted, control bytes escaped, cut when long.
std::string GgufQuote(absl::string_view text);

}  // namespace engram
