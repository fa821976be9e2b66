#include "client/bench/latency_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace engram::bench {

size_t LatencyHistogram::BucketOf(int64_t nanos) {
  const auto value = static_cast<uint64_t>(std::clamp<int64_t>(nanos, 0, kMostNanos));
  const int shift = std::max(0, static_cast<int>(std::bit_width(value)) - kKeptBits);
  // value >> shift is in [128, 256) where something was shifted out, and below 256 where not.
  return static_cast<size_t>(shift) * kHalf + static_cast<size_t>(value >> shift);
}

double LatencyHistogram::MiddleOf(size_t bucket) {
  const size_t shift = bucket < 2 * kHalf ? 0 : bucket / kHalf - 1;
  const auto low = static_cast<double>((bucket - shift * kHalf) << shift);
  return low + static_cast<double>((uint64_t{1} << shift) - 1) / 2;
}

void LatencyHistogram::Add(absl::Duration latency) {
  const int64_t nanos = std::max<int64_t>(0, absl::ToInt64Nanoseconds(latency));
  ++counts_[BucketOf(nanos)];
  min_ = count_ == 0 ? nanos : std::min(min_, nanos);
  max_ = std::max(max_, nanos);
  sum_ += static_cast<double>(nanos);
  ++count_;
}

void LatencyHistogram::Merge(const LatencyHistogram& other) {
  if (other.count_ == 0) return;
  for (size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
  min_ = count_ == 0 ? other.min_ : std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  sum_ += other.sum_;
  count_ += other.count_;
}

absl::Duration LatencyHistogram::min() const { return absl::Nanoseconds(min_); }
absl::Duration LatencyHistogram::max() const { return absl::Nanoseconds(max_); }

absl::Duration LatencyHistogram::mean() const {
  return count_ == 0 ? absl::ZeroDuration() : absl::Nanoseconds(sum_ / static_cast<double>(count_));
}

absl::Duration LatencyHistogram::Quantile(double q) const {
  if (count_ == 0) return absl::ZeroDuration();
  // A product such as 0.999 * 1000 may come out just above the whole number that it is.
  const double exact = q * static_cast<double>(count_);
  const auto rank = static_cast<int64_t>(std::ceil(exact - 1e-9 * exact));
  if (rank <= 1) return min();
  if (rank >= count_) return max();
  int64_t passed = 0;
  size_t bucket = 0;
  while ((passed += counts_[bucket]) < rank) ++bucket;
  return absl::Nanoseconds(std::clamp(MiddleOf(bucket), static_cast<double>(min_), static_cast<double>(max_)));
}

std::vector<LatencyHistogram::Bar> LatencyHistogram::Bars(int per_decade) const {
  std::vector<Bar> bars;
  int first = 0;  // of `bars`, its index from 1 ns
  const auto edge = [per_decade](int bar) { return absl::Nanoseconds(std::pow(10.0, double{1} * bar / per_decade)); };
  for (size_t i = 0; i < counts_.size(); ++i) {
    if (counts_[i] == 0) continue;
    const int bar = static_cast<int>(std::floor(std::log10(std::max(1.0, MiddleOf(i))) * per_decade));
    if (bars.empty()) first = bar;
    for (int next = first + static_cast<int>(bars.size()); next <= bar; ++next) {
      bars.push_back({edge(next), edge(next + 1), 0});
    }
    bars[static_cast<size_t>(bar - first)].count += counts_[i];
  }
  return bars;
}

}  // namespace engram::bench
