#include "server/observe/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"

namespace engram {
namespace {

using prometheus::BuildCounter;
using prometheus::BuildGauge;
using prometheus::BuildHistogram;

// From what a one-token gate takes to what a long prefill takes: 10 us to 10 s, three a decade.
const prometheus::Histogram::BucketBoundaries kSecondsBuckets = {
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 5, 10};
const prometheus::Histogram::BucketBoundaries kTokensBuckets = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096};

constexpr std::array<absl::string_view, 9> kStageNames = {"decode", "queue",  "hash", "gather", "project",
                                                          "gate",   "encode", "h2d",  "d2h"};

}  // namespace

struct Metrics::Series {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();

  prometheus::Family<prometheus::Counter>& requests =
      BuildCounter().Name("engram_requests_total").Help("Calls ended, by method and gRPC code.").Register(*registry);
  prometheus::Family<prometheus::Histogram>& duration = BuildHistogram()
                                                            .Name("engram_request_duration_seconds")
                                                            .Help("From message received to reply handed to gRPC.")
                                                            .Register(*registry);
  prometheus::Family<prometheus::Counter>& bytes = BuildCounter()
                                                       .Name("engram_request_bytes_total")
                                                       .Help("Message bytes, in: requests, out: replies.")
                                                       .Register(*registry);
  prometheus::Counter& bytes_in = bytes.Add({{"direction", "in"}});
  prometheus::Counter& bytes_out = bytes.Add({{"direction", "out"}});
  prometheus::Gauge& inflight =
      BuildGauge().Name("engram_inflight_requests").Help("Calls not yet answered.").Register(*registry).Add({});
  prometheus::Family<prometheus::Counter>& rejected = BuildCounter()
                                                          .Name("engram_rejected_total")
                                                          .Help("Calls refused, by the reason of their first offender.")
                                                          .Register(*registry);
  prometheus::Family<prometheus::Histogram>& stage =
      BuildHistogram()
          .Name("engram_stage_duration_seconds")
          .Help("Time of a stage: decode, queue and encode per call, the others per batch.")
          .Register(*registry);
  std::array<prometheus::Histogram*, kStageNames.size()> stages{};
  prometheus::Histogram& batch_tokens = BuildHistogram()
                                            .Name("engram_batch_tokens")
                                            .Help("Tokens of a batch.")
                                            .Register(*registry)
                                            .Add({}, kTokensBuckets);
  prometheus::Family<prometheus::Counter>& tokens =
      BuildCounter().Name("engram_tokens_total").Help("Tokens served, by layer and form.").Register(*registry);
  prometheus::Counter& rows =
      BuildCounter().Name("engram_rows_gathered_total").Help("Table rows decoded.").Register(*registry).Add({});
  prometheus::Counter& dead = BuildCounter()
                                  .Name("engram_dead_tokens_total")
                                  .Help("Tokens that took no part in the hash: masked or unmapped.")
                                  .Register(*registry)
                                  .Add({});
  prometheus::Gauge& queue_tokens = BuildGauge()
                                        .Name("engram_queue_tokens")
                                        .Help("Tokens admitted and not yet answered.")
                                        .Register(*registry)
                                        .Add({});
  prometheus::Gauge& sessions = BuildGauge().Name("engram_sessions").Help("Sessions kept.").Register(*registry).Add({});
  prometheus::Gauge& session_bytes =
      BuildGauge().Name("engram_session_bytes").Help("Memory of the sessions kept.").Register(*registry).Add({});
  prometheus::Family<prometheus::Counter>& evictions = BuildCounter()
                                                           .Name("engram_session_evictions_total")
                                                           .Help("Sessions forgotten, by what asked for it.")
                                                           .Register(*registry);
  prometheus::Counter& evicted_idle = evictions.Add({{"reason", "idle"}});
  prometheus::Counter& evicted_memory = evictions.Add({{"reason", "memory"}});
  prometheus::Gauge& tickets =
      BuildGauge().Name("engram_tickets").Help("Prepared results kept.").Register(*registry).Add({});
  prometheus::Gauge& prepare_bytes =
      BuildGauge().Name("engram_prepare_bytes").Help("Memory of the prepared results.").Register(*registry).Add({});
  prometheus::Family<prometheus::Gauge>& staging =
      BuildGauge()
          .Name("engram_staging_bytes")
          .Help("Memory of highways, results and prepared kv, by whether a call or ticket holds it.")
          .Register(*registry);
  prometheus::Gauge& staging_in_use = staging.Add({{"state", "in_use"}});
  prometheus::Gauge& staging_idle = staging.Add({{"state", "idle"}});
  prometheus::Gauge& regions = BuildGauge()
                                   .Name("engram_shm_regions")
                                   .Help("Regions of memory shared with workers.")
                                   .Register(*registry)
                                   .Add({});
  prometheus::Gauge& region_bytes = BuildGauge()
                                        .Name("engram_shm_bytes")
                                        .Help("Their memory, and that of ended ones that calls still use.")
                                        .Register(*registry)
                                        .Add({});
  prometheus::Counter& probes =
      BuildCounter().Name("engram_probes_total").Help("Golden-row probes run.").Register(*registry).Add({});
  prometheus::Counter& probe_failures = BuildCounter()
                                            .Name("engram_probe_failures_total")
                                            .Help("Golden-row probes that found a wrong row or a wrong step.")
                                            .Register(*registry)
                                            .Add({});
  prometheus::Counter& cpu_seconds = BuildCounter()
                                         .Name("process_cpu_seconds_total")
                                         .Help("User and system CPU time of the process.")
                                         .Register(*registry)
                                         .Add({});
  prometheus::Gauge& resident_bytes = BuildGauge()
                                          .Name("process_resident_memory_bytes")
                                          .Help("Memory of the process that is resident, mapped files included.")
                                          .Register(*registry)
                                          .Add({});
  prometheus::Gauge& open_fds =
      BuildGauge().Name("process_open_fds").Help("Open file descriptors.").Register(*registry).Add({});
  prometheus::Gauge& start_seconds = BuildGauge()
                                         .Name("process_start_time_seconds")
                                         .Help("When the process started, seconds since 1970.")
                                         .Register(*registry)
                                         .Add({});
  prometheus::Family<prometheus::Gauge>& model =
      BuildGauge().Name("engram_model_info").Help("1; the labels say what is served.").Register(*registry);
  prometheus::Family<prometheus::Gauge>& gpu_memory = BuildGauge()
                                                          .Name("engram_gpu_memory_bytes")
                                                          .Help("Memory taken of the GPU at start, by what for.")
                                                          .Register(*registry);
  prometheus::Counter& cuda_errors = BuildCounter()
                                         .Name("engram_cuda_errors_total")
                                         .Help("Batches that failed on the GPU.")
                                         .Register(*registry)
                                         .Add({});
  prometheus::Family<prometheus::Gauge>& table_bytes =
      BuildGauge().Name("engram_table_bytes").Help("Bytes of a layer's table.").Register(*registry);
};

Metrics::Metrics() : series_(std::make_unique<Series>()) {
  for (size_t i = 0; i < kStageNames.size(); ++i) {
    series_->stages[i] = &series_->stage.Add({{"stage", std::string(kStageNames[i])}}, kSecondsBuckets);
  }
}

Metrics::~Metrics() = default;

void Metrics::CallStarted() { series_->inflight.Increment(); }

void Metrics::CallEnded(absl::string_view method, absl::string_view code, absl::Duration took, int64_t request_bytes,
                        int64_t reply_bytes) {
  series_->inflight.Decrement();
  series_->requests.Add({{"method", std::string(method)}, {"code", std::string(code)}}).Increment();
  series_->duration.Add({{"method", std::string(method)}}, kSecondsBuckets).Observe(absl::ToDoubleSeconds(took));
  series_->bytes_in.Increment(static_cast<double>(request_bytes));
  series_->bytes_out.Increment(static_cast<double>(reply_bytes));
}

void Metrics::Refused(absl::string_view reason) {
  series_->rejected.Add({{"reason", std::string(reason)}}).Increment();
}

void Metrics::StageTook(Stage stage, absl::Duration took) {
  series_->stages[static_cast<size_t>(stage)]->Observe(absl::ToDoubleSeconds(took));
}

void Metrics::BatchRan(int64_t tokens) { series_->batch_tokens.Observe(static_cast<double>(tokens)); }

void Metrics::TokensDone(int64_t layer_id, absl::string_view form, int64_t tokens) {
  series_->tokens.Add({{"layer", absl::StrCat(layer_id)}, {"form", std::string(form)}})
      .Increment(static_cast<double>(tokens));
}

void Metrics::RowsGathered(int64_t rows) { series_->rows.Increment(static_cast<double>(rows)); }

void Metrics::DeadTokens(int64_t tokens) { series_->dead.Increment(static_cast<double>(tokens)); }

void Metrics::SetQueueTokens(int64_t tokens) { series_->queue_tokens.Set(static_cast<double>(tokens)); }

void Metrics::SetSessions(int64_t sessions, int64_t bytes, int64_t evicted_idle, int64_t evicted_memory) {
  series_->sessions.Set(static_cast<double>(sessions));
  series_->session_bytes.Set(static_cast<double>(bytes));
  // The table keeps its own running totals; a counter moves by the difference.
  series_->evicted_idle.Increment(static_cast<double>(evicted_idle) - series_->evicted_idle.Value());
  series_->evicted_memory.Increment(static_cast<double>(evicted_memory) - series_->evicted_memory.Value());
}

void Metrics::SetTickets(int64_t tickets, int64_t bytes) {
  series_->tickets.Set(static_cast<double>(tickets));
  series_->prepare_bytes.Set(static_cast<double>(bytes));
}

void Metrics::SetStaging(int64_t in_use_bytes, int64_t idle_bytes) {
  series_->staging_in_use.Set(static_cast<double>(in_use_bytes));
  series_->staging_idle.Set(static_cast<double>(idle_bytes));
}

void Metrics::SetRegions(int64_t regions, int64_t bytes) {
  series_->regions.Set(static_cast<double>(regions));
  series_->region_bytes.Set(static_cast<double>(bytes));
}

void Metrics::ProbeRan(bool passed) {
  series_->probes.Increment();
  if (!passed) series_->probe_failures.Increment();
}

void Metrics::SetModel(absl::string_view hash_digest, absl::string_view config_digest, absl::string_view content_digest,
                       absl::string_view backend, absl::string_view isa, absl::string_view numerics_id) {
  series_->model
      .Add({{"hash_digest", std::string(hash_digest)},
            {"config_digest", std::string(config_digest)},
            {"content_digest", std::string(content_digest)},
            {"backend", std::string(backend)},
            {"isa", std::string(isa)},
            {"numerics_id", std::string(numerics_id)}})
      .Set(1);
}

void Metrics::SetProcess(const ProcessUsage& usage) {
  // The kernel keeps the total; a counter moves by the difference, and never back (two scrapes may cross).
  const double more = usage.cpu_seconds - series_->cpu_seconds.Value();
  if (more > 0) series_->cpu_seconds.Increment(more);
  series_->resident_bytes.Set(static_cast<double>(usage.resident_bytes));
  series_->open_fds.Set(static_cast<double>(usage.open_fds));
  series_->start_seconds.Set(usage.start_seconds);
}

void Metrics::SetGpuMemory(absl::string_view kind, int64_t bytes) {
  series_->gpu_memory.Add({{"kind", std::string(kind)}}).Set(static_cast<double>(bytes));
}

void Metrics::CudaFailed() { series_->cuda_errors.Increment(); }

void Metrics::SetTableBytes(int64_t layer_id, absl::string_view residency, int64_t bytes) {
  series_->table_bytes.Add({{"layer", absl::StrCat(layer_id)}, {"residency", std::string(residency)}})
      .Set(static_cast<double>(bytes));
}

std::shared_ptr<prometheus::Registry> Metrics::registry() const { return series_->registry; }

}  // namespace engram
