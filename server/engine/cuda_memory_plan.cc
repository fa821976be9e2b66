#include "server/engine/cuda_memory_plan.h"

#include <algorithm>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace engram {
namespace {

using kernels::Bf16;
using kernels::cuda::GateToken;
using kernels::cuda::TileSource;

// Sums and products that remember whether they left 63 bits.
class Sizes {
 public:
  int64_t Product(std::initializer_list<int64_t> factors) {
    int64_t product = 1;
    for (const int64_t factor : factors) overflow_ |= __builtin_mul_overflow(product, factor, &product);
    return product;
  }
  int64_t Sum(std::initializer_list<int64_t> terms) {
    int64_t sum = 0;
    for (const int64_t term : terms) overflow_ |= __builtin_add_overflow(sum, term, &sum);
    return sum;
  }
  int64_t Aligned(int64_t bytes) { return Sum({bytes, kCudaAlignment - 1}) / kCudaAlignment * kCudaAlignment; }
  bool overflow() const { return overflow_; }

 private:
  bool overflow_ = false;
};

// x and kv hold tokens of short calls, then of medium, then of long ones, without gaps: a class's padding is written
// over the next one's places before those are computed, so only what stands last needs room beyond the batch.
int64_t MostRows(int64_t tokens, const kernels::cuda::Module& module) {
  int64_t most = tokens;
  for (int64_t n = 1; n <= tokens; ++n) most = std::max(most, tokens - n + module.padded_tokens(n));
  return most;
}

CudaLaneSizes LaneSizes(const EngramGeometry& g, int64_t tokens, const kernels::cuda::Module& module, Sizes& sizes) {
  constexpr int64_t kGateToken = sizeof(GateToken);
  constexpr int64_t kF32 = sizeof(float);
  constexpr int64_t kHalf = sizeof(Bf16);
  CudaLaneSizes lane;
  lane.most_rows = MostRows(tokens, module);
  // Ids of rows for kv and of rows asked for, which are never the same token's, and a descriptor for each.
  lane.manifest =
      sizes.Sum({sizes.Product({tokens, g.columns, 8}), sizes.Product({tokens, kGateToken}), 3 * kCudaAlignment});
  // Every slice begins aligned, and there may be one per token.
  const int64_t most_io = std::max(sizes.Product({g.highway_values(), kF32}), sizes.Product({g.inputs(), kHalf}));
  lane.io = sizes.Product({tokens, sizes.Aligned(most_io)});
  lane.x = sizes.Product({lane.most_rows, g.inputs(), kHalf});
  lane.kv = sizes.Product({lane.most_rows, g.outputs(), kHalf});
  lane.gates = sizes.Product({tokens, g.copies, kF32});
  const int64_t down = std::max(most_io, sizes.Product({g.outputs(), kHalf}));
  lane.bounce = sizes.Product(
      {tokens, sizes.Sum({sizes.Aligned(down), sizes.Aligned(g.copies * kF32), sizes.Aligned(g.dim * kHalf)})});
  return lane;
}

std::string Readable(int64_t bytes) {
  return bytes >= (int64_t{1} << 30) ? absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (1 << 30))
                                     : absl::StrFormat("%.0f MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

int64_t CudaMemoryPlan::DeviceBytes() const {
  int64_t bytes = 0;
  for (const Item& item : items) bytes += item.on_device ? item.bytes : 0;
  return bytes;
}

absl::StatusOr<CudaMemoryPlan> PlanCudaMemory(const EngramModel& model, const CudaPlanOptions& options,
                                              const kernels::cuda::Module& module) {
  const EngramGeometry& g = model.geometry();
  Sizes sizes;
  int64_t tables = 0, tiles = 0, bf16 = 0, qk = 0;
  bool q2k = false;
  for (const EngramLayer& layer : model.layers()) {
    tables = sizes.Sum({tables, sizes.Aligned(sizes.Product({layer.table.rows, kernels::kQ2KBlockBytes}))});
    const TileSource source = layer.wkv.q2k != nullptr ? TileSource::kQ2K : TileSource::kBf16;
    q2k |= source == TileSource::kQ2K;
    tiles = sizes.Sum({tiles, sizes.Aligned(kernels::cuda::TiledBytes(source, g.outputs(), g.inputs()))});
    bf16 = sizes.Sum({bf16, sizes.Aligned(sizes.Product({g.outputs(), g.inputs(), sizeof(Bf16)}))});
    qk = sizes.Sum({qk, sizes.Aligned(sizes.Product({g.highway_values(), sizeof(float)}))});
  }
  CudaMemoryPlan plan;
  plan.lanes = std::min<int>(kMostCudaLanes, static_cast<int>(model.layers().size()));
  plan.lane = LaneSizes(g, options.max_batch_tokens, module, sizes);
  const int64_t lanes = int64_t{kCudaSlots} * plan.lanes;
  const auto of_lanes = [&](std::initializer_list<int64_t> bytes) { return sizes.Product({lanes, sizes.Sum(bytes)}); };
  const CudaLaneSizes& lane = plan.lane;
  plan.items = {
      {"tables", options.tables_on_device ? tables : 0},
      {"wkv_tiles", tiles},
      {"wkv_bf16", bf16},
      {"qk", qk},
      {"steps", of_lanes({lane.manifest, lane.io, lane.x, lane.kv, lane.gates})},
      {"gemm_workspace", sizes.Product({kCudaSlots, module.gemm_workspace_bytes()})},
      {"prepared", sizes.Aligned(options.prepare_memory_bytes)},
      {"upload", q2k ? kUploadBytes : 0},
      {"steps_pinned", of_lanes({lane.manifest, lane.bounce}), false},
      {"upload_pinned", 2 * kUploadBytes, false},
  };
  int64_t sum = 0;
  for (const CudaMemoryPlan::Item& item : plan.items) sum = sizes.Sum({sum, item.bytes});
  if (!sizes.overflow()) return plan;
  return absl::OutOfRangeError(absl::StrCat("device memory of this model and --max-batch-tokens ",
                                            options.max_batch_tokens, " is more than 2^63 bytes"));
}

absl::Status CheckCudaMemory(const CudaMemoryPlan& plan, const CudaPlanOptions& options, int64_t free_bytes) {
  const int64_t need = plan.DeviceBytes();
  const int64_t margin = std::min(kCudaMarginBytes, free_bytes / 8);
  if (need <= free_bytes - margin) return absl::OkStatus();
  const auto bytes_of = [&plan](absl::string_view name) {
    for (const CudaMemoryPlan::Item& item : plan.items) {
      if (item.name == name) return item.bytes;
    }
    return int64_t{0};
  };
  std::string help;
  if (options.tables_on_device) {
    absl::StrAppend(&help, "--residency host (tables: ", Readable(bytes_of("tables")), "), fewer --layers, ");
  } else {
    absl::StrAppend(&help, "fewer --layers (weights: ", Readable(bytes_of("wkv_tiles") + bytes_of("wkv_bf16")), "), ");
  }
  absl::StrAppend(&help, "a smaller --max-batch-tokens (", options.max_batch_tokens, " take ",
                  Readable(bytes_of("steps")), ") or --prepare-memory-bytes (", Readable(bytes_of("prepared")), ")");
  return absl::ResourceExhaustedError(
      absl::StrCat("device memory: ", need, " bytes (", Readable(need), ") are needed and ", free_bytes, " (",
                   Readable(free_bytes), ") free, of which ", Readable(margin), " are kept; what helps: ", help));
}

}  // namespace engram
