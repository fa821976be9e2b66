#include "client/cli/tensor_text.h"

#include <cstring>

#include "absl/strings/str_format.h"
#include "client/bf16.h"

namespace engram::client {
namespace {

constexpr int kFirstValues = 4;

}  // namespace

float ValueAt(absl::string_view bytes, HighwayDtype dtype, int64_t index) {
  if (dtype == HighwayDtype::kBf16) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + 2 * index, sizeof(bits));
    return Bf16ToFloat(bits);
  }
  float value = 0;
  std::memcpy(&value, bytes.data() + 4 * index, sizeof(value));
  return value;
}

std::string FirstValues(absl::string_view bytes, HighwayDtype dtype) {
  std::string text;
  for (int64_t i = 0; i < kFirstValues && (i + 1) * BytesOf(dtype) <= static_cast<int64_t>(bytes.size()); ++i) {
    absl::StrAppendFormat(&text, " %.6g", ValueAt(bytes, dtype, i));
  }
  return text;
}

}  // namespace engram::client
