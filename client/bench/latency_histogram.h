// How long things took: counts by latency, in buckets of under 1 % from 1 us to 100 s.
//
// Not thread-safe: one per thread, merged at the end. 30 KB each; adding is a few instructions and allocates nothing.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace engram::bench {

class LatencyHistogram {
 public:
  // Below 0 counts as 0; above 100 s shares the last bucket, though max() and mean() stay exact.
  void Add(absl::Duration latency);
  void Merge(const LatencyHistogram& other);

  int64_t count() const { return count_; }

  // Exact; zero where nothing was added.
  absl::Duration min() const;
  absl::Duration max() const;
  absl::Duration mean() const;

  // The latency that a share of `q` in [0, 1] did not pass: of the value at rank ceil(q * count) of the sorted ones, to
  // within 1 %. Quantile(0) is min(), Quantile(1) max(); zero where nothing was added.
  absl::Duration Quantile(double q) const;

  struct Bar {
    absl::Duration from, to;  // [from, to)
    int64_t count = 0;
  };

  // For a plot: bars of equal width on a logarithmic axis, `per_decade` (1..100) to a factor of ten, from the first
  // that has a value to the last, empty ones between them included. The edges are powers of 10^(1 / per_decade) of 1
  // ns; a value stands in the bar of its bucket's middle.
  std::vector<Bar> Bars(int per_decade) const;

 private:
  // A value of nanoseconds keeps its 8 upper bits: 128 buckets to a factor of two, each 1/128 to 1/256 of its value
  // wide.
  static constexpr int kKeptBits = 8;
  static constexpr int64_t kHalf = int64_t{1} << (kKeptBits - 1);
  static constexpr int64_t kMostNanos = 100'000'000'000;  // 100 s, 37 bits
  static constexpr size_t kBuckets = (37 - kKeptBits + 2) * kHalf;

  static size_t BucketOf(int64_t nanos);
  static double MiddleOf(size_t bucket);  // nanoseconds

  std::array<int64_t, kBuckets> counts_ = {};
  int64_t count_ = 0;
  int64_t min_ = 0;  // nanoseconds
  int64_t max_ = 0;
  double sum_ = 0;  // nanoseconds; exact to 2^53 of them, 104 days
};

}  // namespace engram::bench
