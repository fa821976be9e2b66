// The CPU twin at each instruction set that this machine runs.
#pragma once

#include <span>
#include <string_view>

#include "kernels/kernels.h"

namespace engram::kernels {

struct CpuTwin {
  const char* instructions;  // CpuLoops::instructions
  const Kernels* kernels;
};

// From the narrowest to the widest; the last one is CpuKernels(). Never empty.
std::span<const CpuTwin> SupportedCpuTwins();

// By CpuTwin::instructions; "best": the widest. Null where this machine does not run it.
const CpuTwin* FindCpuTwin(std::string_view instructions);

}  // namespace engram::kernels
