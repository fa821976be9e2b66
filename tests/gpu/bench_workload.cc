#include <algorithm>
#include <random>

#include "tests/gpu/bench.h"

namespace engram::gpu {
namespace {

using kernels::GateWeights;
using kernels::HighwayType;
using kernels::kQ2KBlockBytes;
using kernels::kRowValues;
using kernels::cuda::GateToken;
using kernels::cuda::GatherCall;
using kernels::cuda::GemmClass;
using kernels::cuda::TiledBytes;
using kernels::cuda::TiledWeights;
using kernels::cuda::TileSource;
using Random = std::mt19937_64;

constexpr int64_t kMediumTokens = 512;  // up to which the server takes GemmClass::kMedium (docs/gpu.md)
constexpr int64_t kBlocks = 100'000, kValues = 1'000'000;  // made here; the device repeats them

// Finite ones: d and dmin are of 2^-7.
std::vector<uint8_t> RandomBlocks(Random& random) {
  std::vector<uint8_t> bytes(static_cast<size_t>(kBlocks * kQ2KBlockBytes));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  for (int64_t block = 0; block < kBlocks; ++block) {
    for (const int64_t at : {81, 83}) {
      uint8_t& high = bytes[static_cast<size_t>(block * kQ2KBlockBytes + at)];
      high = static_cast<uint8_t>(0x20 | (high & 0x83));
    }
  }
  return bytes;
}

// bf16 of either sign around 1. Two in a row are an f32 of the kind too.
std::vector<uint8_t> RandomValues(Random& random) {
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < kValues; ++i) {
    const uint64_t bits = random();
    bytes.push_back(static_cast<uint8_t>(bits & 0xFF));
    bytes.push_back(static_cast<uint8_t>((bits >> 8 & 0x80) | 0x3F));
  }
  return bytes;
}

std::vector<int64_t> RandomIds(Random& random, int64_t count, int64_t rows) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(rows)));
  return ids;
}

// `some`, again and again.
void Repeat(const Device& device, void* memory, int64_t bytes, const std::vector<uint8_t>& some) {
  auto* const to = static_cast<uint8_t*>(memory);
  int64_t done = std::min(bytes, static_cast<int64_t>(some.size()));
  Must(device.module().copy(to, some.data(), done, device.stream()), "copy to the device");
  while (done < bytes) {
    const int64_t now = std::min(done, bytes - done);
    Must(device.module().copy(to + done, to, now, device.stream()), "copy on the device");
    done += now;
  }
  device.Wait();
}

int64_t TokensOf(const Sizes& sizes) {
  const auto bytes = static_cast<int64_t>(Work(sizes).GateBytes(1, HighwayType::kF32));
  // The square's two factors are taken from the kv of all tokens.
  const int64_t for_square = (2 * sizes.square * sizes.square + sizes.outputs() - 1) / sizes.outputs();
  return std::max({sizes.most_tokens(), sizes.spread_bytes / bytes, for_square});
}

// Of ids, so that the launches of a graph have their own.
int64_t IdsOf(const Sizes& sizes) { return sizes.least_launches * sizes.most_tokens() * sizes.columns; }

}  // namespace

struct Workload::Weights {
  Weights(const Device& on, const Sizes& sizes, TileSource source, const uint8_t* blocks)
      : device(on), tiles(on, TiledBytes(source, sizes.outputs(), sizes.inputs())) {
    tiled = {source, tiles.data(), sizes.outputs(), sizes.inputs()};
    const kernels::cuda::Module& module = device.module();
    if (source == TileSource::kQ2K) {
      Must(module.tile_q2k(blocks, 0, sizes.outputs(), tiled, tiles.data(), device.stream()), "tile_q2k");
      return;
    }
    const int64_t values = sizes.outputs() * sizes.inputs();
    wkv = std::make_unique<Guarded<kernels::Bf16>>(device, values);
    Must(module.gather_rows({blocks, nullptr, values / kRowValues}, wkv->data(), device.stream()), "gather_rows");
    Must(module.tile_bf16(wkv->data(), 0, sizes.outputs(), tiled, tiles.data(), device.stream()), "tile_bf16");
    device.Wait();
    Must(module.create_gemm(wkv->data(), sizes.outputs(), sizes.inputs(), sizes.most_tokens(), &gemm), "create_gemm");
  }
  ~Weights() { device.module().destroy_gemm(gemm); }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;

  const Device& device;
  Guarded<uint8_t> tiles;
  TiledWeights tiled;
  std::unique_ptr<Guarded<kernels::Bf16>> wkv;
  kernels::cuda::Gemm* gemm = nullptr;
};

Workload::Workload(const Device& device, const Sizes& sizes)
    : device_(device),
      sizes_(sizes),
      pool_tokens_(TokensOf(sizes)),
      x_tokens_(
          device.module().padded_tokens(std::max(sizes.most_tokens(), sizes.spread_bytes / (sizes.inputs() * 2)))),
      table_(device, sizes.table_bytes),
      pinned_table_(device, sizes.pinned_bytes, 0, Place::kPinned),
      ids_(device, IdsOf(sizes)),
      pinned_ids_(device, IdsOf(sizes)),
      x_(device, x_tokens_ * sizes.inputs()),
      kv_(device, device.module().padded_tokens(pool_tokens_ + 1) * sizes.outputs()),
      highway_(device, pool_tokens_ * sizes.copies * sizes.dim * 4),
      qk_(device, std::vector<float>(static_cast<size_t>(sizes.copies * sizes.dim), 1.0F)),
      gates_(device, pool_tokens_ * sizes.copies),
      f32_tokens_(device, pool_tokens_),
      bf16_tokens_(device, pool_tokens_),
      workspace_(device, device.module().gemm_workspace_bytes()) {
  Random random(1);
  const std::vector<uint8_t> values = RandomValues(random);
  {
    const std::vector<uint8_t> blocks = RandomBlocks(random);
    Repeat(device, table_.data(), sizes.table_bytes, blocks);
    Must(device.module().copy(pinned_table_.data(), table_.data(), sizes.pinned_bytes, device.stream()), "copy down");
  }
  ids_.Write(RandomIds(random, IdsOf(sizes), sizes.table_bytes / kQ2KBlockBytes));
  pinned_ids_.Write(RandomIds(random, IdsOf(sizes), sizes.pinned_bytes / kQ2KBlockBytes));
  Repeat(device, x_.data(), x_tokens_ * sizes.inputs() * 2, values);
  Repeat(device, kv_.data(), device.module().padded_tokens(pool_tokens_ + 1) * sizes.outputs() * 2, values);
  Repeat(device, highway_.data(), pool_tokens_ * sizes.copies * sizes.dim * 4, values);
  for (const HighwayType type : {HighwayType::kF32, HighwayType::kBf16}) {
    std::vector<GateToken> tokens;
    for (int64_t t = 0; t < pool_tokens_; ++t) {
      uint8_t* const highway = highway_.data() + t * sizes.copies * sizes.dim * kernels::HighwayBytesPerValue(type);
      tokens.push_back({kv_.data() + t * sizes.outputs(), highway, highway, gates_.data() + t * sizes.copies, 1});
    }
    (type == HighwayType::kF32 ? f32_tokens_ : bf16_tokens_).Write(tokens);
  }
  const Work work(sizes);
  // Blocks of weights are the table's, beginning elsewhere for each.
  const auto weight_bytes = static_cast<int64_t>(work.WeightBytes(true));
  if (weight_bytes > sizes.table_bytes) throw std::runtime_error("the bench's table is smaller than its weights");
  for (const TileSource source : {TileSource::kQ2K, TileSource::kBf16}) {
    const auto bytes = static_cast<int64_t>(work.WeightBytes(source == TileSource::kQ2K));
    const int64_t count = std::clamp<int64_t>((sizes.spread_bytes + bytes - 1) / bytes, 2, 8);
    auto& all = source == TileSource::kQ2K ? q2k_ : bf16_;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t room = (sizes.table_bytes - weight_bytes) / kQ2KBlockBytes;
      all.push_back(std::make_unique<Weights>(device, sizes, source, table_.data() + i * room / 8 * kQ2KBlockBytes));
    }
  }
  device.Wait();
}

Workload::~Workload() { device_.module().wait_stream(device_.stream()); }

int64_t Workload::FirstToken(int64_t i, int64_t tokens) const {
  const int64_t places = pool_tokens_ / tokens;
  return i % places * tokens;
}

kernels::Bf16* Workload::X(int64_t i, int64_t tokens) const {
  const int64_t padded = device_.module().padded_tokens(tokens), places = x_tokens_ / padded;
  return x_.data() + i % places * padded * sizes_.inputs();
}

void Workload::Rows(int64_t i, int64_t tokens, Place table) const {
  const int64_t count = tokens * sizes_.columns, places = IdsOf(sizes_) / count;
  const Guarded<int64_t>& ids = table == Place::kDevice ? ids_ : pinned_ids_;
  const GatherCall call = {table == Place::kDevice ? table_.data() : pinned_table_.data(),
                           ids.data() + i % places * count, count};
  Must(device_.module().gather_rows(call, X(i, tokens), device_.stream()), "gather_rows");
}

void Workload::ProjectByKernel(int64_t i, int64_t tokens, TileSource source) const {
  const auto& all = source == TileSource::kQ2K ? q2k_ : bf16_;
  const Weights& weights = *all[static_cast<size_t>(i) % all.size()];
  kernels::Bf16* const kv = kv_.data() + FirstToken(i, tokens) * sizes_.outputs();
  Must(device_.module().project(weights.tiled, X(i, tokens), tokens, kv, device_.multiprocessors(), device_.stream()),
       "project");
}

void Workload::ProjectByGemm(int64_t i, int64_t tokens, GemmClass shape) const {
  const Weights& weights = *bf16_[static_cast<size_t>(i) % bf16_.size()];
  // Padding is written too, so the last places are left out.
  const int64_t padded = device_.module().padded_tokens(tokens), places = pool_tokens_ / padded;
  kernels::Bf16* const kv = kv_.data() + (places == 0 ? 0 : i % places * padded) * sizes_.outputs();
  Must(device_.module().run_gemm(weights.gemm, shape, X(i, tokens), tokens, kv, workspace_.data(), device_.stream()),
       "run_gemm");
}

void Workload::Gate(int64_t i, int64_t tokens, HighwayType type) const {
  const Guarded<GateToken>& all = type == HighwayType::kF32 ? f32_tokens_ : bf16_tokens_;
  const GateWeights weights = {qk_.data(), sizes_.copies, sizes_.dim, 1e-20F};
  Must(device_.module().apply_gate(weights, {all.data() + FirstToken(i, tokens), tokens, type}, device_.stream()),
       "apply_gate");
}

void Workload::Step(int64_t i, int64_t tokens, Place table, TileSource source, HighwayType type) const {
  Rows(i, tokens, table);
  if (tokens <= kernels::cuda::kProjectTokens) {
    ProjectByKernel(i, tokens, source);
  } else {
    ProjectByGemm(i, tokens, tokens <= kMediumTokens ? GemmClass::kMedium : GemmClass::kLong);
  }
  Gate(i, tokens, type);
}

std::string Workload::GemmText() const {
  kernels::cuda::GemmInfo info;
  Must(device_.module().gemm_info(bf16_[0]->gemm, &info), "gemm_info");
  return std::string(info.library) + ", medium " + info.algorithms[0] + ", long " + info.algorithms[1];
}

}  // namespace engram::gpu
