// Loops that do nothing but multiply and add out of registers, or read; compiled for one instruction set each
// (peak_avx512bf16.cc, peak_avx2.cc).
#pragma once

#include <cstdint>

namespace engram::kernels {

// Runs `rounds` rounds and returns the floating-point operations in one of them. Needs the instructions.
int64_t PeakAvx512Bf16(int64_t rounds);
int64_t PeakAvx2Fma(int64_t rounds);

// Reads `lines` cache lines of 64 bytes and returns something that depends on all of them.
uint64_t ReadLinesAvx2(const uint8_t* memory, int64_t lines);

}  // namespace engram::kernels
