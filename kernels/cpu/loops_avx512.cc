#include "kernels/cpu/gate_avx512.h"
#include "kernels/cpu/gather_avx512.h"
#include "kernels/cpu/isa_avx512.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/project_avx512.h"

namespace engram::kernels {

const CpuLoops& Avx512Loops() {
  static constexpr CpuLoops loops = {"avx512", &GatherRange<RowDecoderAvx512<Avx512Fma>>, true,
                                     &ProjectPanel<Avx512Fma>, &GateRange<64, GateTermsAvx512>};
  return loops;
}

}  // namespace engram::kernels
