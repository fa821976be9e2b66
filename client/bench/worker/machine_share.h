// How much of the time something was busy: the server's engine, by its metrics; this machine's processors.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace engram::bench {

// Seconds that the engine has computed so far: the sums of stage_duration_seconds of hash, gather, project and gate in
// the text of /metrics. NOT_FOUND where one of them is missing.
absl::StatusOr<double> EngineSeconds(absl::string_view metrics_text);

// GET http://`address`/metrics of "host:port", body alone. UNAVAILABLE names the address.
absl::StatusOr<std::string> ReadMetrics(const std::string& address);

// Of a span of time: begun when made, and asked for at its end.
class BusyShare {
 public:
  // `metrics` as in ReadMetrics; empty: no server is asked.
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
  std::optional<double> ReadEngine();

  const std::string metrics_;
  absl::Duration began_;
  std::optional<double> engine_began_, engine_, machine_;
  std::optional<Jiffies> jiffies_began_;
  std::string fault_;
};

}  // namespace engram::bench
