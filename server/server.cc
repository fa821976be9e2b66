#include "server/server.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/admission/budget.h"
#include "server/engine/backend_factory.h"
#include "server/engine/cpu_backend.h"
#include "server/engine/engine.h"
#include "server/engine/probe.h"
#include "server/engine/prober.h"
#include "server/engine/staging.h"
#include "server/engine/ticket_store.h"
#include "server/observe/log.h"
#include "server/observe/metrics.h"
#include "server/regions/region_listener.h"
#include "server/regions/region_store.h"
#include "server/session/session_table.h"
#include "server/transport/engram_service.h"
#include "server/transport/listeners.h"
#include "server/transport/metrics_endpoint.h"

namespace engram {
namespace {

// Of --max-queue-bytes, what may be arriving. gRPC narrows its windows as its quota fills, from a fifth on: with a
// quota as large as the queue's, eight callers of 42 MB each were slowed to a few calls a second on a busy machine.
constexpr int64_t kArrivingShare = 4;
// How long a draining server goes on refusing calls by name before it closes connections: a few round trips.
constexpr absl::Duration kRefusing = absl::Seconds(1);
// Streams that are nobody's call (health watches, reflection) end after it.
constexpr absl::Duration kLastWords = absl::Milliseconds(200);

uint64_t RandomEpoch() {
  std::random_device random;
  uint64_t epoch = 0;
  while (epoch == 0) epoch = uint64_t{random()} << 32 | random();
  return epoch;
}

// "" where it is not known.
std::string ContentHex(const EngramModel& model) {
  return model.content_digest().has_value() ? DigestHex(*model.content_digest()) : "";
}

absl::StatusOr<std::shared_ptr<const EngramModel>> LoadModel(const ServerOptions& options, Residency residency) {
  const absl::Time start = absl::Now();
  absl::Time last_line = start;
  LoadOptions load;
  load.residency = residency;
  load.layers = options.layers;
  load.threads = options.threads;
  load.progress = [start, &last_line](const LoadProgress& progress) {
    const absl::Time now = absl::Now();
    const bool over = progress.bytes_done == progress.bytes_total;
    if (!over && now - last_line < absl::Seconds(2)) return;
    last_line = now;
    const double seconds = absl::ToDoubleSeconds(now - start);
    const double rate = static_cast<double>(progress.bytes_done) / (seconds > 0 ? seconds : 1e-9);
    const double left = rate > 0 ? static_cast<double>(progress.bytes_total - progress.bytes_done) / rate : 0;
    Log(LogLevel::kInfo, "loading",
        {{"done",
          absl::StrFormat("%.1f%%", progress.bytes_total > 0 ? 100.0 * static_cast<double>(progress.bytes_done) /
                                                                   static_cast<double>(progress.bytes_total)
                                                             : 100.0)},
         {"rate", absl::StrFormat("%.2f GB/s", rate / 1e9)},
         {"left", absl::StrFormat("%.0f s", left)}});
  };
  load.warn = [](const std::string& line) { Log(LogLevel::kWarning, line); };
  absl::StatusOr<std::shared_ptr<const EngramModel>> model = EngramModel::Load(options.model, load);
  if (!model.ok()) return model.status();
  Log(LogLevel::kInfo, "model loaded",
      {{"path", options.model},
       {"layers", absl::StrCat((*model)->layers().size())},
       {"hash_digest", DigestHex((*model)->hash_digest())},
       {"config_digest", DigestHex((*model)->config_digest())},
       {"content_digest", ContentHex(**model)},
       {"took", absl::FormatDuration(absl::Now() - start)}});
  return model;
}

bool SharesMemory(const ServerOptions& options) { return options.shm_listen != "off"; }

std::string ShmPath(const ServerOptions& options) {
  return std::string(absl::StripPrefix(options.shm_listen, "unix:"));
}

CallLimits LimitsOf(const ServerOptions& options) {
  return {.max_call_tokens = options.max_queue_tokens,
          .max_message_bytes = options.max_message_bytes,
          .position_limit = options.position_limit,
          .session_window = options.session_window,
          .prepare_memory_bytes = options.prepare_memory_bytes,
          .ticket_ttl_ms = options.ticket_ttl_ms};
}

// What a backend tells of itself, from its first probe on: before there is a server to tell, it is kept. Thread-safe.
class BackendNews {
 public:
  struct Listener {
    std::function<void()> failed;
    std::function<void(const absl::Status&)> broken;
  };

  void Failed() {
    absl::MutexLock lock(&mutex_);
    if (listener_.failed) listener_.failed();
  }
  void Broken(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    broken_ = status;
    if (listener_.broken) listener_.broken(status);
  }
  // Empty functions: nobody listens, and none of the last listener's is running.
  void Tell(Listener listener) {
    absl::MutexLock lock(&mutex_);
    listener_ = std::move(listener);
    if (listener_.broken && !broken_.ok()) listener_.broken(broken_);
  }

 private:
  absl::Mutex mutex_;
  Listener listener_ ABSL_GUARDED_BY(mutex_);
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

BackendOptions BackendOptionsOf(const ServerOptions& options) {
  BackendOptions backend;
  backend.kind = options.backend;
  backend.tables = options.residency;
  backend.cpu_isa = options.cpu_isa;
  backend.device = options.device;
  backend.cuda_module = options.cuda_module;
  backend.threads = options.threads;
  backend.max_batch_tokens = options.max_batch_tokens;
  backend.prepare_memory_bytes = options.prepare_memory_bytes;
  return backend;
}

class RunningServer final : public Server {
 public:
  RunningServer(const ServerOptions& options, Serving serving, std::shared_ptr<BackendNews> news,
                std::function<void()> broken)
      : options_(options),
        model_(std::move(serving.model)),
        news_(std::move(news)),
        broken_(std::move(broken)),
        budget_({.max_tokens = options.max_queue_tokens, .max_bytes = options.max_queue_bytes}),
        sessions_({.max_ngram = model_->geometry().max_ngram,
                   .window = options.session_window,
                   .memory_bytes = options.session_memory_bytes,
                   .ttl = absl::Seconds(options.session_ttl_secs)}),
        tickets_({.epoch = epoch_,
                  .memory_bytes = options.prepare_memory_bytes,
                  .ttl = absl::Milliseconds(options.ticket_ttl_ms)}),
        staging_(options.max_queue_bytes, serving.backend->staging_source()),
        regions_({.memory_bytes = options.shm_memory_bytes}),
        engine_(model_, std::move(serving.backend), ShapeOf(*model_), EngineOptions{options.max_batch_tokens},
                metrics_),
        service_({.model = model_,
                  .shape = ShapeOf(*model_),
                  .limits = LimitsOf(options),
                  .identity = {epoch_, engine_.backend().name(), serving.isa, engine_.backend().numerics_id(),
                               TableHomeName(serving.tables)},
                  .budget = budget_,
                  .sessions = sessions_,
                  .tickets = tickets_,
                  .engine = engine_,
                  .staging = staging_,
                  .metrics = metrics_,
                  .regions = SharesMemory(options) ? &regions_ : nullptr,
                  .region_socket = ShmPath(options)}) {
    metrics_.SetModel(DigestHex(model_->hash_digest()), DigestHex(model_->config_digest()), ContentHex(*model_),
                      engine_.backend().name(), serving.isa, engine_.backend().numerics_id());
    for (const EngramLayer& layer : model_->layers()) {
      metrics_.SetTableBytes(layer.layer_id, TableHomeName(serving.tables), layer.table.rows * kernels::kQ2KBlockBytes);
    }
    for (const CudaMemoryPlan::Item& item : serving.memory) {
      if (item.on_device) metrics_.SetGpuMemory(item.name, item.bytes);
    }
    news_->Tell({[this] { metrics_.CudaFailed(); }, [this](const absl::Status& status) { Broken(status); }});
  }
  ~RunningServer() override { news_->Tell({}); }

  // The golden-row probe at load. A failure is of the model or of this machine: it must not serve.
  absl::Status ProbeAtLoad() {
    const absl::Time start = absl::Now();
    absl::StatusOr<std::unique_ptr<const Probe>> probe = Probe::Make(model_, options_.threads);
    if (!probe.ok()) return probe.status();
    probe_ = *std::move(probe);
    const absl::Status status = probe_->Run(engine_);
    metrics_.ProbeRan(status.ok());
    if (status.ok()) {
      Log(LogLevel::kInfo, "probe passed",
          {{"rows", absl::StrCat(probe_->rows())}, {"took", absl::FormatDuration(absl::Now() - start)}});
    }
    return status;
  }

  absl::Status Listen() {
    if (options_.http_listen != "off") {
      absl::StatusOr<std::unique_ptr<MetricsEndpoint>> metrics =
          MetricsEndpoint::Start(options_.http_listen, metrics_, [this] { RefreshGauges(); });
      if (!metrics.ok()) return metrics.status();
      metrics_endpoint_ = *std::move(metrics);
    }
    if (SharesMemory(options_)) {
      absl::StatusOr<std::unique_ptr<RegionListener>> regions =
          RegionListener::Start({.path = ShmPath(options_)}, regions_);
      if (!regions.ok()) return regions.status();
      region_listener_ = *std::move(regions);
    }
    absl::StatusOr<std::unique_ptr<Listeners>> listeners =
        Listeners::Start({.addresses = options_.listen,
                          .insecure = options_.insecure,
                          .max_message_bytes = options_.max_message_bytes,
                          .max_arriving_bytes = kArrivingShare * options_.max_queue_bytes,
                          .max_connection_age = absl::Seconds(options_.max_connection_age_secs),
                          .max_connection_age_grace = absl::Seconds(options_.max_connection_age_grace_secs)},
                         service_);
    if (!listeners.ok()) return listeners.status();
    {
      absl::MutexLock lock(&health_mutex_);
      listeners_ = *std::move(listeners);
      TellHealth();
    }
    if (options_.probe_interval_secs > 0) {
      prober_ = std::make_unique<Prober>(*probe_, engine_, absl::Seconds(options_.probe_interval_secs),
                                         [this](const absl::Status& status) { Probed(status); });
    }
    return absl::OkStatus();
  }

  std::vector<std::string> addresses() const override { return listeners_->addresses(); }
  std::string http_address() const override { return metrics_endpoint_ == nullptr ? "" : metrics_endpoint_->address(); }

  std::string shm_address() const override { return SharesMemory(options_) ? options_.shm_listen : ""; }

  void Drain() override { Drain(absl::Seconds(options_.drain_delay_secs), kRefusing); }
  void DrainNow() override { Drain(absl::ZeroDuration(), absl::ZeroDuration()); }

 private:
  void Drain(absl::Duration delay, absl::Duration refusing) {
    Log(LogLevel::kInfo, "draining", {{"delay", absl::FormatDuration(delay)}});
    {
      absl::MutexLock lock(&health_mutex_);
      draining_ = true;
      TellHealth();
    }
    service_.AnnounceDrain();
    absl::SleepFor(delay);
    // From here on calls are refused with DRAINING, which sends clients elsewhere. gRPC's own shutdown answers calls
    // that cross it with a bare CANCELLED, so it comes last: when nothing is in flight, and a little later.
    budget_.Close();
    regions_.Close();
    service_.CloseStreams();
    const absl::Time end = absl::Now() + absl::Seconds(options_.drain_timeout_secs);
    while (service_.in_flight() > 0 && absl::Now() < end) absl::SleepFor(absl::Milliseconds(5));
    absl::SleepFor(std::min(refusing, delay));
    listeners_->Shutdown(kLastWords);
    Log(LogLevel::kInfo, "drained");
  }

  // On a thread of the backend's.
  void Broken(const absl::Status& status) {
    Log(LogLevel::kError, "backend broken", {{"status", std::string(status.message())}});
    {
      absl::MutexLock lock(&health_mutex_);
      backend_broken_ = true;
      TellHealth();
    }
    broken_();
  }

  // A probe in service is over.
  void Probed(const absl::Status& status) {
    metrics_.ProbeRan(status.ok());
    absl::MutexLock lock(&health_mutex_);
    if (!status.ok()) Log(LogLevel::kError, "probe failed", {{"found", std::string(status.message())}});
    if (status.ok() == probe_passed_) return;
    probe_passed_ = status.ok();
    TellHealth();
    if (probe_passed_) Log(LogLevel::kInfo, "probe passed again");
  }

  void TellHealth() ABSL_EXCLUSIVE_LOCKS_REQUIRED(health_mutex_) {
    if (listeners_ != nullptr) listeners_->SetServing(probe_passed_ && !draining_ && !backend_broken_);
  }

  void RefreshGauges() {
    metrics_.SetQueueTokens(budget_.taken().tokens);
    const SessionStats stats = sessions_.stats();
    const TicketStats tickets = tickets_.stats();
    const StagingStats staging = staging_.stats();
    const StagingStats prepared = engine_.backend().prepared_stats();
    metrics_.SetStaging(staging.in_use_bytes + prepared.in_use_bytes, staging.idle_bytes + prepared.idle_bytes);
    metrics_.SetTickets(tickets.tickets, tickets.bytes);
    const RegionStats regions = regions_.stats();
    metrics_.SetRegions(regions.regions, regions.bytes);
    metrics_.SetProcess(ReadProcessUsage());
    metrics_.SetSessions(stats.sessions, stats.bytes, stats.evicted_idle, stats.evicted_memory);
  }

  // In the order of the data's flow reversed: what is used stands before its user, and outlives it.
  const ServerOptions options_;
  Metrics metrics_;
  const std::shared_ptr<const EngramModel> model_;
  const std::shared_ptr<BackendNews> news_;
  const std::function<void()> broken_;
  const uint64_t epoch_ = RandomEpoch();
  Budget budget_;
  SessionTable sessions_;
  TicketStore tickets_;
  StagingPool staging_;
  RegionStore regions_;
  Engine engine_;
  EngramService service_;
  std::unique_ptr<MetricsEndpoint> metrics_endpoint_;
  std::unique_ptr<RegionListener> region_listener_;
  std::unique_ptr<Listeners> listeners_;

  absl::Mutex health_mutex_;
  bool draining_ ABSL_GUARDED_BY(health_mutex_) = false;
  bool backend_broken_ ABSL_GUARDED_BY(health_mutex_) = false;
  bool probe_passed_ ABSL_GUARDED_BY(health_mutex_) = true;
  std::unique_ptr<const Probe> probe_;
  std::unique_ptr<Prober> prober_;
};

// What can be known before tables are read, which takes minutes at the released size.
absl::Status CheckBeforeLoading(const ServerOptions& options) {
  std::vector<std::string> listen = options.listen;
  if (const absl::Status status = CheckFree(listen); !status.ok()) return status;
  const auto named = [](const absl::Status& status, absl::string_view flag) {
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat(flag, absl::StripPrefix(status.message(), "--listen")));
  };
  if (SharesMemory(options)) {
    listen.push_back(options.shm_listen);
    if (absl::Status status = named(CheckFree({options.shm_listen}), "--shm-listen"); !status.ok()) return status;
    if (const absl::Status twice = CheckFree(listen); !twice.ok()) return twice;
  }
  if (options.http_listen == "off") return absl::OkStatus();
  return named(CheckFree({options.http_listen}), "--http-listen");
}

// Does a message hold a token at all?
absl::Status CheckMessageBytes(const ServerOptions& options, const EngramModel& model) {
  const EngramGeometry& g = model.geometry();
  const int64_t least = std::max(g.highway_values() * 4, g.outputs() * 2);
  if (options.max_message_bytes >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--max-message-bytes ", options.max_message_bytes, ": one token of this model takes up to ", least));
}

absl::StatusOr<std::shared_ptr<const EngramModel>> LoadChecked(const ServerOptions& options, Residency residency) {
  absl::StatusOr<std::shared_ptr<const EngramModel>> model = LoadModel(options, residency);
  if (!model.ok()) return model;
  if (const absl::Status status = CheckMessageBytes(options, **model); !status.ok()) return status;
  return model;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::BuildAndStart(const ServerOptions& options,
                                                              std::function<void()> broken) {
  if (const absl::Status status = CheckBeforeLoading(options); !status.ok()) return status;
  auto news = std::make_shared<BackendNews>();
  BackendOptions backend = BackendOptionsOf(options);
  backend.failed = [news](const absl::Status&) { news->Failed(); };
  backend.broken = [news](const absl::Status& status) { news->Broken(status); };
  absl::StatusOr<Serving> serving =
      MakeServing(backend, [&options](Residency residency) { return LoadChecked(options, residency); });
  if (!serving.ok()) return serving.status();
  auto server = std::make_unique<RunningServer>(options, *std::move(serving), std::move(news), std::move(broken));
  if (const absl::Status status = server->ProbeAtLoad(); !status.ok()) return status;
  if (const absl::Status status = server->Listen(); !status.ok()) return status;
  return server;
}

absl::Status Server::CheckConfig(const ServerOptions& options) {
  if (const absl::Status status = CheckBeforeLoading(options); !status.ok()) return status;
  return CheckServing(BackendOptionsOf(options),
                      [&options](Residency residency) { return LoadChecked(options, residency); });
}

}  // namespace engram
