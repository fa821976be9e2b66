#include "server/transport/metrics_endpoint.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/registry.h>

#include <exception>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace engram {
namespace {

// Connections that send nothing each hold a thread until the timeout: eight of them do not keep a scrape out.
constexpr char kThreads[] = "9";
constexpr char kRequestTimeoutMs[] = "5000";

}  // namespace

class MetricsEndpoint::Scrape final : public prometheus::Collectable {
 public:
  Scrape(std::shared_ptr<prometheus::Registry> registry, std::function<void()> before)
      : registry_(std::move(registry)), before_(std::move(before)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    before_();
    return registry_->Collect();
  }

 private:
  const std::shared_ptr<prometheus::Registry> registry_;
  const std::function<void()> before_;
};

MetricsEndpoint::MetricsEndpoint() = default;
MetricsEndpoint::~MetricsEndpoint() = default;

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(const std::string& address,
                                                                        const Metrics& metrics,
                                                                        std::function<void()> before_scrape) {
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint);
  endpoint->scrape_ = std::make_shared<Scrape>(metrics.registry(), std::move(before_scrape));
  try {
    endpoint->exposer_ = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", address, "num_threads", kThreads, "request_timeout_ms", kRequestTimeoutMs});
  } catch (const std::exception& e) {  // civetweb's way of saying that it cannot bind
    return absl::UnavailableError(absl::StrCat("--http-listen ", address, ": cannot listen there (", e.what(), ")"));
  }
  endpoint->exposer_->RegisterCollectable(endpoint->scrape_);
  const std::vector<int> ports = endpoint->exposer_->GetListeningPorts();
  endpoint->address_ = absl::StrCat(address.substr(0, address.rfind(':')), ":", ports.empty() ? 0 : ports.front());
  return endpoint;
}

}  // namespace engram
