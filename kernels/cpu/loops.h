// The inner loops of the CPU twin, compiled once per instruction set and chosen at run time.
//
// All sets give the same bits: the order of every sum is written down (projection_order.h, gate_loop.h) and does not
// depend on the vector width, and nothing is fused that is not written so (-ffp-contract=off). A set is a table of
// plain functions over a range of the work; threads are the business of cpu_kernels.cc.
//
// Each set is one file, loops_<set>.cc, with its own compiler flags. Such a file, and every header it includes, may
// only define functions of internal linkage or always-inlined ones: an inline function shared with the rest of the
// program could reach machines that lack the instructions. The flags stand in kernels/CMakeLists.txt, next to
// ENGRAM_CPU_X86.
#pragma once

#include <cstdint>

#include "kernels/cpu/projection_layout.h"
#include "kernels/kernels.h"

namespace engram::kernels {

// One token's columns and where its row ids and its output begin: the arguments of GatherRowsFn.
struct GatherCall {
  TableView table;
  const int64_t* ids = nullptr;
  int64_t id_stride = 0;
  int64_t columns = 0;
  Bf16* out = nullptr;
};

struct CpuLoops {
  const char* instructions;  // "portable", "avx2", "avx512", "avx512_bf16"

  // Rows [begin, end) of the call, counted token by token and column by column.
  void (*gather)(const GatherCall& call, int64_t begin, int64_t end);

  // Does `project` read panels of Q2_K blocks, or only of bf16?
  bool reads_q2k;

  // The outputs of one panel, all tokens.
  void (*project)(const PanelCall& call, int64_t panel);

  // Tokens [begin, end).
  void (*gate)(const GateWeights& weights, const GateCall& call, int64_t begin, int64_t end);
};

const CpuLoops& PortableLoops();
#ifdef ENGRAM_CPU_X86
const CpuLoops& Avx2Loops();
const CpuLoops& Avx512Loops();
const CpuLoops& Avx512Bf16Loops();
#endif

}  // namespace engram::kernels
