// When the calls of an open loop are due.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace engram::bench {

enum class ArrivalKind {
  kPoisson,   // exponential gaps, as calls of many independent callers have
  kConstant,  // equal gaps
  kTrace,     // the trace's own times, over and over
};

absl::string_view ArrivalName(ArrivalKind kind);  // "poisson"

// Not thread-safe; the same for the same seed.
class Arrivals {
 public:
  // `rate` calls per second, > 0. Not kTrace.
  Arrivals(ArrivalKind kind, double rate, uint64_t seed) : kind_(kind), rate_(rate), seed_(seed) {}

  // The times of a trace's steps in nanoseconds, ascending, at least one; repeated with the trace's mean gap between
  // the last step and the next first one.
  explicit Arrivals(std::vector<int64_t> times);

  // Nanoseconds from the beginning until the next call is due; never less than the one before.
  int64_t Next();

 private:
  ArrivalKind kind_ = ArrivalKind::kTrace;
  double rate_ = 0;
  uint64_t seed_ = 0;
  double now_ = 0;  // nanoseconds
  uint64_t calls_ = 0;
  std::vector<int64_t> times_;
  int64_t period_ = 0;
};

}  // namespace engram::bench
