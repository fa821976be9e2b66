// The kernels at the released model's geometry, and in the same run what this machine can do at best: the counter
// `of_limit` is the share of it that a kernel reaches.
//
//   engram_kernels_bench --benchmark_filter=released     (some 3 GiB of memory)
//   engram_kernels_bench --benchmark_filter=small        what ctest runs, to prove that the benchmarks work
//
// The environment variable ENGRAM_BENCH_THREADS sets the threads (default: all of the machine);
// ENGRAM_BENCH_TABLE_GIB=1,2,4,8 adds gathers from tables of those sizes (table_growth.h). Projections by oneDNN and
// ggml are there where the build found them (peers.h).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/kernels.h"
#include "tests/bench/bench_setup.h"
#include "tests/bench/huge_pages.h"
#include "tests/bench/machine_limits.h"
#include "tests/bench/peers.h"
#include "tests/bench/table_growth.h"

namespace engram::kernels {
namespace {

struct Geometry {
  const char* name;
  int64_t dim;
  int copies;
  int columns;
  int64_t rows;  // of the table

  int64_t inputs() const { return columns * kRowValues; }
  int64_t outputs() const { return dim * (copies + 1); }
};

// The released model but for its table: 25 M rows of 84 B are 2.1 GB, far beyond any cache and its page walks.
constexpr Geometry kReleased = {"released", 5120, 4, 24, 25'000'000};
constexpr Geometry kSmall = {"small", 64, 4, 3, 1000};

std::vector<uint8_t> RandomTable(const Geometry& geometry) {
  const int64_t rows = geometry.rows;
  Random random;
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * kQ2KBlockBytes));
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t word = random.Next();
    std::memcpy(&bytes[i], &word, 8);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t scales[2] = {0x2000, 0x2400};  // f16 d and dmin
    std::memcpy(&bytes[static_cast<size_t>(row * kQ2KBlockBytes + 80)], scales, 4);
  }
  return bytes;
}

std::vector<Bf16> RandomWeights(const Geometry& geometry) { return RandomBf16(geometry.outputs() * geometry.inputs()); }

// `make(geometry)` once per run and geometry: gigabytes are filled only if a benchmark of that size runs.
template <auto make>
const auto& Once(const Geometry& geometry) {
  if (geometry.rows == kSmall.rows) {
    static const auto small = make(kSmall);
    return small;
  }
  static const auto released = make(kReleased);
  return released;
}

// What the machine can do at best, measured once, in the run whose figures are read against it.
const MachineLimits& Limits(const Geometry& geometry) {
  static const MachineLimits limits = [&] {
    const auto& table = Once<&RandomTable>(geometry);
    return MeasureLimits(Pool(), table.data(), static_cast<int64_t>(table.size()));
  }();
  return limits;
}

void ReportLimits(benchmark::State& state, const Geometry& geometry, int64_t) {
  const MachineLimits& limits = Limits(geometry);
  for (auto _ : state) benchmark::DoNotOptimize(limits.read_bytes);
  state.counters["read_GB/s"] = limits.read_bytes / 1e9;
  state.counters["copy_GB/s"] = limits.copy_bytes / 1e9;
  state.counters["touch_M/s"] = limits.touch_lines / 1e6;
  state.counters["bf16_GFLOP/s"] = limits.bf16_flops / 1e9;
}

void Hash(benchmark::State& state, const Geometry&, int64_t tokens) {
  constexpr int kNgram = 4, kHeads = 8, kLayers = 2, kColumns = (kNgram - 1) * kHeads;
  const int64_t multipliers[kLayers * kNgram] = {76632096046245, 4839876093313,  35959672319349, 73987337458391,
                                                 67716810739261, 51510806800915, 30921347202721, 82619226485591};
  int64_t primes[kLayers * kColumns];
  int64_t offsets[kLayers * kColumns];
  for (int64_t i = 0; i < kLayers * kColumns; ++i) {
    primes[i] = 16'000'057 + 18 * i;  // of the right size; for time alone they need not be prime
    offsets[i] = 16'000'057 * (i % kColumns);
  }
  uint64_t reciprocals[kLayers * kColumns];
  for (int64_t i = 0; i < kLayers * kColumns; ++i) reciprocals[i] = ReciprocalOf(primes[i]);
  const HashTables tables = {kNgram, kHeads, kLayers, 2, multipliers, primes, offsets, reciprocals};
  Random random;
  std::vector<int32_t> window(static_cast<size_t>(tokens + kNgram - 1));
  for (int32_t& id : window) id = static_cast<int32_t>(random.Next() % 99'092);
  std::vector<int64_t> ids(static_cast<size_t>(tokens * kLayers * kColumns));
  for (auto _ : state) {
    CpuKernels().hash_window(tables, window.data(), tokens, ids.data(), Pool());
    benchmark::DoNotOptimize(ids.data());
  }
  CountTokens(state, tokens);
}

void Gather(benchmark::State& state, const Geometry& geometry, int64_t tokens) {
  const TableView table = {Once<&RandomTable>(geometry).data(), geometry.rows};
  // Fresh ids every time, a million rows or 84 MB of them, or they would come from a cache.
  const int64_t id_sets = std::max<int64_t>(64, 1'000'000 / (tokens * geometry.columns));
  Random random;
  std::vector<int64_t> ids(static_cast<size_t>(id_sets * tokens * geometry.columns));
  for (int64_t& id : ids) id = static_cast<int64_t>(random.Next() % static_cast<uint64_t>(geometry.rows));
  std::vector<Bf16> out(static_cast<size_t>(tokens * geometry.inputs()));
  int64_t set = 0;
  for (auto _ : state) {
    CpuKernels().gather_rows(table, &ids[static_cast<size_t>(set * tokens * geometry.columns)], geometry.columns,
                             tokens, geometry.columns, out.data(), Pool());
    benchmark::DoNotOptimize(out.data());
    set = (set + 1) % id_sets;
  }
  const auto rows = static_cast<double>(tokens * geometry.columns);
  state.counters["rows/s"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * rows, benchmark::Counter::kIsRate);
  CompareWithLimit(state, rows / Limits(geometry).touch_lines);
}

// wkv as a twin keeps it, from Q2_K blocks or from bf16: made once per twin and source.
struct Packed {
  ProjectionWeights weights;
  std::unique_ptr<HugePages> memory;
};

std::vector<uint8_t> RandomBlocks(const Geometry& geometry) {
  Geometry blocks = geometry;
  blocks.rows = geometry.outputs() * geometry.columns;  // a weight row is `columns` blocks of 256
  return RandomTable(blocks);
}

const Packed& PackedWeights(const CpuTwin& twin, const Geometry& geometry, bool q2k) {
  static std::map<std::string, Packed> all;
  Packed& packed = all[std::string(twin.instructions) + geometry.name + (q2k ? "q2k" : "bf16")];
  if (packed.weights.packed != nullptr) return packed;
  packed.weights.outputs = geometry.outputs();
  packed.weights.inputs = geometry.inputs();
  if (q2k) {
    packed.weights.q2k = Once<&RandomBlocks>(geometry).data();
  } else {
    packed.weights.bf16 = Once<&RandomWeights>(geometry).data();
  }
  packed.memory = std::make_unique<HugePages>(twin.kernels->packed_bytes(packed.weights));
  twin.kernels->pack(packed.weights, packed.memory->data(), Pool());
  packed.weights.packed = packed.memory->data();
  return packed;
}

void Project(benchmark::State& state, const CpuTwin& twin, bool q2k, const Geometry& geometry, int64_t tokens) {
  const ProjectionWeights& weights = PackedWeights(twin, geometry, q2k).weights;
  const std::vector<Bf16> x = RandomBf16(tokens * weights.inputs);
  std::vector<Bf16> scratch(x.size());
  std::vector<Bf16> kv(static_cast<size_t>(tokens * weights.outputs));
  for (auto _ : state) {
    twin.kernels->project(weights, x.data(), tokens, kv.data(), scratch.data(), Pool());
    benchmark::DoNotOptimize(kv.data());
  }
  CountTokens(state, tokens);
  const MachineLimits& limits = Limits(geometry);
  const auto read = static_cast<double>(twin.kernels->packed_bytes(weights));
  const auto flops = static_cast<double>(2 * weights.outputs * weights.inputs * tokens);
  const double compute = limits.bf16_flops > 0 ? flops / limits.bf16_flops : 0;
  CompareWithLimit(state, std::max(read / limits.read_bytes, compute));
}

void ProjectPeer(benchmark::State& state, const Peer& peer, const Geometry& geometry, int64_t tokens) {
  ProjectionWeights weights;
  weights.outputs = geometry.outputs();
  weights.inputs = geometry.inputs();
  if (peer.q2k) {
    weights.q2k = Once<&RandomBlocks>(geometry).data();
  } else {
    weights.bf16 = Once<&RandomWeights>(geometry).data();
  }
  const std::vector<Bf16> x = RandomBf16(tokens * weights.inputs);
  const std::function<void()> run = peer.prepare(weights, x.data(), tokens, Pool().threads());
  if (run == nullptr) {
    state.SkipWithError("the library cannot on this machine");
    return;
  }
  for (auto _ : state) run();
  CountTokens(state, tokens);
}

void Gate(benchmark::State& state, const Geometry& geometry, int64_t tokens) {
  const int64_t values = tokens * geometry.copies * geometry.dim;
  const std::vector<float> qk(static_cast<size_t>(geometry.copies * geometry.dim), 0.5f);
  const std::vector<Bf16> kv = RandomBf16(tokens * geometry.outputs());
  const std::vector<float> highway(static_cast<size_t>(values), 0.25f);
  std::vector<float> out(static_cast<size_t>(values));
  std::vector<float> gates(static_cast<size_t>(tokens * geometry.copies));
  const GateWeights weights = {qk.data(), geometry.copies, geometry.dim, 1e-20f};
  GateCall call;
  call.kv = kv.data();
  call.tokens = tokens;
  call.highway = highway.data();
  call.out = out.data();
  call.gates = gates.data();
  for (auto _ : state) {
    CpuKernels().apply_gate(weights, call, Pool());
    benchmark::DoNotOptimize(out.data());
  }
  CountTokens(state, tokens);
  const auto bytes = static_cast<double>(values * 8 + tokens * geometry.outputs() * 2);
  CompareWithLimit(state, bytes / Limits(geometry).copy_bytes);
}

// Registers `run(state, geometry, tokens)` as <stage>/<geometry>/<tokens>, in wall time: the pool's threads do the
// work.
template <typename Run>
void Register(const std::string& stage, const Geometry& geometry, int64_t tokens, Run run) {
  const std::string name = stage + "/" + geometry.name + "/" + std::to_string(tokens);
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { run(state, geometry, tokens); })
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
}

void RegisterAll() {
  for (const Geometry& geometry : {kSmall, kReleased}) {
    Register("limits", geometry, 0, &ReportLimits);
    for (const int64_t tokens : {1, 2, 4, 8, 16, 64, 256}) {
      Register("hash", geometry, tokens, &Hash);
      Register("gather", geometry, tokens, &Gather);
      for (const CpuTwin& twin : SupportedCpuTwins()) {
        // Without an FMA instruction a large projection takes minutes.
        if (twin.instructions == std::string("portable") && tokens > 1) continue;
        for (const bool q2k : {true, false}) {
          Register(
              std::string("project_") + (q2k ? "q2k_" : "bf16_") + twin.instructions, geometry, tokens,
              [&twin, q2k](benchmark::State& state, const Geometry& g, int64_t t) { Project(state, twin, q2k, g, t); });
        }
      }
      for (const Peer& peer : Peers()) {
        Register(std::string("project_") + peer.name, geometry, tokens,
                 [peer](benchmark::State& state, const Geometry& g, int64_t t) { ProjectPeer(state, peer, g, t); });
      }
      Register("gate", geometry, tokens, &Gate);
    }
  }
}

}  // namespace
}  // namespace engram::kernels

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  engram::kernels::RegisterAll();
  engram::kernels::RegisterTableGrowth();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
