// What the server says of itself, before and after: its /metrics, read over plain HTTP.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace engram::bench {

// Values by series as Prometheus writes them: `engram_sessions`, `engram_stage_duration_seconds_sum{stage="hash"}`.
using MetricValues = std::map<std::string, double>;

// The text exposition format; lines that are none are passed over.
MetricValues ParseMetrics(absl::string_view text);

// GET http://`address`/metrics. `address` is host:port; "http://" before and "/metrics" behind may stand there too.
// Blocks for at most `timeout`. UNAVAILABLE names the address and why.
absl::StatusOr<MetricValues> ReadMetrics(const std::string& address, absl::Duration timeout);

// What happened between two readings, or the sum of several such times.
struct ServerChange {
  struct Stage {
    double seconds = 0;
    double count = 0;
  };
  std::map<std::string, Stage> stages;                 // by the server's name of it
  double calls = 0;                                    // that ended
  std::optional<double> cpu_seconds;                   // where the server says
  std::optional<double> resident_begin, resident_end;  // bytes, at the first reading and the last

  void Merge(const ServerChange& later);
};

// The names of stages in the order in which a call meets them; others follow.
std::vector<std::string> StageOrder(const ServerChange& change);

ServerChange ChangeBetween(const MetricValues& before, const MetricValues& after);

}  // namespace engram::bench
