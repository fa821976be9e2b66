// What the benchmarks of kernels share: the pool, contents, and how a figure is told.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/workers.h"

namespace engram::kernels {

// Of ENGRAM_BENCH_THREADS threads, or as many as the machine has.
inline Workers& Pool() {
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
inline std::vector<Bf16> RandomBf16(int64_t count) {
  Random random;
  std::vector<Bf16> values(static_cast<size_t>(count));
  for (Bf16& value : values) value = static_cast<Bf16>((random.Next() & 0x83FFu) | 0x3C00u);
  return values;
}

inline void CountTokens(benchmark::State& state, int64_t tokens) {
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(state.iterations() * tokens), benchmark::Counter::kIsRate);
}

// How much of its limit a benchmark reaches, where the limit allows one iteration in `seconds`.
inline void CompareWithLimit(benchmark::State& state, double seconds) {
  state.counters["of_limit"] =
      benchmark::Counter(static_cast<double>(state.iterations()) * seconds, benchmark::Counter::kIsRate);
}

}  // namespace engram::kernels
