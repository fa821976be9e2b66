#include "client/bench/load.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/bench/connections.h"
#include "client/bench/echo_process.h"
#include "client/bench/load_run.h"
#include "client/bench/reply_verifier.h"
#include "client/bench/request_composer.h"
#include "client/bench/step_source.h"
#include "client/bench/trace.h"
#include "client/channels.h"
#include "engram/v1/engram.grpc.pb.h"

namespace engram::bench {
namespace {

using client::Form;

// Tickets of a point to each target: enough that one kv stays in no cache for the next call, few enough to make
// quickly.
constexpr int64_t kTicketsPerTarget = 16;

constexpr absl::Duration kMetricsTimeout = absl::Seconds(5);

std::optional<double> Median(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

// All points of a run.
class Load {
 public:
  Load(const LoadOptions& options, const std::function<void(const std::string&)>& progress,
       const std::function<void(const Report&)>& measured)
      : options_(options), progress_(progress), measured_(measured) {}

  absl::StatusOr<Report> Run() {
    if (absl::Status status = Begin(); !status.ok()) return status;
    const std::vector<int64_t> tokens_per_call =
        options_.trace.empty() ? options_.tokens_per_call : std::vector<int64_t>{0};
    for (const Form form : options_.forms) {
      for (const int64_t tokens : tokens_per_call) {
        for (const int64_t concurrency : options_.concurrency) {
          if (absl::Status status = RunPoint(form, tokens, concurrency); !status.ok()) return status;
          measured_(report_);
        }
      }
    }
    return std::move(report_);
  }

 private:
  absl::Status Begin() {
    absl::StatusOr<client::ModelInfo> model = AskModel(options_.targets, absl::Seconds(options_.connect_timeout_secs));
    if (!model.ok()) return model.status();
    model_ = *std::move(model);
    if (absl::Status status = CheckAgainstModel(options_, model_); !status.ok()) return status;
    if (!options_.metrics.empty()) {
      if (const auto values = ReadMetrics(options_.metrics, kMetricsTimeout); !values.ok()) return values.status();
    }
    std::vector<int32_t> layers = options_.layers;
    if (layers.empty()) {
      for (const client::ModelInfo::Layer& layer : model_.layers) layers.push_back(layer.layer_id);
    }
    std::sort(layers.begin(), layers.end());
    int64_t most = *std::max_element(options_.tokens_per_call.begin(), options_.tokens_per_call.end());
    if (!options_.trace.empty()) {
      auto trace = ReadTrace(options_.trace);
      if (!trace.ok()) return trace.status();
      trace_ = *std::move(trace);
      if (absl::Status status = CheckTrace(options_.trace, trace_, options_.forms.front(), options_.dtype,
                                           static_cast<int64_t>(layers.size()), model_);
          !status.ok()) {
        return status;
      }
      for (const TraceStep& step : trace_) most = std::max(most, step.tokens());
    }
    composer_ = std::make_unique<RequestComposer>(model_, layers, options_.dtype, most, options_.seed);
    service_ = std::make_unique<Connections>(options_.targets, options_.channels, options_.client_threads,
                                             model_.limits.max_message_bytes);
    if (options_.echo) {
      if (absl::Status status = BeginEcho(); !status.ok()) return status;
    }
    FillReport(layers);
    if (options_.verify_fraction > 0) {
      progress_(absl::StrCat("loading ", options_.model));
      auto verifier = ReplyVerifier::Make(options_.model, options_.verify_fraction, options_.seed, model_, *composer_);
      if (!verifier.ok()) return verifier.status();
      verifier_ = *std::move(verifier);
      report_.verify_against = verifier_->Against();
    }
    return absl::OkStatus();
  }

  absl::Status BeginEcho() {
    std::string target = options_.echo_target;
    if (target.empty()) {
      for (const std::string& service : options_.targets) {
        if (PathOf(service).same_host) continue;
        return absl::InvalidArgumentError(absl::StrCat(
            "--baseline echo would start its server on this machine, but --target ", service,
            " is another one: run `engram-bench echo-server --listen ADDR` there and name it by --echo-target"));
      }
      auto process = EchoProcess::Start(OwnProgram(), options_.targets.front());
      if (!process.ok()) return process.status();
      echo_process_ = *std::move(process);
      target = echo_process_->address();
    }
    // As many connections as the service gets.
    echo_ = std::make_unique<Connections>(std::vector<std::string>{target},
                                          options_.channels * static_cast<int>(options_.targets.size()),
                                          options_.client_threads, model_.limits.max_message_bytes);
    return ProbeEcho(*echo_, target, absl::Seconds(options_.connect_timeout_secs));
  }

  void FillReport(const std::vector<int32_t>& layers) {
    report_.started = absl::Now();
    report_.version = ENGRAM_VERSION;
    report_.cpu = CpuName();
    report_.cores = static_cast<int>(std::thread::hardware_concurrency());
    report_.targets = options_.targets;
    std::vector<std::string> paths;
    for (const std::string& target : options_.targets) {
      const TargetPath path = PathOf(target);
      report_.same_host |= path.same_host;
      if (std::find(paths.begin(), paths.end(), path.text) == paths.end()) paths.push_back(path.text);
    }
    report_.path = absl::StrJoin(paths, "; ");
    report_.model = model_;
    report_.open_loop = options_.open_loop();
    report_.rounds = options_.echo ? options_.rounds : 1;
    report_.load = absl::StrCat(
        client::HighwayDtypeName(options_.dtype), " highway, layers ", absl::StrJoin(layers, ", "), ", ",
        options_.trace.empty() ? absl::StrCat(options_.sequences_per_call,
                                              options_.sequences_per_call == 1 ? " sequence" : " sequences", " a call")
                               : absl::StrCat(trace_.size(), " steps of ", options_.trace),
        ", ", options_.sessions > 0 ? absl::StrCat(options_.sessions, " sessions") : "stateless with look-back",
        options_.prepare ? ", prepared" : "", ", seed ", options_.seed,
        report_.open_loop ? absl::StrCat(", open loop (", ArrivalName(options_.arrivals), ", at most ",
                                         options_.max_outstanding, " calls under way)")
                          : ", closed loop",
        ", ", options_.channels, " connections a target, ", options_.duration_secs, " s after ", options_.warmup_secs,
        " s of warm-up");
  }

  // What a point needs while it runs.
  struct PointRun {
    size_t slots = 1;
    std::unique_ptr<StepSource> service_steps, echo_steps;
    std::vector<std::string> sessions;
    uint64_t segments = 0;
    Point* point = nullptr;
  };

  absl::Status RunPoint(Form form, int64_t tokens, int64_t concurrency) {
    Point point;
    point.calls = options_.trace.empty() ? std::string(client::FormName(form)) : "trace";
    point.tokens_per_call = tokens;
    point.concurrency = options_.open_loop() ? 0 : concurrency;
    point.rate = options_.rate;
    if (options_.prepare) point.prepare.emplace();
    if (options_.echo) point.echo.emplace();
    PointRun run;
    run.point = &point;
    run.slots = static_cast<size_t>(options_.open_loop() ? options_.max_outstanding : concurrency);
    if (options_.sessions > 0) {
      run.slots = std::min(run.slots, static_cast<size_t>(options_.sessions / options_.sequences_per_call));
    }
    if (options_.trace.empty()) {
      MakeSteady(form, tokens, run);
    } else {
      run.service_steps = TraceSteps();
      run.echo_steps = TraceSteps();
    }
    const std::string name = PointName(report_, point);
    absl::Status status = Measure(run, name);
    if (verifier_ != nullptr) {
      progress_(absl::StrCat(name, ": verifying what is left"));
      point.verify = verifier_->Finish();
    }
    Forget(run.sessions);
    if (status.ok()) report_.points.push_back(std::move(point));
    return status;
  }

  std::unique_ptr<StepSource> TraceSteps() const {
    return std::make_unique<TraceSource>(model_, trace_, options_.forms.front(), options_.seed,
                                         composer_->highway_starts());
  }

  void MakeSteady(Form form, int64_t tokens, PointRun& run) const {
    const SteadyLoad load = {.form = form,
                             .tokens_per_call = tokens,
                             .sequences_per_call = options_.sequences_per_call,
                             .sessions = options_.sessions,
                             .session_prefix = absl::StrCat("bench-", absl::ToUnixMicros(absl::Now()), "-"),
                             .ngram_pool = options_.ngram_pool,
                             .seed = options_.seed};
    auto steady = std::make_unique<SteadySource>(model_, load, run.slots, composer_->highway_starts());
    run.sessions = steady->sessions();
    run.service_steps = std::move(steady);
    run.echo_steps = std::make_unique<SteadySource>(model_, load, run.slots, composer_->highway_starts());
  }

  absl::Status Measure(PointRun& run, const std::string& name) {
    Point& point = *run.point;
    const absl::Duration warmup = absl::Seconds(options_.warmup_secs);
    const absl::Duration each = absl::Seconds(options_.duration_secs) / report_.rounds;
    if (warmup > absl::ZeroDuration()) {
      progress_(absl::StrCat(name, ": warm-up"));
      if (const auto stretch = Service(run, warmup, false); !stretch.ok()) return stretch.status();
      if (options_.echo) Echo(run, warmup);
    }
    std::vector<double> throughput, p50;
    for (int round = 1; round <= report_.rounds; ++round) {
      progress_(report_.rounds == 1 ? name : absl::StrCat(name, ": round ", round, " of ", report_.rounds));
      const absl::StatusOr<Stretch> service = Service(run, each, true);
      if (!service.ok()) return service.status();
      point.service.Merge(*service);
      if (!options_.echo) continue;
      const Stretch echo = Echo(run, each);
      point.echo->stretch.Merge(echo);
      if (service->tally.calls() == 0 || echo.tally.calls() == 0) continue;
      // An open loop gives both the same rate, whatever they are.
      if (!report_.open_loop) {
        throughput.push_back(service->PerSecond(service->tally.calls()) / echo.PerSecond(echo.tally.calls()));
      }
      p50.push_back(absl::FDivDuration(service->tally.latency.Quantile(0.5), echo.tally.latency.Quantile(0.5)));
    }
    if (options_.echo) {
      point.echo->throughput_ratio = Median(throughput);
      point.echo->p50_ratio = Median(p50);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Stretch> Service(PointRun& run, absl::Duration duration, bool measured) {
    Stretch sum;
    LoadRunOptions options = {.slots = run.slots, .timeout = absl::Seconds(options_.timeout_secs)};
    std::vector<PreparedStep> prepared;
    while (duration > absl::ZeroDuration()) {
      options.duration = duration;
      if (options_.prepare) {
        LatencyHistogram took;
        const size_t tickets = std::min(run.slots, TicketsPerTarget(*run.point) * options_.targets.size());
        auto made = PrepareSteps(*service_, *composer_, *run.service_steps, tickets, options.timeout, &took);
        if (!made.ok()) return made.status();
        if (measured) run.point->prepare->Merge(took);
        prepared = *std::move(made);
        options.prepared = &prepared;
        // A ticket ends at its TTL: make new ones well before.
        options.duration = std::min(duration, absl::Milliseconds(model_.limits.ticket_ttl_ms) / 2);
      }
      duration -= options.duration;
      if (verifier_ != nullptr && measured) {
        options.reply_seen = [this](const Step& step, const grpc::ByteBuffer& reply) { verifier_->Offer(step, reply); };
      }
      const bool ask = measured && !options_.metrics.empty() && run.point->metrics_lost.empty();
      absl::StatusOr<MetricValues> before, after;
      if (ask) before = ReadMetrics(options_.metrics, kMetricsTimeout);
      const absl::Duration verifying = verifier_ == nullptr ? absl::ZeroDuration() : verifier_->CpuTime();
      Stretch stretch = Loop(*service_, *run.service_steps, options, run.segments++);
      if (verifier_ != nullptr) stretch.client_cpu -= verifier_->CpuTime() - verifying;
      if (ask) {
        after = before.ok() ? ReadMetrics(options_.metrics, kMetricsTimeout) : before;
        AddServer(before, after, run.point);
      }
      sum.Merge(stretch);
      Release(prepared);
    }
    return sum;
  }

  // What the calls measured is worth telling without what the server says of itself: a server that dies is a finding.
  static void AddServer(const absl::StatusOr<MetricValues>& before, const absl::StatusOr<MetricValues>& after,
                        Point* point) {
    if (!after.ok()) {
      point->metrics_lost = std::string(after.status().message());
      point->server.reset();
      return;
    }
    const ServerChange change = ChangeBetween(*before, *after);
    if (point->server.has_value()) {
      point->server->Merge(change);
    } else {
      point->server = change;
    }
  }

  // As many as half of a server's memory for them holds: others may want theirs.
  size_t TicketsPerTarget(const Point& point) const {
    const int64_t bytes =
        point.tokens_per_call * static_cast<int64_t>(composer_->layer_ids().size()) * model_.KvTokenBytes();
    const int64_t fit = model_.limits.prepare_memory_bytes / 2 / std::max<int64_t>(1, bytes);
    return static_cast<size_t>(std::clamp<int64_t>(fit, 1, kTicketsPerTarget));
  }

  Stretch Echo(PointRun& run, absl::Duration duration) {
    LoadRunOptions options = {
        .echo = true, .slots = run.slots, .duration = duration, .timeout = absl::Seconds(options_.timeout_secs)};
    // A ticket's bytes, so that requests have the sizes of the service's.
    std::vector<PreparedStep> prepared;
    if (options_.prepare) {
      prepared.resize(run.slots);
      for (size_t slot = 0; slot < run.slots; ++slot) {
        prepared[slot].ticket = std::string(24, 't');
        run.echo_steps->Next(slot, &prepared[slot].step);
      }
      options.prepared = &prepared;
    }
    return Loop(*echo_, *run.echo_steps, options, run.segments++);
  }

  Stretch Loop(Connections& connections, StepSource& steps, const LoadRunOptions& options, uint64_t segment) {
    if (!options_.open_loop()) return RunClosedLoop(connections, *composer_, steps, options);
    if (options_.arrivals == ArrivalKind::kTrace) {
      std::vector<int64_t> times;
      for (const TraceStep& step : trace_) times.push_back(step.at);
      Arrivals arrivals(std::move(times));
      return RunOpenLoop(connections, *composer_, steps, arrivals, options);
    }
    Arrivals arrivals(options_.arrivals, options_.rate, Mix(options_.seed ^ segment));
    return RunOpenLoop(connections, *composer_, steps, arrivals, options);
  }

  // What a run leaves behind in the servers; they would forget it in time, so no failure matters.
  void Forget(const std::vector<std::string>& sessions) {
    if (sessions.empty()) return;
    v1::CloseSessionsRequest request;
    for (const std::string& session : sessions) request.add_sessions(session);
    for (const auto& stub : Stubs()) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + kMetricsTimeout));
      v1::CloseSessionsResponse response;
      stub->CloseSessions(&context, request, &response);
    }
  }

  void Release(const std::vector<PreparedStep>& prepared) {
    if (prepared.empty()) return;
    v1::ReleaseRequest request;
    for (const PreparedStep& one : prepared) request.add_tickets(one.ticket);
    for (const auto& stub : Stubs()) {
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + kMetricsTimeout));
      v1::ReleaseResponse response;
      stub->Release(&context, request, &response);
    }
  }

  // Beside the measured connections.
  std::vector<std::unique_ptr<v1::EngramService::Stub>>& Stubs() {
    if (stubs_.empty()) {
      for (const std::string& target : options_.targets) {
        stubs_.push_back(v1::EngramService::NewStub(client::OpenChannel(target, "", client::kMaxEnvelopeBytes)));
      }
    }
    return stubs_;
  }

  const LoadOptions& options_;
  const std::function<void(const std::string&)>& progress_;
  const std::function<void(const Report&)>& measured_;
  client::ModelInfo model_;
  std::vector<TraceStep> trace_;               // empty: a steady load
  std::unique_ptr<RequestComposer> composer_;  // before the connections, which send its memory
  std::unique_ptr<EchoProcess> echo_process_;
  std::unique_ptr<Connections> service_, echo_;
  std::vector<std::unique_ptr<v1::EngramService::Stub>> stubs_;
  std::unique_ptr<ReplyVerifier> verifier_;
  Report report_;
};

}  // namespace

absl::StatusOr<Report> RunLoad(const LoadOptions& options, const std::function<void(const std::string&)>& progress,
                               const std::function<void(const Report&)>& measured) {
  return Load(options, progress, measured).Run();
}

}  // namespace engram::bench
