#include "kernels/cpu/cpu_kernels.h"

#include <algorithm>
#include <cstddef>

#include "kernels/cpu/loops.h"

namespace engram::kernels {
namespace {

// Grains: enough work that a claim (one atomic add, below 0.1 µs when contended) is lost in it, little enough that the
// last range does not keep one thread busy while the others sleep.
constexpr int64_t kHashGrain = 32;     // tokens of 48 divisions each, about 0.2 us: 6 us
constexpr int64_t kGatherGrain = 96;   // rows, four tokens of 24 columns: 7 us, and six times the prefetch distance
constexpr int64_t kProjectGrain = 32;  // outputs: 32 rows of 12 KiB are 384 KiB, 10 us at 40 GB/s a thread
constexpr int64_t kGateGrain = 1;      // tokens of 4 x 5120 values: 5 to 10 us

// Row ids of one token: `current` points at its own compressed id, the ids before it stand below.
void HashToken(const HashTables& tables, const int32_t* current, int64_t* ids) {
  const int n = tables.max_ngram;
  uint64_t gram[kMaxNgram];
  bool blocked = false;
  for (int j = 0; j < n; ++j) {
    blocked = blocked || current[-j] == kDead;
    gram[j] = static_cast<uint64_t>(static_cast<int64_t>(blocked ? tables.pad_id : current[-j]));
  }
  const int columns = tables.columns();
  for (int64_t layer = 0; layer < tables.layers; ++layer) {
    const int64_t* multipliers = tables.multipliers + layer * n;
    const int64_t* primes = tables.primes + layer * columns;
    const int64_t* offsets = tables.offsets + layer * columns;
    uint64_t roll = gram[0] * static_cast<uint64_t>(multipliers[0]);
    for (int g = 1; g < n; ++g) {
      roll ^= gram[g] * static_cast<uint64_t>(multipliers[g]);
      const auto value = static_cast<int64_t>(roll);
      for (int head = 0; head < tables.heads; ++head, ++ids, ++primes, ++offsets) {
        const int64_t remainder = value % *primes;
        *ids = (remainder < 0 ? remainder + *primes : remainder) + *offsets;
      }
    }
  }
}

void HashWindow(const HashTables& tables, const int32_t* window, int64_t tokens, int64_t* ids, Workers& workers) {
  const int64_t per_token = static_cast<int64_t>(tables.layers) * tables.columns();
  workers.ForEachRange(tokens, kHashGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) HashToken(tables, window + t + tables.max_ngram - 1, ids + t * per_token);
  });
}

using LoopsFn = const CpuLoops&();

template <LoopsFn* kLoops>
void GatherRows(const TableView& table, const int64_t* ids, int64_t id_stride, int64_t tokens, int columns, Bf16* out,
                Workers& workers) {
  const GatherCall call = {table, ids, id_stride, columns, out};
  workers.ForEachRange(tokens * columns, kGatherGrain,
                       [&](int64_t begin, int64_t end) { kLoops().gather(call, begin, end); });
}

template <LoopsFn* kLoops>
void Project(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, Workers& workers) {
  if (tokens == 0) return;
  workers.ForEachRange(weights.outputs, kProjectGrain,
                       [&](int64_t begin, int64_t end) { kLoops().project(weights, x, tokens, kv, begin, end); });
}

template <LoopsFn* kLoops>
void ApplyGate(const GateWeights& weights, const GateCall& call, Workers& workers) {
  workers.ForEachRange(call.tokens, kGateGrain,
                       [&](int64_t begin, int64_t end) { kLoops().gate(weights, call, begin, end); });
}

// "k32": kv is summed in 32 lanes over k (projection_order.h); "g8": a gate's sums in 8 over dim (gate_loop.h). The
// instruction set is not part of the name, because it does not change a bit.
template <LoopsFn* kLoops>
const Kernels& KernelsOf() {
  static constexpr Kernels kernels = {"k32-g8", &HashWindow, &GatherRows<kLoops>, &Project<kLoops>, &ApplyGate<kLoops>};
  return kernels;
}

template <LoopsFn* kLoops>
CpuTwin TwinOf() {
  return {kLoops().instructions, &KernelsOf<kLoops>()};
}

}  // namespace

std::span<const CpuTwin> SupportedCpuTwins() {
#ifdef ENGRAM_CPU_X86
  static const CpuTwin twins[] = {TwinOf<&BaselineLoops>(), TwinOf<&Avx2Loops>(), TwinOf<&Avx512Loops>()};
  static const size_t supported = [] {
    if (!__builtin_cpu_supports("avx2")) return size_t{1};
    // The four that loops_avx512.cc is compiled for.
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return size_t{avx512 ? 3u : 2u};
  }();
  return std::span(twins).first(supported);
#else
  static const CpuTwin twins[] = {TwinOf<&BaselineLoops>()};
  return twins;
#endif
}

const Kernels& CpuKernels() { return *SupportedCpuTwins().back().kernels; }

}  // namespace engram::kernels
