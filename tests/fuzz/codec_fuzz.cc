// libFuzzer: ArrivedMessage against protobuf. Input: a byte that chooses the request, one that chooses the slices, then
// the message.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/transport/wire_messages.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  const std::vector<size_t> slices = {1 + data[1] % 16u, data[1] / 16u, 1u + data[1]};
  std::string found;
  switch (data[0] % 3) {
    case 0:
      found = engram::Disagreement<engram::v1::StreamRequest>(bytes, slices);
      break;
    case 1:
      found = engram::Disagreement<engram::v1::ApplyRequest>(bytes, slices);
      break;
    default:
      found = engram::Disagreement<engram::v1::LookupRequest>(bytes, slices);
  }
  if (!found.empty()) {
    std::fprintf(stderr, "%s\n", found.c_str());
    std::abort();
  }
  return 0;
}
