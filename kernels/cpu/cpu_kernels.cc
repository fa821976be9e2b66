#include "kernels/cpu/cpu_kernels.h"

#include <algorithm>
#include <cstddef>

#include "kernels/cpu/loops.h"
#include "kernels/cpu/projection_pack.h"
#include "kernels/scalar.h"

namespace engram::kernels {
namespace {

// Grains: enough work that a claim (one atomic add, below 0.1 µs when contended) is lost in it, and that waking a
// sleeping thread (some 10 µs, more on a busy machine) pays: what fits one range runs on the calling thread alone.
// Little enough that the last range does not keep one thread busy while the others sleep.
constexpr int64_t kHashGrain = 512;    // tokens of 48 moduli each, about 60 ns: 30 us
constexpr int64_t kGatherGrain = 384;  // rows, 16 tokens of 24 columns, 20 to 100 ns each: 8 to 40 us
constexpr int64_t kProjectGrain = 1;   // panels of 128 outputs: 258 KB of Q2_K, 10 us for one token
constexpr int64_t kGateGrain = 8;      // tokens of 4 x 5120 values, 5 us each

// value mod prime, 0 <= value.
ENGRAM_ALWAYS_INLINE int64_t ModuloOf(uint64_t value, uint64_t prime, uint64_t reciprocal) {
  const auto quotient = static_cast<uint64_t>((static_cast<unsigned __int128>(value) * reciprocal) >> 64);
  const uint64_t remainder = value - quotient * prime;
  return static_cast<int64_t>(remainder >= prime ? remainder - prime : remainder);
}

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
    const uint64_t* reciprocals = tables.reciprocals + layer * columns;
    uint64_t roll = gram[0] * static_cast<uint64_t>(multipliers[0]);
    for (int g = 1; g < n; ++g, ids += tables.heads) {
      roll ^= gram[g] * static_cast<uint64_t>(multipliers[g]);
      const int first = (g - 1) * tables.heads;
      if (roll >> 63 != 0) {  // a product has wrapped, which no valid table does; the modulus is euclidean all the same
        for (int head = 0; head < tables.heads; ++head) {
          const int64_t prime = primes[first + head];
          const int64_t remainder = static_cast<int64_t>(roll) % prime;
          ids[head] = (remainder < 0 ? remainder + prime : remainder) + offsets[first + head];
        }
        continue;
      }
      for (int head = 0; head < tables.heads; ++head) {
        const int at = first + head;
        ids[head] = ModuloOf(roll, static_cast<uint64_t>(primes[at]), reciprocals[at]) + offsets[at];
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
bool PacksQ2K(const ProjectionWeights& weights) {
  return weights.q2k != nullptr && kLoops().reads_q2k;
}

template <LoopsFn* kLoops>
int64_t PackedBytes(const ProjectionWeights& weights) {
  return PanelsOf(weights) * PackedPanelBytes(weights.inputs, PacksQ2K<kLoops>(weights));
}

template <LoopsFn* kLoops>
void Pack(const ProjectionWeights& weights, uint8_t* packed, Workers& workers) {
  if (PacksQ2K<kLoops>(weights)) {
    PackQ2K(weights, packed, workers);
  } else {
    PackBf16(weights, packed, workers);
  }
}

template <LoopsFn* kLoops>
void Project(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, Bf16* scratch,
             Workers& workers) {
  if (tokens == 0) return;
  PanelCall call = {.packed = weights.packed,
                    .q2k = PacksQ2K<kLoops>(weights),
                    .outputs = weights.outputs,
                    .inputs = weights.inputs,
                    .tiles = {tokens},
                    .x = x,
                    .kv = kv};
  if (tokens > 1) {
    PackTokens(x, call.tiles, weights.inputs, scratch, workers);
    call.x = scratch;
  }
  workers.ForEachRange(PanelsOf(weights), kProjectGrain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) kLoops().project(call, panel);
  });
}

template <LoopsFn* kLoops>
void ApplyGate(const GateWeights& weights, const GateCall& call, Workers& workers) {
  workers.ForEachRange(call.tokens, kGateGrain,
                       [&](int64_t begin, int64_t end) { kLoops().gate(weights, call, begin, end); });
}

// "n16": outputs in the lanes, k in sequence (projection_order.h); "g8": a gate's sums in 8 lanes over dim
// (gate_loop.h). The instruction set is not part of the name, because it does not change a bit.
template <LoopsFn* kLoops>
const Kernels& KernelsOf() {
  static constexpr Kernels kernels = {"n16-g8",      &HashWindow,      &GatherRows<kLoops>, &PackedBytes<kLoops>,
                                      &Pack<kLoops>, &Project<kLoops>, &ApplyGate<kLoops>};
  return kernels;
}

template <LoopsFn* kLoops>
CpuTwin TwinOf() {
  return {kLoops().instructions, &KernelsOf<kLoops>()};
}

}  // namespace

std::span<const CpuTwin> SupportedCpuTwins() {
#ifdef ENGRAM_CPU_X86
  static const CpuTwin twins[] = {TwinOf<&PortableLoops>(), TwinOf<&Avx2Loops>(), TwinOf<&Avx512Loops>(),
                                  TwinOf<&Avx512Bf16Loops>()};
  // Each asks for what its file is compiled for (kernels/CMakeLists.txt).
  static const size_t supported = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return size_t{1};
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512) return size_t{2};
    return size_t{__builtin_cpu_supports("avx512bf16") ? 4u : 3u};
  }();
  return std::span(twins).first(supported);
#else
  static const CpuTwin twins[] = {TwinOf<&PortableLoops>()};
  return twins;
#endif
}

const CpuTwin* FindCpuTwin(std::string_view instructions) {
  const std::span<const CpuTwin> twins = SupportedCpuTwins();
  if (instructions == "best") return &twins.back();
  for (const CpuTwin& twin : twins) {
    if (instructions == twin.instructions) return &twin;
  }
  return nullptr;
}

const Kernels& CpuKernels() { return *SupportedCpuTwins().back().kernels; }

}  // namespace engram::kernels
