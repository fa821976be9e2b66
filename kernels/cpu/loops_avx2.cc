// Vectors of 32 bytes, 16 registers: one output takes four, so a block of two outputs or tokens takes eight.
#include "kernels/cpu/gate_loop.h"
#include "kernels/cpu/gather_loop.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/project_loop.h"

namespace engram::kernels {

const CpuLoops& Avx2Loops() {
  static constexpr CpuLoops loops = {"avx2", &GatherRange<32>, &ProjectRange<32, 2, 1, 2>, &GateRange<32>};
  return loops;
}

}  // namespace engram::kernels
