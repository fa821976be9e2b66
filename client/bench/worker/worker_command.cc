#include "client/bench/worker/worker_command.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "client/bench/load.h"
#include "client/bench/local/local_table.h"
#include "client/bench/worker/machine_share.h"
#include "client/bench/worker/worker_options.h"
#include "client/bench/worker/worker_report.h"
#include "client/cli/output_file.h"
#include "client/engram_client.h"

namespace engram::bench {
namespace {

int Complain(absl::string_view text) {
  std::fprintf(stderr, "engram-bench: %s\n", std::string(text).c_str());
  return kExitError;
}

int Complain(const absl::Status& status) {
  if (status.code() == absl::StatusCode::kInvalidArgument) return Complain(status.message());
  return Complain(absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message()));
}

bool IsLoopback(const std::vector<std::string>& targets) {
  return std::any_of(targets.begin(), targets.end(),
                     [](const std::string& target) { return PathOf(target).same_host; });
}

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const WorkerOptions& options, int channels) {
  client::ClientOptions connect;
  connect.replicas.targets = options.targets;
  connect.replicas.channels_per_replica = channels;
  connect.replicas.connect_timeout = absl::Seconds(options.connect_timeout_secs);
  return client::Client::Connect(connect);
}

// A worker's connections: as many as ranks that fetch.
int ChannelsOf(const WorkerOptions& options) { return options.fanout == "slice" ? options.tp : 1; }

absl::StatusOr<WorkerRun> PlayOverTheWire(const WorkerOptions& options, client::Client& plain, client::Form form,
                                          int workers) {
  const absl::StatusOr<PlayOptions> play = PlayOptionsOf(options, plain.model(), workers);
  if (!play.ok()) return play.status();
  WireFetchOptions fetch = FetchOptionsOf(options, *play, form);
  fetch.plain = &plain;
  // A process each in a real worker; here a client each, which its fetch does not outlive.
  std::deque<std::unique_ptr<client::Client>> clients;
  const FetchMaker make = [&](int) -> absl::StatusOr<std::unique_ptr<StepFetch>> {
    absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(options, ChannelsOf(options));
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
    return MakeWireFetch(*clients.back(), fetch);
  };
  BusyShare busy(options.metrics);
  absl::StatusOr<PlayFigures> figures = Play(
      *play, make, [&] { busy.Begin(); }, [&] { busy.End(); });
  if (!figures.ok()) return figures.status();
  if (!busy.fault().empty()) std::fprintf(stderr, "engram-bench: %s\n", busy.fault().c_str());
  return WorkerRun{.form = form,
                   .workers = workers,
                   .figures = *std::move(figures),
                   .engine_busy = busy.engine(),
                   .machine_busy = busy.machine()};
}

absl::StatusOr<WorkerRun> PlayLocally(const WorkerOptions& options, const LocalTable& table, client::Client& plain,
                                      client::Form form, int workers) {
  const absl::StatusOr<PlayOptions> play = PlayOptionsOf(options, plain.model(), workers);
  if (!play.ok()) return play.status();
  const WireFetchOptions fetch = FetchOptionsOf(options, *play, form);
  // A machine each in truth; here they share the processors, as the server would have them.
  const int processors = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const LocalOptions local{.form = form,
                           .dtype = fetch.dtype,
                           .max_step_tokens = fetch.max_step_tokens,
                           .threads = std::max(1, processors / workers),
                           .plain = &plain};
  BusyShare busy("");
  absl::StatusOr<PlayFigures> figures = Play(
      *play, [&](int) { return table.MakeFetch(local); }, [&] { busy.Begin(); }, [&] { busy.End(); });
  if (!figures.ok()) return figures.status();
  return WorkerRun{.form = form,
                   .workers = workers,
                   .local = true,
                   .figures = *std::move(figures),
                   .engine_busy = std::nullopt,
                   .machine_busy = busy.machine()};
}

int Run(const WorkerOptions& options) {
  if (const absl::Status status = CheckWorkerOptions(options); !status.ok()) return Complain(status);
  client::OutputFile json;
  if (!options.json.empty()) {
    if (const absl::Status status = json.Open(options.json); !status.ok()) return Complain(status.message());
  }
  const absl::StatusOr<std::unique_ptr<client::Client>> plain = Connect(options, 1);
  if (!plain.ok()) return Complain(plain.status());
  const client::ModelInfo& model = (*plain)->model();
  WorkerReport report;
  report.options = options;
  const absl::StatusOr<PlayOptions> play = PlayOptionsOf(options, model, 1);
  if (!play.ok()) return Complain(play.status());
  report.layer_ids = play->layer_ids;
  report.server = absl::StrCat("engram-server ", model.server_version, ", ", model.backend, " ", model.isa,
                               ", tables in ", model.residency);
  report.loopback = IsLoopback(options.targets);

  std::optional<LocalTable> table;
  if (!options.baseline.empty()) {
    absl::StatusOr<LocalTable> loaded = LocalTable::Load(options.model, options.residency, model);
    if (!loaded.ok()) return Complain(loaded.status());
    table = *std::move(loaded);
  }

  for (const std::string& form : options.forms) {
    for (const int workers : options.workers) {
      absl::StatusOr<WorkerRun> run = PlayOverTheWire(options, **plain, FormOf(form), workers);
      if (!run.ok()) return Complain(run.status());
      report.runs.push_back(*std::move(run));
      if (!table.has_value()) continue;
      run = PlayLocally(options, *table, **plain, FormOf(form), workers);
      if (!run.ok()) return Complain(run.status());
      report.runs.push_back(*std::move(run));
    }
  }

  std::fputs(ReportText(report).c_str(), stdout);
  if (!options.json.empty()) {
    if (const absl::Status status = json.Write({ReportJson(report)}); !status.ok()) return Complain(status.message());
  }
  for (const WorkerRun& run : report.runs) {
    if (!run.figures.mismatch.empty()) return kExitMiss;
  }
  for (const WorkerRun& run : report.runs) {
    int64_t errors = 0;
    for (const auto& [error, count] : run.figures.totals.errors) errors += count;
    if (run.local || errors < run.figures.totals.calls) continue;
    return Complain(absl::StrCat(client::FormName(run.form), ", ", run.workers, " workers: every call failed"));
  }
  return kExitOk;
}

}  // namespace

Command AddWorkerCommand(CLI::App& app) {
  CLI::App* command = app.add_subcommand("worker", "A decode worker's view: what the engram adds to its step");
  auto options = std::make_shared<WorkerOptions>();
  AddWorkerFlags(command, options.get());
  return {command, [options] { return Run(*options); }};
}

}  // namespace engram::bench
