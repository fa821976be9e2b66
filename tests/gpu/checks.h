// The checks of gpu_test. Each looks at one thing on the device, returns, or throws std::runtime_error that says where
// it differs; Skipped where this device has no room for it.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/scalar.h"
#include "tests/gpu/device.h"

namespace engram::gpu {

struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Check {
  std::string name;
  bool quick;  // small enough for compute-sanitizer
  void (*run)(const Device& device);
};

std::vector<Check> InstructionChecks();  // device.cuh
std::vector<Check> RowChecks();
std::vector<Check> ProjectionChecks();
std::vector<Check> GemmChecks();
std::vector<Check> GateChecks();

inline void Expect(bool holds, const std::string& else_what) {
  if (!holds) throw std::runtime_error(else_what);
}

inline bool IsNan(Bf16 value) { return (value & 0x7FFF) > 0x7F80; }

// The same bits; any NaN for a NaN.
inline void ExpectSame(const std::vector<Bf16>& got, const std::vector<Bf16>& want, const std::string& what) {
  Expect(got.size() == want.size(), what + ": lengths differ");
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i] || (IsNan(got[i]) && IsNan(want[i]))) continue;
    throw std::runtime_error(what + ": value " + std::to_string(i) + " is " + std::to_string(got[i]) + " and not " +
                             std::to_string(want[i]) + " (bf16 bits)");
  }
}

// Row t of kv [tokens, outputs] against the exact sums (docs/numerics.md): within one bf16 ulp, or 2^-8 of the token's
// rms.
inline void ExpectNear(const Bf16* kv, const std::vector<double>& exact, const std::string& what) {
  double squares = 0;
  for (const double sum : exact) squares += sum * sum;
  const double rms = std::sqrt(squares / static_cast<double>(exact.size()));
  for (size_t o = 0; o < exact.size(); ++o) {
    const double bound = std::max(std::fabs(exact[o]) * 0x1p-7, rms * 0x1p-8);
    const double got = kernels::F32FromBf16(kv[o]);
    if (std::fabs(got - exact[o]) <= bound) continue;
    throw std::runtime_error(what + ": output " + std::to_string(o) + " is " + std::to_string(got) + ", exactly " +
                             std::to_string(exact[o]) + ", bound " + std::to_string(bound));
  }
}

}  // namespace engram::gpu
