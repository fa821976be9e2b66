#include "kernels/cpu/gate_avx512.h"
#include "kernels/cpu/gather_avx512.h"
#include "kernels/cpu/isa_avx512.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/project_avx512.h"

namespace engram::kernels {

const CpuLoops& Avx512Bf16Loops() {
  static constexpr CpuLoops loops = {"avx512_bf16", &GatherRange<RowDecoderAvx512<Avx512Bf16>>, true,
                                     &ProjectPanel<Avx512Bf16>, &GateRange<64, GateTermsAvx512>};
  return loops;
}

}  // namespace engram::kernels
