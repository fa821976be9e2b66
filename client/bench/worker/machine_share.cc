#include "client/bench/worker/machine_share.h"

#include <fstream>

#include "absl/status/statusor.h"
#include "client/bench/worker/clock.h"

namespace engram::bench {

std::optional<double> EngineSeconds(const ServerChange& change) {
  std::optional<double> seconds;
  for (const char* stage : {"hash", "gather", "project", "gate"}) {
    const auto found = change.stages.find(stage);
    if (found != change.stages.end()) seconds = seconds.value_or(0) + found->second.seconds;
  }
  return seconds;
}

std::optional<BusyShare::Jiffies> BusyShare::ReadJiffies() {
  std::ifstream stat("/proc/stat");
  std::string cpu;
  if (!(stat >> cpu) || cpu != "cpu") return std::nullopt;
  // user nice system idle iowait irq softirq steal
  Jiffies jiffies;
  double value = 0;
  for (int i = 0; i < 8 && stat >> value; ++i) {
    jiffies.all += value;
    if (i != 3 && i != 4) jiffies.busy += value;
  }
  return jiffies;
}

std::optional<MetricValues> BusyShare::ReadServer() {
  if (metrics_.empty()) return std::nullopt;
  absl::StatusOr<MetricValues> values = ReadMetrics(metrics_, absl::Seconds(5));
  if (values.ok()) return *std::move(values);
  fault_ = std::string(values.status().message());
  return std::nullopt;
}

void BusyShare::Begin() {
  server_began_ = ReadServer();
  jiffies_began_ = ReadJiffies();
  began_ = ClockNow();
}

void BusyShare::End() {
  const double wall = absl::ToDoubleSeconds(ClockNow() - began_);
  const std::optional<Jiffies> jiffies = ReadJiffies();
  const std::optional<MetricValues> server = ReadServer();
  if (server_began_.has_value() && server.has_value()) {
    engine_ = EngineSeconds(ChangeBetween(*server_began_, *server));
    if (engine_.has_value()) *engine_ /= wall;
  }
  if (jiffies_began_.has_value() && jiffies.has_value() && jiffies->all > jiffies_began_->all) {
    machine_ = (jiffies->busy - jiffies_began_->busy) / (jiffies->all - jiffies_began_->all);
  }
}

}  // namespace engram::bench
