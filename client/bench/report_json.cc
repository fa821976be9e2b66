// The report for programs: every figure of the others, in seconds and bytes.

#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "client/bench/report.h"
#include "nlohmann/json.hpp"

namespace engram::bench {
namespace {

using nlohmann::ordered_json;

ordered_json LatencyJson(const LatencyHistogram& latency) {
  const auto seconds = [](absl::Duration duration) { return absl::ToDoubleSeconds(duration); };
  ordered_json json = {{"count", latency.count()},
                       {"min", seconds(latency.min())},
                       {"mean", seconds(latency.mean())},
                       {"p50", seconds(latency.Quantile(0.5))},
                       {"p90", seconds(latency.Quantile(0.9))},
                       {"p99", seconds(latency.Quantile(0.99))},
                       {"p99.9", seconds(latency.Quantile(0.999))},
                       {"max", seconds(latency.max())}};
  json["histogram"] = ordered_json::array();
  for (const LatencyHistogram::Bar& bar : latency.Bars(20)) {
    if (bar.count == 0) continue;
    json["histogram"].push_back({{"from", seconds(bar.from)}, {"to", seconds(bar.to)}, {"count", bar.count}});
  }
  return json;
}

ordered_json StretchJson(const Stretch& stretch, bool open_loop) {
  const Tally& tally = stretch.tally;
  ordered_json json = {{"seconds", absl::ToDoubleSeconds(stretch.elapsed)},
                       {"calls", tally.calls()},
                       {"failed", tally.failed()},
                       {"calls_per_second", stretch.PerSecond(tally.calls())},
                       {"tokens_per_second", stretch.PerSecond(tally.tokens)},
                       {"payload_bytes_up", tally.payload_up},
                       {"payload_bytes_down", tally.payload_down},
                       {"payload_bytes_up_per_second", stretch.PerSecond(tally.payload_up)},
                       {"payload_bytes_down_per_second", stretch.PerSecond(tally.payload_down)},
                       {"client_cpu_seconds", absl::ToDoubleSeconds(stretch.client_cpu)},
                       {"latency_seconds", LatencyJson(tally.latency)}};
  if (tally.failures.count() > 0) json["failure_latency_seconds"] = LatencyJson(tally.failures);
  json["errors"] = ordered_json::object();
  for (const auto& [label, count] : tally.errors) json["errors"][label] = count;
  if (open_loop) {
    json["open_loop"] = {{"send_lag_seconds", LatencyJson(stretch.send_lag)},
                         {"bound_hits", stretch.bound_hits},
                         {"bound_wait_seconds", absl::ToDoubleSeconds(stretch.bound_waits)},
                         {"unsent", stretch.unsent}};
  }
  return json;
}

ordered_json ServerJson(const ServerChange& server) {
  ordered_json json = {{"calls", server.calls}};
  json["stages"] = ordered_json::object();
  for (const std::string& name : StageOrder(server)) {
    const ServerChange::Stage& stage = server.stages.at(name);
    json["stages"][name] = {{"seconds", stage.seconds}, {"count", stage.count}};
  }
  if (server.cpu_seconds.has_value()) json["cpu_seconds"] = *server.cpu_seconds;
  if (server.resident_begin.has_value()) json["resident_bytes_begin"] = *server.resident_begin;
  if (server.resident_end.has_value()) json["resident_bytes_end"] = *server.resident_end;
  return json;
}

ordered_json PointJson(const Report& report, const Point& point) {
  ordered_json json = {{"calls", point.calls}};
  if (point.tokens_per_call > 0) json["tokens_per_call"] = point.tokens_per_call;
  if (report.open_loop) {
    json["rate"] = point.rate > 0 ? ordered_json(point.rate) : ordered_json("trace");
  } else {
    json["concurrency"] = point.concurrency;
  }
  json["service"] = StretchJson(point.service, report.open_loop);
  if (point.echo.has_value()) {
    json["echo"] = StretchJson(point.echo->stretch, report.open_loop);
    const EchoReport& echo = *point.echo;
    if (echo.throughput_ratio.has_value()) json["echo"]["throughput_ratio"] = *echo.throughput_ratio;
    if (echo.p50_ratio.has_value()) json["echo"]["p50_ratio"] = *echo.p50_ratio;
  }
  if (point.prepare.has_value()) json["prepare_seconds"] = LatencyJson(*point.prepare);
  if (point.server.has_value()) json["server"] = ServerJson(*point.server);
  if (!point.metrics_lost.empty()) json["metrics_lost"] = point.metrics_lost;
  if (point.verify.has_value()) {
    json["verify"] = {{"checked", point.verify->checked},
                      {"skipped", point.verify->skipped},
                      {"wrong", point.verify->wrong},
                      {"mismatches", point.verify->mismatches}};
  }
  return json;
}

}  // namespace

std::string JsonReport(const Report& report) {
  ordered_json json = {{"engram_bench", report.version},
                       {"started", absl::FormatTime(absl::RFC3339_sec, report.started, absl::UTCTimeZone())},
                       {"command", report.command},
                       {"machine", {{"cpu", report.cpu}, {"cores", report.cores}}},
                       {"targets", report.targets},
                       {"path", report.path},
                       {"same_host", report.same_host},
                       {"load", report.load},
                       {"rounds", report.rounds}};
  json["server"] = {{"version", report.model.server_version},
                    {"backend", report.model.backend},
                    {"isa", report.model.isa},
                    {"residency", report.model.residency},
                    {"numerics_id", report.model.numerics_id},
                    {"config_digest", absl::BytesToHexString(report.model.config_digest)},
                    {"dim", report.model.dim},
                    {"hc", report.model.hc},
                    {"n_hash_cols", report.model.n_hash_cols},
                    {"layers", report.model.layers.size()}};
  if (!report.verify_against.empty()) json["verify_against"] = report.verify_against;
  json["points"] = ordered_json::array();
  for (const Point& point : report.points) json["points"].push_back(PointJson(report, point));
  // Replace, not throw, where a server sent bytes that are no text.
  return json.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace engram::bench
