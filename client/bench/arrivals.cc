#include "client/bench/arrivals.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/bench/token_source.h"

namespace engram::bench {

absl::string_view ArrivalName(ArrivalKind kind) {
  switch (kind) {
    case ArrivalKind::kPoisson:
      return "poisson";
    case ArrivalKind::kConstant:
      return "constant";
    case ArrivalKind::kTrace:
      return "trace";
  }
  return "";
}

Arrivals::Arrivals(std::vector<int64_t> times) : times_(std::move(times)) {
  const auto count = static_cast<int64_t>(times_.size());
  // One step alone, or all at the same time: 1 ms apart, so that time goes on.
  const int64_t span = times_.back() - times_.front();
  period_ = std::max<int64_t>(1'000'000, span + (count > 1 ? span / (count - 1) : 0));
}

int64_t Arrivals::Next() {
  const uint64_t call = calls_++;
  if (kind_ == ArrivalKind::kTrace) {
    const uint64_t round = call / times_.size();
    return times_[call % times_.size()] - times_.front() + static_cast<int64_t>(round) * period_;
  }
  const double due = now_;
  const double mean = 1e9 / rate_;
  // 1 - u is in (0, 1], so the logarithm is finite.
  now_ += kind_ == ArrivalKind::kPoisson ? -std::log(1 - UnitOf(Mix(seed_ ^ Mix(call)))) * mean : mean;
  return static_cast<int64_t>(due);
}

}  // namespace engram::bench
