// The engram step's arithmetic, as plain functions over plain memory (docs/numerics.md).
//
// There is one signature and several twins: ReferenceKernels() is scalar and follows the text of docs/numerics.md line
// by line; CpuKernels() uses all threads of the Workers it is given. Row ids and bf16 rows of all twins are the same
// bits, and so is kv, for every T, batch mix and thread count; gates agree between the reference and the CPU twin
// within the tolerances of docs/numerics.md.
//
// Callers own all memory and have checked every length. Pointers may have any alignment that their element type has,
// except where "unaligned" is written. Nothing here allocates per token, fails, logs, or knows a file or a wire.
#pragma once

#include <cstdint>

#include "kernels/workers.h"

namespace engram::kernels {

// A position whose id takes part in no n-gram: masked, unmapped, or before the sequence's start.
inline constexpr int32_t kDead = -1;

// Values in a table row: one Q2_K block is one row, so key_length is 256 and nothing else.
inline constexpr int64_t kRowValues = 256;
inline constexpr int64_t kQ2KBlockBytes = 84;

// Bounds that model files are checked against, so that kernels may keep per-token state in fixed arrays.
inline constexpr int kMaxNgram = 8;
inline constexpr int kMaxCopies = 8;

// A bf16 value by its bits.
using Bf16 = uint16_t;

// Constants of the n-gram hash of all layers; `columns` = (max_ngram - 1) * heads.
struct HashTables {
  int max_ngram = 0;  // 2..kMaxNgram
  int heads = 0;
  int layers = 0;
  int32_t pad_id = 0;                     // compressed id
  const int64_t* multipliers = nullptr;   // [layers][max_ngram], odd, > 0
  const int64_t* primes = nullptr;        // [layers][columns], >= 2
  const int64_t* offsets = nullptr;       // [layers][columns], the running sum of the layer's primes
  const uint64_t* reciprocals = nullptr;  // [layers][columns], ReciprocalOf each prime

  int columns() const { return (max_ngram - 1) * heads; }
};

// For a division by `prime` without dividing: with r = floor((2^64 - 1) / prime) and 0 <= v < 2^63, the upper half of
// v * r is v / prime or one less, since v * (2^64 / prime - r) / 2^64 < 1/2.
constexpr uint64_t ReciprocalOf(int64_t prime) { return ~uint64_t{0} / static_cast<uint64_t>(prime); }

// A layer's table as the file holds it: Q2_K rows of kQ2KBlockBytes each, back to back.
struct TableView {
  const uint8_t* bytes = nullptr;  // unaligned
  int64_t rows = 0;
};

// wkv [outputs, inputs], row-major; inputs = columns * kRowValues, outputs = dim * (copies + 1). Exactly one of `bf16`
// and `q2k` is there; where it is q2k, a weight is its value rounded to bf16 as a row's is.
struct ProjectionWeights {
  const Bf16* bf16 = nullptr;
  const uint8_t* q2k = nullptr;  // the file's own blocks, [outputs][inputs / 256][84], unaligned
  int64_t outputs = 0;
  int64_t inputs = 0;
  const uint8_t* packed = nullptr;  // the twin's own layout, from Kernels::pack
};

struct GateWeights {
  const float* qk = nullptr;  // [copies, dim]: q_weight * k_weight, rounded to f32
  int copies = 0;             // hc, 1..kMaxCopies
  int64_t dim = 0;
  float eps = 0;
};

enum class HighwayType { kF32, kBf16 };

constexpr int64_t HighwayBytesPerValue(HighwayType type) { return type == HighwayType::kF32 ? 4 : 2; }

// Row ids of the n-gram window that ends at each position.
//
// `window` holds compressed ids, oldest first: the max_ngram - 1 ids before the first position, then one per position.
// Writes ids [tokens][layers][columns], each in [0, rows of that layer).
using HashWindowFn = void(const HashTables& tables, const int32_t* window, int64_t tokens, int64_t* ids,
                          Workers& workers);

// Rows of one layer, decoded and rounded to bf16 (nearest even), columns side by side: out [tokens][columns * 256].
//
// Token t's ids stand at ids + t * id_stride, `columns` of them; -1 gives a row of zeros.
using GatherRowsFn = void(const TableView& table, const int64_t* ids, int64_t id_stride, int64_t tokens, int columns,
                          Bf16* out, Workers& workers);

// Bytes of the twin's own layout of wkv; 0 where it reads bf16 or q2k itself.
using PackedBytesFn = int64_t(const ProjectionWeights& weights);

// Writes that layout, once, at load. `packed` is aligned to 64 bytes and outlives every use of the weights; bf16 and
// q2k are not read afterwards.
using PackFn = void(const ProjectionWeights& weights, uint8_t* packed, Workers& workers);

// kv = wkv * x per token: x [tokens, inputs] bf16, kv [tokens, outputs] bf16, f32 accumulation in the one order of
// projection_order.h. `scratch` [tokens, inputs] is overwritten; the reference needs none.
using ProjectFn = void(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, Bf16* kv, Bf16* scratch,
                       Workers& workers);

// What ApplyGate reads and writes for a run of tokens.
struct GateCall {
  const Bf16* kv = nullptr;             // [tokens, dim * (copies + 1)]: the key of each copy, then the shared value
  const uint8_t* token_mask = nullptr;  // [tokens], 0 = masked; null = all live
  int64_t tokens = 0;
  HighwayType type = HighwayType::kF32;
  const void* highway = nullptr;  // [tokens, copies, dim] of `type`, little endian, unaligned
  void* out = nullptr;            // the updated highway, unaligned; may be `highway`; null = gates only
  float* gates = nullptr;         // [tokens, copies]; null = not wanted
};

// The gate and the gated update of the highway (docs/numerics.md, gate). A masked token's gate is 0 and its highway
// bytes are copied.
using ApplyGateFn = void(const GateWeights& weights, const GateCall& call, Workers& workers);

struct Kernels {
  const char* name;  // the algorithms, as they stand in numerics_id
  HashWindowFn* hash_window;
  GatherRowsFn* gather_rows;
  PackedBytesFn* packed_bytes;
  PackFn* pack;
  ProjectFn* project;
  ApplyGateFn* apply_gate;
};

// Scalar; ignores `workers` and runs on the calling thread. The yardstick of every other twin.
const Kernels& ReferenceKernels();

// All threads of `workers`, in the widest instruction set of this machine.
const Kernels& CpuKernels();

// Rows as the file holds them: out [tokens][columns][kQ2KBlockBytes], unaligned; ids as for GatherRowsFn, -1 gives a
// row of zero bytes (which decodes to zeros). One for all twins: there is nothing to compute.
void CopyRows(const TableView& table, const int64_t* ids, int64_t id_stride, int64_t tokens, int columns, uint8_t* out,
              Workers& workers);

// One row, scalar: decodes a Q2_K block of kQ2KBlockBytes (unaligned) to f32, exactly as ggml does.
void DecodeQ2K(const uint8_t* block, float out[kRowValues]);

}  // namespace engram::kernels
