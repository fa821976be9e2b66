// What a tensor holds, in a few words: its rms and its first values.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "client/model_info.h"

namespace engram::client {

// Of raw little-endian values.
float ValueAt(absl::string_view bytes, HighwayDtype dtype, int64_t index);

// " 0.5 1.25 ...": the first few; none of an empty tensor.
std::string FirstValues(absl::string_view bytes, HighwayDtype dtype);

// Root mean square of what `value` gives for [0, count).
template <typename Value>
double Rms(int64_t count, Value value) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += value(i) * value(i);
  return count == 0 ? 0 : std::sqrt(sum / static_cast<double>(count));
}

}  // namespace engram::client
