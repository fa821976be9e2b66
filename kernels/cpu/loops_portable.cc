// Vectors of 16 bytes: SSE2 on x86-64, NEON on aarch64.
#include "kernels/cpu/gate_loop.h"
#include "kernels/cpu/gather_loop.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/project_portable.h"

namespace engram::kernels {

const CpuLoops& PortableLoops() {
  static constexpr CpuLoops loops = {"portable", &GatherRange<RowDecoder<16>>, false, &ProjectPanelPortable,
                                     &GateRange<16>};
  return loops;
}

}  // namespace engram::kernels
