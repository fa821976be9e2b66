#include "tests/bench/machine_limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "tests/bench/huge_pages.h"
#include "tests/bench/peak.h"

namespace engram::kernels {
namespace {

constexpr int64_t kStream = int64_t{512} << 20;  // far beyond any cache
constexpr int64_t kGrain = 1 << 20;

template <typename Work>
double BestSeconds(int times, Work work) {
  double best = 1e300;
  for (int i = 0; i < times; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// The compiler must believe that `value` is used.
template <typename T>
void Keep(const T& value) {
  asm volatile("" : : "m"(value) : "memory");
}

uint64_t ReadLines(const uint8_t* memory, int64_t lines) {
  uint64_t lanes[8] = {};
  for (int64_t i = 0; i < lines; ++i) {
    for (int64_t j = 0; j < 8; ++j) {
      uint64_t word = 0;
      std::memcpy(&word, memory + i * 64 + j * 8, sizeof word);
      lanes[j] += word;
    }
  }
  uint64_t all = 0;
  for (const uint64_t lane : lanes) all += lane;
  return all;
}

double ReadRate(Workers& workers) {
  auto* read = &ReadLines;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) read = &ReadLinesAvx2;
#endif
  const HugePages pages(kStream);
  std::memset(pages.data(), 1, kStream);
  return static_cast<double>(kStream) / BestSeconds(6, [&] {
           workers.ForEachRange(kStream / 64, kGrain / 64, [&](int64_t begin, int64_t end) {
             Keep(read(pages.data() + begin * 64, end - begin));
           });
         });
}

double CopyRate(Workers& workers, const std::vector<uint64_t>& from, std::vector<uint64_t>& to) {
  const auto words = static_cast<int64_t>(from.size());
  return static_cast<double>(words * 16) / BestSeconds(4, [&] {
           // Plain loads and stores, as a kernel has them: a library's copy may go around the cache.
           workers.ForEachRange(words, kGrain / 8, [&](int64_t begin, int64_t end) {
             for (int64_t i = begin; i < end; ++i) to[static_cast<size_t>(i)] = from[static_cast<size_t>(i)] + 1;
           });
           Keep(to[0]);
         });
}

double FlopRate(Workers& workers) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool bf16 = __builtin_cpu_supports("avx512bf16");
  if (!bf16 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return 0;
  constexpr int64_t kRounds = 500'000;
  std::atomic<int64_t> flops{0};
  const double seconds = BestSeconds(4, [&] {
    flops = 0;
    workers.ForEachRange(workers.threads(), 1, [&](int64_t, int64_t) {
      flops += kRounds * (bf16 ? PeakAvx512Bf16(kRounds) : PeakAvx2Fma(kRounds));
    });
  });
  return static_cast<double>(flops.load()) / seconds;
#else
  static_cast<void>(workers);
  return 0;
#endif
}

}  // namespace

double MeasureTouches(Workers& workers, const uint8_t* table, int64_t table_bytes) {
  constexpr int64_t kTouches = 1 << 20;
  std::atomic<uint64_t> seed{1};
  return kTouches / BestSeconds(3, [&] {
           workers.ForEachRange(kTouches, kTouches / 64, [&](int64_t begin, int64_t end) {
             uint64_t state = 0x9E3779B97F4A7C15u * seed.fetch_add(1) | 1;
             uint64_t sum = 0;
             for (int64_t i = begin; i < end; ++i) {
               state ^= state << 13;
               state ^= state >> 7;
               state ^= state << 17;
               sum += table[state % static_cast<uint64_t>(table_bytes)];
             }
             Keep(sum);
           });
         });
}

MachineLimits MeasureLimits(Workers& workers, const uint8_t* table, int64_t table_bytes) {
  const std::vector<uint64_t> from(kStream / 8, 1);
  std::vector<uint64_t> to(kStream / 8, 2);
  MachineLimits limits;
  limits.read_bytes = ReadRate(workers);
  limits.copy_bytes = CopyRate(workers, from, to);
  limits.touch_lines = MeasureTouches(workers, table, table_bytes);
  limits.bf16_flops = FlopRate(workers);
  return limits;
}

}  // namespace engram::kernels
