// The gate: g within its tolerance, and given g the very bits of the update.
#include "kernels/kernels.h"
#include "tests/gpu/checks.h"
#include "tests/kernels/twins.h"

namespace engram::gpu {
namespace {

using kernels::HighwayType;
using kernels::Normal;
using kernels::Random;
using kernels::cuda::GateToken;

// How far a highway's, kv's and out's first value stands behind an aligned address, in values.
struct Shape {
  int copies;
  int64_t dim;
  int64_t offset;
};
constexpr Shape kShapes[] = {{1, 8, 0},   {1, 1, 0},    {2, 33, 0},   {4, 1000, 0},
                             {8, 257, 3}, {4, 5120, 0}, {4, 5120, 1}, {3, 30000, 0}};
constexpr int64_t kTokens = 9;  // the third is masked, the fifth has a NaN

struct Case {
  Shape shape;
  HighwayType type;
  bool in_place, gates, out;
};

std::vector<uint8_t> Highway(Random& random, const Case& c) {
  const int64_t values = kTokens * c.shape.copies * c.shape.dim;
  std::vector<uint8_t> bytes(static_cast<size_t>(values * kernels::HighwayBytesPerValue(c.type)));
  for (int64_t i = 0; i < values; ++i) {
    const float value = i / (c.shape.copies * c.shape.dim) == 4 && i % c.shape.dim == 0 ? NAN : Normal(random);
    if (c.type == HighwayType::kF32) {
      kernels::StoreUnaligned(bytes.data() + i * 4, value);
    } else {
      kernels::StoreUnaligned(bytes.data() + i * 2, kernels::Bf16FromF32(value));
    }
  }
  return bytes;
}

float ValueAt(const std::vector<uint8_t>& bytes, HighwayType type, int64_t i) {
  return type == HighwayType::kF32 ? kernels::LoadUnaligned<float>(bytes.data() + i * 4)
                                   : kernels::F32FromBf16(kernels::LoadUnaligned<Bf16>(bytes.data() + i * 2));
}

void CheckCase(const Device& device, const Case& c, Random& random) {
  const auto& [copies, dim, offset] = c.shape;
  const int64_t value_bytes = kernels::HighwayBytesPerValue(c.type), token_bytes = copies * dim * value_bytes;
  const std::vector<uint8_t> highway = Highway(random, c);
  std::vector<Bf16> kv;
  for (int64_t i = 0; i < kTokens * dim * (copies + 1); ++i) kv.push_back(kernels::Bf16FromF32(Normal(random)));
  std::vector<float> qk;
  for (int64_t i = 0; i < copies * dim; ++i) qk.push_back(1 + 0.1F * Normal(random));
  std::vector<uint8_t> mask(static_cast<size_t>(kTokens), 1);
  mask[2] = 0;

  const Guarded<uint8_t> on_highway(device, highway, offset * value_bytes);
  const Guarded<uint8_t> on_out(device, kTokens * token_bytes, offset * value_bytes);
  const Guarded<Bf16> on_kv(device, kv, offset);
  const Guarded<float> on_qk(device, qk), on_gates(device, kTokens * copies);
  std::vector<GateToken> tokens;
  for (int64_t t = 0; t < kTokens; ++t) {
    uint8_t* const h = on_highway.data() + t * token_bytes;
    uint8_t* const out = c.in_place ? h : on_out.data() + t * token_bytes;
    tokens.push_back({on_kv.data() + t * dim * (copies + 1), h, c.out ? out : nullptr,
                      c.gates ? on_gates.data() + t * copies : nullptr, mask[static_cast<size_t>(t)]});
  }
  const Guarded<GateToken> on_tokens(device, tokens);
  const kernels::GateWeights weights = {on_qk.data(), copies, dim, 1e-6F};
  Must(device.module().apply_gate(weights, {on_tokens.data(), kTokens, c.type}, device.stream()), "apply_gate");
  const std::vector<float> gates = on_gates.Read();
  const std::vector<uint8_t> read_highway = on_highway.Read(), read_out = on_out.Read();

  std::vector<float> want(static_cast<size_t>(kTokens * copies));
  kernels::Workers workers(1);
  kernels::ReferenceKernels().apply_gate(
      {qk.data(), copies, dim, 1e-6F}, {kv.data(), mask.data(), kTokens, c.type, highway.data(), nullptr, want.data()},
      workers);
  const std::string what = std::to_string(copies) + " copies of " + std::to_string(dim) +
                           (c.type == HighwayType::kF32 ? " f32" : " bf16") + (c.in_place ? ", in place" : "");
  if (!c.in_place || !c.out) Expect(read_highway == highway, what + ": the highway was written");
  const std::vector<uint8_t> poison(read_out.size(), 0xFF);
  if (c.in_place || !c.out) Expect(read_out == poison, what + ": an output that nobody asked for");
  const std::vector<uint8_t>& updated = c.in_place ? read_highway : read_out;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int copy = 0; copy < copies; ++copy) {
      const auto index = static_cast<size_t>(t * copies + copy);
      const std::string where = what + ", token " + std::to_string(t) + ", copy " + std::to_string(copy);
      float g = want[index];
      if (c.gates) {
        g = gates[index];
        const bool near = std::isnan(want[index]) ? std::isnan(g) : std::fabs(g - want[index]) <= 0x1p-19F;
        Expect(near, where + ": g is " + std::to_string(g) + ", the reference's " + std::to_string(want[index]));
        Expect(mask[static_cast<size_t>(t)] != 0 || kernels::F32Bits(g) == 0, where + ": a masked token's g is not 0");
      }
      if (!c.out) continue;
      for (int64_t i = 0; i < dim; ++i) {
        const int64_t at = static_cast<int64_t>(index) * dim + i;
        const float h = ValueAt(highway, c.type, at), got = ValueAt(updated, c.type, at);
        if (mask[static_cast<size_t>(t)] == 0) {
          Expect(std::memcmp(updated.data() + at * value_bytes, highway.data() + at * value_bytes,
                             static_cast<size_t>(value_bytes)) == 0,
                 where + ": a masked token's highway changed");
          continue;
        }
        const float v = kernels::F32FromBf16(kv[static_cast<size_t>(t * dim * (copies + 1) + copies * dim + i)]);
        const float step = g * v;
        float exact = h + step;
        if (c.type == HighwayType::kBf16) exact = kernels::F32FromBf16(kernels::Bf16FromF32(exact));
        // Without its gates the device's g is the reference's within 2^-19: then bits cannot be asked for.
        const double room = c.gates ? 0
                                    : 0x1p-19 * (std::fabs(h) + std::fabs(v)) +
                                          (c.type == HighwayType::kBf16 ? 0x1p-7 * std::fabs(exact) : 0);
        const bool same = std::isnan(exact) ? std::isnan(got) : std::fabs(double{got} - exact) <= room;
        Expect(same, where + ", value " + std::to_string(i) + ": " + std::to_string(got) + " and not " +
                         std::to_string(exact));
      }
    }
  }
}

void Gates(const Device& device) {
  Random random(40);
  for (const Shape& shape : kShapes) {
    for (const HighwayType type : {HighwayType::kF32, HighwayType::kBf16}) {
      CheckCase(device, {shape, type, true, true, true}, random);
      CheckCase(device, {shape, type, false, true, true}, random);
      CheckCase(device, {shape, type, false, false, true}, random);
      CheckCase(device, {shape, type, false, true, false}, random);
    }
  }
}

}  // namespace

std::vector<Check> GateChecks() {
  return {{"gate: near the reference; given g, the bits of the update; mask, NaN, in place, odd shapes", true, Gates}};
}

}  // namespace engram::gpu
