#include "client/bench/worker/worker_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"

namespace engram::bench {
namespace {

constexpr double kBusy = 0.9;

absl::Duration StepOf(const WorkerOptions& options) { return absl::Milliseconds(options.step_ms); }

// Of all workers together, per second of a worker's time.
double Rate(const WorkerRun& run, int64_t count) {
  const double seconds = absl::ToDoubleSeconds(run.figures.realised);
  return seconds > 0 ? static_cast<double>(count) * run.workers / seconds : 0;
}

double PerStep(const WorkerRun& run, int64_t count) {
  return run.figures.steps == 0 ? 0 : static_cast<double>(count) / static_cast<double>(run.figures.steps);
}

std::string Milliseconds(absl::Duration duration) {
  return absl::StrFormat("%.3f", absl::ToDoubleMilliseconds(duration));
}

std::string Bytes(double bytes) {
  if (bytes >= 1e6) return absl::StrFormat("%.2f MB", bytes / 1e6);
  if (bytes >= 1e3) return absl::StrFormat("%.1f kB", bytes / 1e3);
  return absl::StrFormat("%.0f B", bytes);
}

std::string Percent(double share) { return absl::StrFormat("%.1f %%", share * 100); }

std::string Share(const std::optional<double>& share) { return share.has_value() ? Percent(*share) : "-"; }

std::vector<std::string> Header(const WorkerReport& report) {
  std::vector<std::string> header = {"form", "table", "workers", "tokens/s", "emitted/s", "hidden", "slowdown"};
  for (const int32_t layer : report.layer_ids) header.push_back(absl::StrCat("wait L", layer, " p50/p99 ms"));
  for (const char* name : {"up/step", "down/step", "errors", "engine", "CPUs", "bound by"}) header.emplace_back(name);
  return header;
}

std::vector<std::string> Row(const WorkerReport& report, const WorkerRun& run) {
  const PlayFigures& figures = run.figures;
  std::vector<std::string> row = {std::string(client::FormName(run.form)),
                                  run.local ? "local" : "server",
                                  absl::StrCat(run.workers),
                                  absl::StrFormat("%.0f", Rate(run, figures.tokens)),
                                  absl::StrFormat("%.0f", Rate(run, figures.emitted)),
                                  Percent(figures.hidden()),
                                  Percent(figures.slowdown(StepOf(report.options)))};
  for (const LatencyHistogram& waits : figures.waits) {
    row.push_back(absl::StrCat(Milliseconds(waits.Quantile(0.5)), "/", Milliseconds(waits.Quantile(0.99))));
  }
  int64_t errors = 0;
  for (const auto& [error, count] : figures.totals.errors) errors += count;
  row.push_back(run.local ? "-" : Bytes(PerStep(run, figures.totals.bytes_up)));
  row.push_back(run.local ? "-" : Bytes(PerStep(run, figures.totals.bytes_down)));
  row.push_back(absl::StrCat(errors));
  row.push_back(Share(run.engine_busy));
  row.push_back(Share(run.machine_busy));
  row.emplace_back(BoundOf(run, StepOf(report.options)));
  return row;
}

nlohmann::ordered_json Quantiles(const LatencyHistogram& histogram) {
  nlohmann::ordered_json json;
  json["mean"] = absl::ToDoubleMilliseconds(histogram.mean());
  for (const double q : {0.5, 0.9, 0.99}) {
    json[absl::StrFormat("p%.0f", q * 100)] = absl::ToDoubleMilliseconds(histogram.Quantile(q));
  }
  json["max"] = absl::ToDoubleMilliseconds(histogram.max());
  return json;
}

nlohmann::ordered_json RunJson(const WorkerReport& report, const WorkerRun& run) {
  const PlayFigures& figures = run.figures;
  nlohmann::ordered_json json;
  json["form"] = std::string(client::FormName(run.form));
  json["table"] = run.local ? "local" : "server";
  json["workers"] = run.workers;
  json["steps"] = figures.steps;
  json["failed_steps"] = figures.failed_steps;
  json["tokens_per_second"] = Rate(run, figures.tokens);
  json["emitted_per_second"] = Rate(run, figures.emitted);
  json["tokens_per_step"] = PerStep(run, figures.tokens);
  json["prefill_tokens_per_step"] = PerStep(run, figures.prefill_tokens);
  json["sequences_arrived"] = figures.arrived;
  json["slowdown"] = figures.slowdown(StepOf(report.options));
  json["hidden"] = figures.hidden();
  json["layers"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < figures.waits.size(); ++i) {
    json["layers"].push_back({{"layer", report.layer_ids[i]},
                              {"exposed_ms", Quantiles(figures.waits[i])},
                              {"latency_ms", Quantiles(figures.fetches[i])}});
  }
  json["late_ms"] = Quantiles(figures.late);
  json["calls_per_step"] = PerStep(run, figures.totals.calls);
  json["bytes_up_per_step"] = PerStep(run, figures.totals.bytes_up);
  json["bytes_down_per_step"] = PerStep(run, figures.totals.bytes_down);
  json["errors"] = figures.totals.errors;
  json["verified_layers"] = figures.totals.verified;
  json["mismatch"] = figures.mismatch;
  const auto share = [&json](const char* name, const std::optional<double>& value) {
    if (value.has_value()) json[name] = *value;
  };
  share("engine_busy", run.engine_busy);
  share("machine_busy", run.machine_busy);
  json["bound_by"] = std::string(BoundOf(run, StepOf(report.options)));
  return json;
}

}  // namespace

absl::string_view BoundOf(const WorkerRun& run, absl::Duration step) {
  const double stretched = 1 + run.figures.slowdown(step);  // a step's length, in lengths that it should have
  const double engine = run.engine_busy.value_or(0);
  if (engine >= kBusy || (engine >= 0.5 && engine * stretched >= 1)) return "server-bound";
  if (run.machine_busy.value_or(0) >= kBusy) return "machine-bound";
  if (!run.local && !run.engine_busy.has_value() && 1 / stretched < kBusy) return "saturated";
  return "";
}

std::string ReportText(const WorkerReport& report) {
  const WorkerOptions& options = report.options;
  std::string text = absl::StrFormat(
      "%s%s\nstep %g ms, depth %d, batch %d, %d drafts accepted at %g, tp %d by %s, highway %s, %g s a run, seed "
      "%d\n\n",
      report.server, report.loopback ? "; loopback: server and workers share this machine" : "", options.step_ms,
      options.depth, options.batch, options.spec_k, options.accept, options.tp, options.fanout, options.dtype,
      options.duration_secs, options.seed);
  std::vector<std::vector<std::string>> rows = {Header(report)};
  for (const WorkerRun& run : report.runs) rows.push_back(Row(report, run));
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      // Words to the left, numbers to the right.
      const auto width = static_cast<int>(widths[i]);
      absl::StrAppend(&line, i == 0 ? "" : "  ",
                      i < 2 || i + 1 == row.size() ? absl::StrFormat("%-*s", width, row[i])
                                                   : absl::StrFormat("%*s", width, row[i]));
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  for (const WorkerRun& run : report.runs) {
    const std::string name =
        absl::StrCat(client::FormName(run.form), run.local ? " local" : "", ", ", run.workers, " workers: ");
    for (const auto& [error, count] : run.figures.totals.errors) {
      absl::StrAppend(&text, name, count, " calls failed with ", error, "\n");
    }
    if (run.figures.failed_steps > 0) {
      absl::StrAppend(&text, name, run.figures.failed_steps, " of ", run.figures.steps,
                      " steps went on without what failed: the figures are not those of steps that got all\n");
    }
    if (options.verify_every > 0) {
      absl::StrAppend(&text, name, "verified ", run.figures.totals.verified, " layers, ",
                      run.figures.mismatch.empty() ? "0 wrong" : "at least 1 wrong", "\n");
    }
    if (!run.figures.mismatch.empty()) absl::StrAppend(&text, name, "WRONG: ", run.figures.mismatch, "\n");
  }
  return text;
}

std::string ReportJson(const WorkerReport& report) {
  const WorkerOptions& options = report.options;
  nlohmann::ordered_json json;
  json["server"] = report.server;
  json["loopback"] = report.loopback;
  json["options"] = {{"step_ms", options.step_ms},
                     {"depth", options.depth},
                     {"batch", options.batch},
                     {"spec_k", options.spec_k},
                     {"accept", options.accept},
                     {"prompt_mean", options.prompt_mean},
                     {"output_mean", options.output_mean},
                     {"prefill_chunk", options.prefill_chunk},
                     {"tp", options.tp},
                     {"fanout", options.fanout},
                     {"calls", options.calls},
                     {"dtype", options.dtype},
                     {"duration_secs", options.duration_secs},
                     {"warm_up_secs", options.warm_up_secs},
                     {"seed", options.seed}};
  json["runs"] = nlohmann::ordered_json::array();
  for (const WorkerRun& run : report.runs) json["runs"].push_back(RunJson(report, run));
  return json.dump(1) + "\n";
}

}  // namespace engram::bench
