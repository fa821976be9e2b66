// The inner loops of the CPU twin, compiled once per instruction set and chosen at run time.
//
// All sets give the same bits: the order of every sum is fixed by lanes whose number does not depend on the vector
// width, and nothing is fused (-ffp-contract=off). A set is a table of plain functions over a range of the work;
// threads are the business of cpu_kernels.cc.
//
// Each set is one file, loops_<set>.cc, with its own compiler flags. Such a file, and every header it includes, may
// only define functions of internal linkage or always-inlined ones: an inline function shared with the rest of the
// program could reach machines that lack the instructions. The flags stand in kernels/CMakeLists.txt, next to
// ENGRAM_CPU_X86.
#pragma once

#include <cstdint>

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
  const char* instructions;  // "baseline", "avx2", "avx512"

  // Rows [begin, end) of the call, counted token by token and column by column.
  void (*gather)(const GatherCall& call, int64_t begin, int64_t end);

  // Outputs [begin, end) of all tokens.
  void (*project)(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, int64_t begin,
                  int64_t end);

  // Tokens [begin, end).
  void (*gate)(const GateWeights& weights, const GateCall& call, int64_t begin, int64_t end);
};

const CpuLoops& BaselineLoops();
#ifdef ENGRAM_CPU_X86
const CpuLoops& Avx2Loops();
const CpuLoops& Avx512Loops();
#endif

}  // namespace engram::kernels
