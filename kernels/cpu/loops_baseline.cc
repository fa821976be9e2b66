// Vectors of 16 bytes: SSE2 on x86-64, NEON on aarch64. 16 registers hold the 8 of one output and little else, so
// blocks above one output spill; two tokens per row load are still worth it.
#include "kernels/cpu/gate_loop.h"
#include "kernels/cpu/gather_loop.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/project_loop.h"

namespace engram::kernels {

const CpuLoops& BaselineLoops() {
  static constexpr CpuLoops loops = {"baseline", &GatherRange<16>, &ProjectRange<16, 2, 1, 2>, &GateRange<16>};
  return loops;
}

}  // namespace engram::kernels
