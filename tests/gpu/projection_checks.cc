// The projection kernel: near the exact sums, the same bits from both sources, for every number of tokens.
#include <algorithm>
#include <span>
#include <thread>

#include "kernels/kernels.h"
#include "tests/gpu/checks.h"
#include "tests/kernels/twins.h"

namespace engram::gpu {
namespace {

using kernels::kQ2KBlockBytes;
using kernels::kRowValues;
using kernels::Normal;
using kernels::Random;
using kernels::cuda::TiledBytes;
using kernels::cuda::TiledWeights;
using kernels::cuda::TileSource;

struct Shape {
  int64_t outputs, inputs;
};
// Fewer blocks of inputs than slices, and one more; a single tile of outputs, and ragged ones.
constexpr Shape kSmallShapes[] = {{16, 256}, {40, 512}, {17, 768}, {264, 2304}};
constexpr Shape kLargeShapes[] = {{1032, 6144}};
constexpr int64_t kMostTokens = 130;

// Weights by their blocks and as the bf16 values that these are, and x.
struct Problem {
  int64_t outputs, inputs;
  std::vector<uint8_t> blocks;
  std::vector<Bf16> weights, x;

  std::vector<double> Exact(int64_t token) const {
    std::vector<double> sums;
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = 0;
      for (int64_t k = 0; k < inputs; ++k) {
        sum += static_cast<double>(kernels::F32FromBf16(weights[static_cast<size_t>(o * inputs + k)])) *
               kernels::F32FromBf16(x[static_cast<size_t>(token * inputs + k)]);
      }
      sums.push_back(sum);
    }
    return sums;
  }
};

Problem RandomProblem(uint64_t seed, int64_t outputs, int64_t inputs, int64_t tokens) {
  Random random(seed);
  Problem problem = {outputs, inputs, kernels::RandomQ2K(random, outputs * inputs / kRowValues), {}, {}};
  for (size_t block = 0; block < problem.blocks.size(); block += kQ2KBlockBytes) {
    float values[kRowValues];
    kernels::DecodeQ2K(problem.blocks.data() + block, values);
    for (const float value : values) problem.weights.push_back(kernels::Bf16FromF32(value));
  }
  for (int64_t i = 0; i < tokens * inputs; ++i) problem.x.push_back(kernels::Bf16FromF32(Normal(random)));
  return problem;
}

// Every second token's products cancel: the later half of them are the earlier with the other sign. Its sums are
// nothing but what rounding leaves, which any other order of summing leaves differently.
Problem CancellingProblem(uint64_t seed, int64_t outputs, int64_t inputs, int64_t tokens) {
  Problem problem = RandomProblem(seed, outputs, inputs, tokens);
  const int64_t blocks = inputs / kRowValues, half = blocks / 2, values = half * kRowValues;
  if (half == 0) return problem;
  for (int64_t o = 0; o < outputs; ++o) {
    const auto block = problem.blocks.begin() + o * blocks * kQ2KBlockBytes;
    std::copy_n(block, half * kQ2KBlockBytes, block + half * kQ2KBlockBytes);
    const auto weight = problem.weights.begin() + o * inputs;
    std::copy_n(weight, values, weight + values);
  }
  for (int64_t t = 1; t < tokens; t += 2) {
    const auto x = problem.x.begin() + t * inputs;
    std::transform(x, x + values, x + values, [](Bf16 value) { return static_cast<Bf16>(value ^ 0x8000); });
    std::fill(x + 2 * values, x + inputs, Bf16{0});
  }
  return problem;
}

// The tiles on the device, made in pieces of `piece` outputs, a multiple of 16.
class Tiles {
 public:
  Tiles(const Device& device, const Problem& problem, TileSource source, int64_t piece)
      : memory_(device, TiledBytes(source, problem.outputs, problem.inputs)) {
    weights_ = {source, memory_.data(), problem.outputs, problem.inputs};
    const Guarded<uint8_t> blocks(device, problem.blocks);
    const Guarded<Bf16> wkv(device, problem.weights);
    for (int64_t first = 0; first < problem.outputs; first += piece) {
      const int64_t count = std::min(piece, problem.outputs - first);
      const uint8_t* from = blocks.data() + first * problem.inputs / kRowValues * kQ2KBlockBytes;
      Must(source == TileSource::kQ2K
               ? device.module().tile_q2k(from, first, count, weights_, memory_.data(), device.stream())
               : device.module().tile_bf16(wkv.data() + first * problem.inputs, first, count, weights_, memory_.data(),
                                           device.stream()),
           "tiling");
    }
    device.Wait();
  }
  const TiledWeights& weights() const { return weights_; }
  std::vector<uint8_t> Read() const { return memory_.Read(); }

 private:
  Guarded<uint8_t> memory_;
  TiledWeights weights_;
};

std::vector<Bf16> Project(const Device& device, const TiledWeights& weights, const Bf16* x, int64_t tokens,
                          int multiprocessors) {
  const Guarded<Bf16> kv(device, tokens * weights.outputs);
  Must(device.module().project(weights, x, tokens, kv.data(), multiprocessors, device.stream()), "project");
  return kv.Read();
}

void TilesInPiecesAreTilesAtOnce(const Device& device) {
  for (const auto& [outputs, inputs] : kSmallShapes) {
    const Problem problem = RandomProblem(20, outputs, inputs, 0);
    for (const TileSource source : {TileSource::kQ2K, TileSource::kBf16}) {
      const auto whole = Tiles(device, problem, source, (outputs + 15) / 16 * 16).Read();
      for (const int64_t piece : {16, 48}) {
        Expect(Tiles(device, problem, source, piece).Read() == whole,
               std::to_string(outputs) + " outputs in pieces of " + std::to_string(piece));
      }
    }
  }
}

void NearExact(const Device& device, std::span<const Shape> shapes) {
  for (const auto& [outputs, inputs] : shapes) {
    const Problem problem = RandomProblem(21, outputs, inputs, kMostTokens);
    const Guarded<Bf16> x(device, problem.x);
    for (const TileSource source : {TileSource::kQ2K, TileSource::kBf16}) {
      const Tiles tiles(device, problem, source, outputs + 15);
      const auto kv = Project(device, tiles.weights(), x.data(), kMostTokens, device.multiprocessors());
      for (const int64_t t : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, kMostTokens - 1}) {
        ExpectNear(kv.data() + t * outputs, problem.Exact(t),
                   std::to_string(outputs) + " x " + std::to_string(inputs) + ", token " + std::to_string(t));
      }
    }
  }
}

// Against what every token has in the longest call: shorter calls, calls that begin later, other grids, the other
// source.
void SameBits(const Device& device, std::span<const Shape> shapes, int64_t step) {
  for (const auto& [outputs, inputs] : shapes) {
    const Problem problem = CancellingProblem(22, outputs, inputs, kMostTokens);
    const Guarded<Bf16> x(device, problem.x);
    const Tiles q2k(device, problem, TileSource::kQ2K, outputs + 15),
        bf16(device, problem, TileSource::kBf16, outputs + 15);
    const auto all = Project(device, q2k.weights(), x.data(), kMostTokens, device.multiprocessors());
    const std::string shape = std::to_string(outputs) + " x " + std::to_string(inputs) + ", T = ";
    for (int64_t tokens = 1; tokens <= kernels::cuda::kProjectTokens; tokens += step) {
      for (const int64_t first : {int64_t{0}, int64_t{3}, kMostTokens - tokens}) {
        const std::vector<Bf16> want(all.begin() + first * outputs, all.begin() + (first + tokens) * outputs);
        const std::string what = shape + std::to_string(tokens) + " from token " + std::to_string(first);
        const Bf16* from = x.data() + first * inputs;
        ExpectSame(Project(device, q2k.weights(), from, tokens, device.multiprocessors()), want, what);
        ExpectSame(Project(device, bf16.weights(), from, tokens, device.multiprocessors()), want, what + " from bf16");
        ExpectSame(Project(device, q2k.weights(), from, tokens, 3), want, what + " on 3 multiprocessors");
      }
    }
  }
}

void SmallNearExact(const Device& device) { NearExact(device, kSmallShapes); }
void LargeNearExact(const Device& device) { NearExact(device, kLargeShapes); }
void SmallSameBitsForSome(const Device& device) { SameBits(device, kSmallShapes, 21); }
void SmallSameBitsForEvery(const Device& device) { SameBits(device, kSmallShapes, 1); }
void LargeSameBitsForEvery(const Device& device) { SameBits(device, kLargeShapes, 1); }

// The released model's shape, against the CPU's kv: 2 * max(2^-7 |kv|, 2^-8 rms) apart at most.
void TheReleasedModelsShape(const Device& device) {
  constexpr int64_t kOutputs = 25600, kInputs = 6144, kTokens = 64;
  const Problem problem = RandomProblem(23, kOutputs, kInputs, kTokens);
  const Guarded<Bf16> x(device, problem.x);
  const Tiles tiles(device, problem, TileSource::kQ2K, 4096);
  kernels::Workers workers(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
  const kernels::Kernels& cpu = kernels::CpuKernels();
  kernels::ProjectionWeights weights = {nullptr, problem.blocks.data(), kOutputs, kInputs};
  std::vector<uint8_t> room(static_cast<size_t>(cpu.packed_bytes(weights)) + 64);
  auto* const packed = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
  cpu.pack(weights, packed, workers);
  weights.packed = packed;
  std::vector<Bf16> want(static_cast<size_t>(kTokens * kOutputs)), scratch(problem.x.size());
  cpu.project(weights, problem.x.data(), kTokens, want.data(), scratch.data(), workers);
  for (const int64_t tokens : {1, 16, 64}) {
    const auto kv = Project(device, tiles.weights(), x.data(), tokens, device.multiprocessors());
    for (int64_t t = 0; t < tokens; ++t) {
      double squares = 0;
      for (int64_t o = 0; o < kOutputs; ++o)
        squares += std::pow(kernels::F32FromBf16(want[static_cast<size_t>(t * kOutputs + o)]), 2);
      const double rms = std::sqrt(squares / kOutputs);
      for (int64_t o = 0; o < kOutputs; ++o) {
        const double cpu_kv = kernels::F32FromBf16(want[static_cast<size_t>(t * kOutputs + o)]);
        const double gpu_kv = kernels::F32FromBf16(kv[static_cast<size_t>(t * kOutputs + o)]);
        Expect(std::fabs(cpu_kv - gpu_kv) <= 2 * std::max(0x1p-7 * std::fabs(cpu_kv), 0x1p-8 * rms),
               "T = " + std::to_string(tokens) + ", token " + std::to_string(t) + ", output " + std::to_string(o) +
                   ": " + std::to_string(gpu_kv) + ", on the CPU " + std::to_string(cpu_kv));
      }
    }
  }
}

}  // namespace

std::vector<Check> ProjectionChecks() {
  return {
      {"tiles: made in pieces and at once", true, TilesInPiecesAreTilesAtOnce},
      {"projection: near the exact sums, from Q2_K and bf16, up to 264 x 2304", true, SmallNearExact},
      {"projection: near the exact sums, from Q2_K and bf16, 1032 x 6144", false, LargeNearExact},
      {"projection: bits depend on neither T (1, 22, 43, 64), source nor grid", true, SmallSameBitsForSome},
      {"projection: bits depend on neither T (1 to 64), source nor grid", false, SmallSameBitsForEvery},
      {"projection: bits depend on neither T (1 to 64), source nor grid, 1032 x 6144", false, LargeSameBitsForEvery},
      {"projection: 25600 x 6144 near the CPU's", false, TheReleasedModelsShape}};
}

}  // namespace engram::gpu
