// What the kernel tests share: every twin that this machine runs, and random values that are the same on every run.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/kernels.h"

namespace engram::kernels {

struct NamedTwin {
  std::string name;
  const Kernels* kernels;
};

// The reference first, then the CPU twin at each instruction set.
inline std::vector<NamedTwin> AllTwins() {
  std::vector<NamedTwin> twins = {{"reference", &ReferenceKernels()}};
  for (const CpuTwin& twin : SupportedCpuTwins()) twins.push_back({twin.instructions, twin.kernels});
  return twins;
}

using Random = std::mt19937_64;

inline int64_t Below(Random& random, int64_t bound) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(bound));
}

inline float Normal(Random& random) { return std::normal_distribution<float>()(random); }

// Random blocks whose d and dmin are finite f16 of any size, sign and kind.
inline std::vector<uint8_t> RandomQ2K(Random& random, int64_t blocks) {
  std::vector<uint8_t> bytes(static_cast<size_t>(blocks * kQ2KBlockBytes));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (int64_t block = 0; block < blocks; ++block) {
    for (const int64_t at : {81, 83}) {
      uint8_t& high = bytes[static_cast<size_t>(block * kQ2KBlockBytes + at)];
      if ((high & 0x7C) == 0x7C) high = static_cast<uint8_t>(high ^ 0x40);  // exponent 31 is infinity or NaN
    }
  }
  return bytes;
}

}  // namespace engram::kernels
