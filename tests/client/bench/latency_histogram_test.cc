#include "client/bench/latency_histogram.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace engram::bench {
namespace {

// Latencies between 1 us and 100 s, as many in each factor of ten.
std::vector<int64_t> Samples(int count) {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> exponent(3, 11);
  std::vector<int64_t> nanos;
  for (int i = 0; i < count; ++i) nanos.push_back(static_cast<int64_t>(std::pow(10, exponent(random))));
  return nanos;
}

LatencyHistogram HistogramOf(const std::vector<int64_t>& nanos) {
  LatencyHistogram histogram;
  for (const int64_t value : nanos) histogram.Add(absl::Nanoseconds(value));
  return histogram;
}

TEST(LatencyHistogram, QuantilesAreThoseOfTheSortedSamplesWithinOnePercent) {
  for (const int count : {1, 2, 3, 10, 999, 1000, 1001, 100'000}) {
    std::vector<int64_t> nanos = Samples(count);
    const LatencyHistogram histogram = HistogramOf(nanos);
    std::sort(nanos.begin(), nanos.end());
    for (const double q : {0.0, 0.001, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0}) {
      // In whole thousandths, so that the rank has no rounding of its own.
      const int64_t thousandths = std::llround(q * 1000);
      const int64_t rank = std::max<int64_t>(1, (thousandths * count + 999) / 1000);
      const auto expected = static_cast<double>(nanos[static_cast<size_t>(rank - 1)]);
      const auto got = static_cast<double>(absl::ToInt64Nanoseconds(histogram.Quantile(q)));
      EXPECT_NEAR(got, expected, 0.01 * expected) << count << " samples, quantile " << q;
    }
  }
}

TEST(LatencyHistogram, CountMinMaxAndMeanAreExact) {
  const LatencyHistogram histogram = HistogramOf({1234567, 7, 99'999'999'999, 1'000'003});
  EXPECT_EQ(histogram.count(), 4);
  EXPECT_EQ(histogram.min(), absl::Nanoseconds(7));
  EXPECT_EQ(histogram.max(), absl::Nanoseconds(99'999'999'999));
  EXPECT_EQ(histogram.mean(), absl::Nanoseconds(25'000'558'644));
}

TEST(LatencyHistogram, NothingAddedIsZeroAndNotNoise) {
  const LatencyHistogram histogram;
  EXPECT_EQ(histogram.count(), 0);
  EXPECT_EQ(histogram.Quantile(0.99), absl::ZeroDuration());
  EXPECT_EQ(histogram.mean(), absl::ZeroDuration());
  EXPECT_TRUE(histogram.Bars(10).empty());
}

TEST(LatencyHistogram, WhatLiesOutsideIsCountedAtTheEdge) {
  LatencyHistogram histogram;
  histogram.Add(-absl::Seconds(1));
  histogram.Add(absl::Seconds(1000));
  histogram.Add(absl::Seconds(2000));
  EXPECT_EQ(histogram.count(), 3);
  EXPECT_EQ(histogram.min(), absl::ZeroDuration());
  EXPECT_EQ(histogram.max(), absl::Seconds(2000));
  EXPECT_EQ(histogram.Quantile(0.1), absl::ZeroDuration());
  EXPECT_EQ(histogram.Quantile(1), absl::Seconds(2000));
}

TEST(LatencyHistogram, MergingIsAddingAllToOne) {
  const std::vector<int64_t> nanos = Samples(5000);
  LatencyHistogram merged;
  LatencyHistogram parts[3];
  for (size_t i = 0; i < nanos.size(); ++i) parts[i % 3].Add(absl::Nanoseconds(nanos[i]));
  for (const LatencyHistogram& part : parts) merged.Merge(part);
  merged.Merge(LatencyHistogram());
  const LatencyHistogram whole = HistogramOf(nanos);
  EXPECT_EQ(merged.count(), whole.count());
  EXPECT_EQ(merged.min(), whole.min());
  EXPECT_EQ(merged.max(), whole.max());
  for (const double q : {0.01, 0.5, 0.99}) EXPECT_EQ(merged.Quantile(q), whole.Quantile(q));
}

TEST(LatencyHistogram, BarsHoldEveryValueOnceAndLeaveNoGap) {
  const std::vector<int64_t> nanos = Samples(3000);
  const std::vector<LatencyHistogram::Bar> bars = HistogramOf(nanos).Bars(10);
  int64_t counted = 0;
  for (size_t i = 0; i < bars.size(); ++i) {
    counted += bars[i].count;
    EXPECT_LT(bars[i].from, bars[i].to);
    if (i > 0) {
      EXPECT_EQ(bars[i].from, bars[i - 1].to);
    }
  }
  EXPECT_EQ(counted, 3000);
  EXPECT_GT(bars.front().count, 0);
  EXPECT_GT(bars.back().count, 0);
}

}  // namespace
}  // namespace engram::bench
