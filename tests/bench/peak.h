// Multiply-adds out of registers, compiled for one instruction set each (peak_avx512bf16.cc, peak_avx2.cc).
#pragma once

#include <cstdint>

namespace engram::kernels {

// Runs `rounds` rounds and returns the floating-point operations in one of them. Needs the instructions.
int64_t PeakAvx512Bf16(int64_t rounds);
int64_t PeakAvx2Fma(int64_t rounds);

}  // namespace engram::kernels
