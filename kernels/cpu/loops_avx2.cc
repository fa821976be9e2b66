#include "kernels/cpu/gate_loop.h"
#include "kernels/cpu/gather_loop.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/project_avx2.h"

namespace engram::kernels {

const CpuLoops& Avx2Loops() {
  static constexpr CpuLoops loops = {"avx2", &GatherRange<RowDecoder<32>>, false, &ProjectPanelAvx2, &GateRange<32>};
  return loops;
}

}  // namespace engram::kernels
