// GET /metrics for Prometheus, on a listener of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/observe/metrics.h"

namespace prometheus {
class Exposer;
}

namespace engram {

class MetricsEndpoint {
 public:
  // Serves until destroyed. `address`: "host:port". `before_scrape` is called for each scrape, to bring gauges up to
  // date.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Start(const std::string& address, const Metrics& metrics,
                                                                std::function<void()> before_scrape);
  ~MetricsEndpoint();

  // With the port that was chosen in place of 0.
  const std::string& address() const { return address_; }

 private:
  class Scrape;
  MetricsEndpoint();

  std::string address_;
  std::shared_ptr<Scrape> scrape_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace engram
