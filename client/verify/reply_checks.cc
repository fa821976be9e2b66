#include "client/verify/reply_checks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace engram::client {
namespace {

constexpr double kUpdateTolerance = 0x1p-20;
constexpr double kKvRmsTolerance = 0x1p-8;
constexpr double kMinDot = 1e-6;  // the gate's clamp

// Distance of neighbouring bf16 numbers at |value|: 8 significant bits.
double Bf16Ulp(double value) {
  if (value == 0) return 0x1p-133;
  int exponent = 0;
  std::frexp(value, &exponent);  // |value| in [2^(exponent-1), 2^exponent)
  return std::ldexp(1.0, std::max(exponent - 8, -133));
}

template <typename T>
double MeanSquare(absl::Span<const T> values) {
  double sum = 0;
  for (T value : values) sum += double{value} * double{value};
  return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

bool SameBits(absl::Span<const float> a, absl::Span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double GateOf(double dot) {
  return 1 / (1 + std::exp(-std::copysign(std::sqrt(std::max(std::abs(dot), kMinDot)), dot)));
}

}  // namespace

void StageResult::Add(double error, double tolerance, const std::function<std::string()>& where) {
  ++values_;
  double ratio = error == 0 ? 0 : error / tolerance;
  if (std::isnan(ratio)) ratio = std::numeric_limits<double>::infinity();
  if (!(ratio <= 1)) ++misses_;
  if (ratio > largest_) {
    largest_ = ratio;
    where_ = where();
  }
}

void CheckKv(absl::Span<const double> exact, absl::Span<const float> reply, int64_t dim,
             const std::function<std::string()>& where, StageResult* result) {
  for (size_t start = 0; start < exact.size(); start += dim) {
    const double cancel = kKvRmsTolerance * std::sqrt(MeanSquare(exact.subspan(start, dim)));
    for (size_t i = start; i < start + dim; ++i) {
      result->Add(std::abs(reply[i] - exact[i]), std::max(Bf16Ulp(exact[i]), cancel),
                  [&] { return where() + ", value " + std::to_string(i); });
    }
  }
}

GateBounds BoundGate(double ref_gate, absl::Span<const float> ref_highway, absl::Span<const float> ref_key,
                     absl::Span<const float> highway, absl::Span<const float> key, double eps) {
  if (SameBits(ref_highway, highway) && SameBits(ref_key, key)) return {ref_gate, ref_gate};
  // dot = sum(h * q * k * key) * rstd(h) * rstd(key) / sqrt(dim), so |q * k| <= W bounds how far it can have moved.
  const double ref_scale = 1 / std::sqrt((MeanSquare(ref_highway) + eps) * (MeanSquare(ref_key) + eps));
  const double scale = 1 / std::sqrt((MeanSquare(highway) + eps) * (MeanSquare(key) + eps));
  double moved = 0;
  for (size_t i = 0; i < key.size(); ++i) {
    moved += std::abs(double{highway[i]} * key[i] * scale - double{ref_highway[i]} * ref_key[i] * ref_scale);
  }
  moved *= kMaxGateWeight / std::sqrt(static_cast<double>(key.size()));
  // The gate is monotone in dot; below the clamp only the sign of dot is known.
  const double logit = std::log(ref_gate / (1 - ref_gate));
  const double dot = std::copysign(logit * logit, logit);
  const double clamped = logit * logit <= kMinDot * 1.000001 ? kMinDot : 0;
  return {GateOf(dot - moved - clamped), GateOf(dot + moved + clamped)};
}

double FitGate(const GateBounds& bounds, absl::Span<const float> highway, absl::Span<const float> value,
               absl::Span<const float> out) {
  if (bounds.exact()) return bounds.low;
  double along = 0;
  double square = 0;
  for (size_t i = 0; i < value.size(); ++i) {
    along += double{value[i]} * (double{out[i]} - double{highway[i]});
    square += double{value[i]} * double{value[i]};
  }
  // Where the value is all zero any gate fits. A NaN is clamped to a bound and misses in CheckUpdate.
  const double fitted = square > 0 ? along / square : bounds.low;
  return std::fmin(std::fmax(fitted, bounds.low), bounds.high);
}

void CheckUpdate(double gate, double relative, absl::Span<const float> highway, absl::Span<const float> value,
                 absl::Span<const float> out, const std::function<std::string()>& where, StageResult* result) {
  for (size_t i = 0; i < out.size(); ++i) {
    const double change = gate * value[i];
    const double expected = highway[i] + change;
    const double tolerance =
        kUpdateTolerance * (std::abs(highway[i]) + std::abs(change)) + relative * std::abs(expected);
    result->Add(std::abs(out[i] - expected), tolerance, [&] { return where() + ", value " + std::to_string(i); });
  }
}

}  // namespace engram::client
