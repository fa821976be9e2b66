// Compares a server's replies with a fixture, within the fixture's tolerances.
//
// kv: within one bf16 ulp of the exact value, or 2^-8 of the rms of that key copy (or of the value) where terms cancel.
// highway: within 2^-20 * (|h| + |gate * value|) of h + gate * value, with the value of the server's own kv reply; for
// a bf16 highway 2^-8 * |out| on top.
//
// The gate. The fixture holds the f64 gate for its own highway and its own kv, but neither q nor k, so the gate of
// other inputs cannot be computed here. Therefore:
// - Where the key the server sent and the highway it got are the fixture's bit for bit (nearly always), the fixture's
//   f64 gate is the judge.
// - Elsewhere (a key one bf16 ulp off; a highway rounded to bf16) every value of the copy must still be h + g * value
//   for one g, within the same tolerance, and g must lie within what the known change of the inputs can do to the
//   fixture's gate, for |q * k| <= kMaxGateWeight. That bound is wider: such copies are counted, never skipped.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/types/span.h"

namespace engram::client {

// The tolerances above in the words of the fixtures; a fixture that says something else is not checked as it asks.
inline constexpr char kKvToleranceText[] =
    "within one bf16 ulp of kv_exact_f64, or within 2^-8 * rms of that key copy or value where terms cancel";
inline constexpr char kOutToleranceText[] =
    "against the f64 gate applied to the server's own KV reply: 2^-20 * (|h| + |gate*value|) for f32; bf16: round the "
    "input highway to bf16 first and add 2^-8 * |out|";

// Of q_weight * k_weight, element by element; both are norm weights around 1, the fixtures' reach 2.8.
inline constexpr double kMaxGateWeight = 4.0;

// What was compared in one stage and how it went. Errors are in units of their tolerance: above 1 is a miss.
class StageResult {
 public:
  explicit StageResult(std::string name) : name_(std::move(name)) {}

  // `where` is asked only when this is the largest so far. A NaN error is a miss.
  void Add(double error, double tolerance, const std::function<std::string()>& where);

  const std::string& name() const { return name_; }
  int64_t values() const { return values_; }
  int64_t misses() const { return misses_; }
  double largest() const { return largest_; }
  const std::string& where() const { return where_; }

  // A stage in which nothing was compared has not passed.
  bool passed() const { return misses_ == 0 && values_ > 0; }

 private:
  std::string name_;
  int64_t values_ = 0;
  int64_t misses_ = 0;
  double largest_ = -1;
  std::string where_;
};

// One token of one layer: kv, `copies` keys and then the value, each `dim`.
void CheckKv(absl::Span<const double> exact, absl::Span<const float> reply, int64_t dim,
             const std::function<std::string()>& where, StageResult* result);

// The gate of one (token, copy) as far as it is known.
struct GateBounds {
  double low = 0;
  double high = 0;
  bool exact() const { return low == high; }
};

// What the gate of (highway, key) can be, given that of the fixture's (ref_highway, ref_key). All spans are [dim].
GateBounds BoundGate(double ref_gate, absl::Span<const float> ref_highway, absl::Span<const float> ref_key,
                     absl::Span<const float> highway, absl::Span<const float> key, double eps);

// The g of `bounds` for which highway + g * value comes nearest to `out`, in least squares.
double FitGate(const GateBounds& bounds, absl::Span<const float> highway, absl::Span<const float> value,
               absl::Span<const float> out);

// `out` of one (token, copy) against highway + gate * value; `relative` is 0 for an f32 highway, 2^-8 for bf16.
void CheckUpdate(double gate, double relative, absl::Span<const float> highway, absl::Span<const float> value,
                 absl::Span<const float> out, const std::function<std::string()>& where, StageResult* result);

}  // namespace engram::client
