// The CPU twin at each instruction set that this machine runs, for tests and benchmarks; everybody else wants
// CpuKernels().
#pragma once

#include <span>

#include "kernels/kernels.h"

namespace engram::kernels {

struct CpuTwin {
  const char* instructions;  // CpuLoops::instructions
  const Kernels* kernels;
};

// From the narrowest to the widest; the last one is CpuKernels(). Never empty.
std::span<const CpuTwin> SupportedCpuTwins();

}  // namespace engram::kernels
