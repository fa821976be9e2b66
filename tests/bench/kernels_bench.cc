// The kernels at the released model's geometry, and in the same run how fast this machine reads memory, so that a
// figure can be read as a ratio.
//
//   engram_kernels_bench --benchmark_filter=released     (some 3 GiB of memory)
//   engram_kernels_bench --benchmark_filter=small        what ctest runs, to prove that the benchmarks work
//
// The environment variable ENGRAM_BENCH_THREADS sets the threads (default: all of the machine).
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/kernels.h"
#include "kernels/workers.h"

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

Workers& Pool() {
  static Workers workers([] {
    const char* threads = std::getenv("ENGRAM_BENCH_THREADS");
    return threads != nullptr ? std::atoi(threads) : static_cast<int>(std::thread::hardware_concurrency());
  }());
  return workers;
}

// xorshift64: fast enough to fill gigabytes, and the same on every run.
class Random {
 public:
  uint64_t Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }

 private:
  uint64_t state_ = 0x9E3779B97F4A7C15u;
};

// bf16 of either sign between 2^-7 and 1: no subnormals, no overflow.
std::vector<Bf16> RandomBf16(int64_t count) {
  Random random;
  std::vector<Bf16> values(static_cast<size_t>(count));
  for (Bf16& value : values) value = static_cast<Bf16>((random.Next() & 0x83FFu) | 0x3C00u);
  return values;
}

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

void CountTokens(benchmark::State& state, int64_t tokens) {
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(state.iterations() * tokens), benchmark::Counter::kIsRate);
}

// Sums `bytes` of memory on all threads.
void ReadBandwidth(benchmark::State& state, int64_t bytes) {
  const std::vector<uint64_t> memory(static_cast<size_t>(bytes / 8), 1);
  for (auto _ : state) {
    Pool().ForEachRange(bytes / 8, 1 << 15, [&](int64_t begin, int64_t end) {
      uint64_t lanes[8] = {};
      for (int64_t i = begin; i + 8 <= end; i += 8) {
        for (int64_t j = 0; j < 8; ++j) lanes[j] += memory[static_cast<size_t>(i + j)];
      }
      benchmark::DoNotOptimize(lanes);
    });
  }
  state.SetBytesProcessed(state.iterations() * bytes);
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
  const HashTables tables = {kNgram, kHeads, kLayers, 2, multipliers, primes, offsets};
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
  // Fresh ids every time, or the rows would come from a cache.
  constexpr int64_t kIdSets = 64;
  Random random;
  std::vector<int64_t> ids(static_cast<size_t>(kIdSets * tokens * geometry.columns));
  for (int64_t& id : ids) id = static_cast<int64_t>(random.Next() % static_cast<uint64_t>(geometry.rows));
  std::vector<Bf16> out(static_cast<size_t>(tokens * geometry.inputs()));
  int64_t set = 0;
  for (auto _ : state) {
    CpuKernels().gather_rows(table, &ids[static_cast<size_t>(set * tokens * geometry.columns)], geometry.columns,
                             tokens, geometry.columns, out.data(), Pool());
    benchmark::DoNotOptimize(out.data());
    set = (set + 1) % kIdSets;
  }
  state.counters["rows/s"] = benchmark::Counter(static_cast<double>(state.iterations() * tokens * geometry.columns),
                                                benchmark::Counter::kIsRate);
}

void Project(benchmark::State& state, const CpuTwin& twin, const Geometry& geometry, int64_t tokens) {
  ProjectionWeights weights;
  weights.bf16 = Once<&RandomWeights>(geometry).data();
  weights.outputs = geometry.outputs();
  weights.inputs = geometry.inputs();
  const std::vector<Bf16> x = RandomBf16(tokens * weights.inputs);
  std::vector<Bf16> kv(static_cast<size_t>(tokens * weights.outputs));
  for (auto _ : state) {
    twin.kernels->project(weights, x.data(), tokens, kv.data(), Pool());
    benchmark::DoNotOptimize(kv.data());
  }
  state.SetBytesProcessed(state.iterations() * weights.outputs * weights.inputs * 2);  // one reading of the weights
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
  state.SetBytesProcessed(state.iterations() * (values * 8 + tokens * geometry.outputs() * 2));
  CountTokens(state, tokens);
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
    const int64_t probe_bytes = geometry.dim == kSmall.dim ? 1 << 20 : 1 << 29;
    Register("read_bandwidth", geometry, 0,
             [=](benchmark::State& state, const Geometry&, int64_t) { ReadBandwidth(state, probe_bytes); });
    for (const int64_t tokens : {1, 4, 16, 64, 256}) {
      Register("hash", geometry, tokens, &Hash);
      Register("gather", geometry, tokens, &Gather);
      for (const CpuTwin& twin : SupportedCpuTwins()) {
        Register(std::string("project_") + twin.instructions, geometry, tokens,
                 [&twin](benchmark::State& state, const Geometry& g, int64_t t) { Project(state, twin, g, t); });
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
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
