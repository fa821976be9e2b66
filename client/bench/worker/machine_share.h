// How much of the time something was busy: the server's engine, by its metrics; this machine's processors.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "client/bench/server_metrics.h"

namespace engram::bench {

// Seconds that the engine has computed between two readings of the server's metrics: hash, gather, project and gate.
// None where the server counts none of them.
std::optional<double> EngineSeconds(const ServerChange& change);

// Of a span of time: begun when made, and asked for at its end.
class BusyShare {
 public:
  // `metrics` as ReadMetrics takes it; empty: no server is asked.
  explicit BusyShare(std::string metrics) : metrics_(std::move(metrics)) {}

  void Begin();
  void End();

  // Of the engine's one thread, 0 to about 1; none where the metrics could not be read.
  std::optional<double> engine() const { return engine_; }
  // Of all processors of this machine, by /proc/stat.
  std::optional<double> machine() const { return machine_; }
  // Why engine() is none.
  const std::string& fault() const { return fault_; }

 private:
  struct Jiffies {
    double busy = 0, all = 0;
  };
  static std::optional<Jiffies> ReadJiffies();
  std::optional<MetricValues> ReadServer();

  const std::string metrics_;
  absl::Duration began_;
  std::optional<MetricValues> server_began_;
  std::optional<double> engine_, machine_;
  std::optional<Jiffies> jiffies_began_;
  std::string fault_;
};

}  // namespace engram::bench
