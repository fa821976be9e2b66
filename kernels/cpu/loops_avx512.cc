// Vectors of 64 bytes, 32 registers: one output takes two. Two rows by four tokens take 16, their inputs 10; for a
// single token four rows take 8 and keep four streams of memory going.
#include "kernels/cpu/gate_loop.h"
#include "kernels/cpu/gather_loop.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/project_loop.h"

namespace engram::kernels {

const CpuLoops& Avx512Loops() {
  static constexpr CpuLoops loops = {"avx512", &GatherRange<64>, &ProjectRange<64, 4, 2, 4>, &GateRange<64>};
  return loops;
}

}  // namespace engram::kernels
