// The report for a terminal.

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/bench/report.h"

namespace engram::bench {
namespace {

constexpr double kBytesPerGb = 1e9;

constexpr char kNone[] = "–";

// Characters, not bytes.
size_t Width(absl::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// Columns as wide as their widest cell, words to the left and figures to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> heads) { rows_.push_back(std::move(heads)); }

  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  std::string Text() const {
    std::vector<size_t> widths(rows_.front().size(), 0);
    for (const auto& row : rows_) {
      for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
    }
    std::string text;
    for (const auto& row : rows_) {
      for (size_t i = 0; i < row.size(); ++i) {
        const std::string pad(widths[i] - Width(row[i]), ' ');
        absl::StrAppend(&text, i == 0 ? "" : "  ", i == 0 ? row[i] + pad : pad + row[i]);
      }
      while (!text.empty() && text.back() == ' ') text.pop_back();
      text += '\n';
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string Callers(const Report& report, const Point& point) {
  if (!report.open_loop) return absl::StrCat(point.concurrency);
  return point.rate > 0 ? absl::StrFormat("%g/s", point.rate) : "trace";
}

}  // namespace

std::string PointName(const Report& report, const Point& point) {
  const std::string tokens = point.tokens_per_call == 0 ? "" : absl::StrCat(", ", point.tokens_per_call, " tokens");
  if (!report.open_loop) return absl::StrCat(point.calls, tokens, ", concurrency ", point.concurrency);
  return absl::StrCat(point.calls, tokens,
                      point.rate > 0 ? absl::StrFormat(", %g calls/s", point.rate) : std::string(", at its own times"));
}

namespace {

std::vector<std::string> Row(const Report& report, const Point& point, const std::string& what, const Stretch& s) {
  std::vector<std::string> row = {what, point.tokens_per_call == 0 ? "trace" : absl::StrCat(point.tokens_per_call),
                                  Callers(report, point)};
  for (std::string& cell : FigureCells(s)) row.push_back(std::move(cell));
  return row;
}

std::string PerCall(double seconds, double calls) {
  return calls > 0 ? DurationText(absl::Seconds(seconds / calls)) : kNone;
}

using Facts = std::vector<std::pair<std::string, std::string>>;

void AddServerFacts(const ServerChange& server, Facts* facts) {
  if (server.cpu_seconds.has_value()) {
    facts->emplace_back("server CPU", absl::StrCat(PerCall(*server.cpu_seconds, server.calls), " a call"));
  }
  std::vector<std::string> stages;
  for (const std::string& name : StageOrder(server)) {
    if (server.stages.at(name).seconds == 0) continue;
    stages.push_back(absl::StrCat(name, " ", PerCall(server.stages.at(name).seconds, server.calls)));
  }
  if (!stages.empty()) facts->emplace_back("server stages", absl::StrCat(absl::StrJoin(stages, ", "), " a call"));
  if (server.resident_begin.has_value() && server.resident_end.has_value()) {
    facts->emplace_back("server memory",
                        absl::StrFormat("%.1f MB resident, %+.1f MB since the point began", *server.resident_end / 1e6,
                                        (*server.resident_end - *server.resident_begin) / 1e6));
  }
}

void AddVerifyFacts(const VerifyReport& verify, Facts* facts) {
  std::string text = absl::StrCat(verify.checked, " replies, ", verify.wrong, " wrong");
  if (verify.skipped > 0) {
    absl::StrAppend(&text, "; ", verify.skipped, " more were chosen and left out, since too many waited");
  }
  facts->emplace_back("verified", text);
  for (const std::string& mismatch : verify.mismatches) facts->emplace_back("WRONG", mismatch);
}

}  // namespace

std::vector<std::string> FigureHeads() {
  return {"calls", "calls/s", "tokens/s", "GB/s up", "down", "p50", "p90", "p99", "p99.9", "max", "failed"};
}

std::vector<std::string> FigureCells(const Stretch& stretch) {
  const Tally& tally = stretch.tally;
  std::vector<std::string> cells = {absl::StrCat(tally.calls())};
  const auto add = [&](int64_t needed, std::string text) {
    cells.push_back(tally.calls() < needed ? kNone : std::move(text));
  };
  add(1, RateText(stretch.PerSecond(tally.calls())));
  add(1, RateText(stretch.PerSecond(tally.tokens)));
  add(1, absl::StrFormat("%.3f", stretch.PerSecond(tally.payload_up) / kBytesPerGb));
  add(1, absl::StrFormat("%.3f", stretch.PerSecond(tally.payload_down) / kBytesPerGb));
  add(1, DurationText(tally.latency.Quantile(0.5)));
  add(1, DurationText(tally.latency.Quantile(0.9)));
  // Of fewer calls than this the quantile is their maximum.
  add(100, DurationText(tally.latency.Quantile(0.99)));
  add(1000, DurationText(tally.latency.Quantile(0.999)));
  add(1, DurationText(tally.latency.max()));
  cells.push_back(absl::StrCat(tally.failed()));
  return cells;
}

std::string RatiosText(const Report& report, const EchoReport& echo) {
  const auto text = [](const std::optional<double>& ratio) {
    return ratio.has_value() ? absl::StrFormat("%.2f x", *ratio) : std::string(kNone);
  };
  const std::string p50 = absl::StrCat("p50 ", text(echo.p50_ratio));
  return report.open_loop ? p50 : absl::StrCat("throughput ", text(echo.throughput_ratio), ", ", p50);
}

std::vector<std::pair<std::string, std::string>> PointFacts(const Report& report, const Point& point) {
  std::vector<std::pair<std::string, std::string>> facts;
  const Stretch& s = point.service;
  const auto calls = static_cast<double>(s.tally.calls() + s.tally.failed());
  std::string client_cpu = absl::StrCat(PerCall(absl::ToDoubleSeconds(s.client_cpu), calls), " a call");
  if (point.echo.has_value()) {
    const Stretch& echo = point.echo->stretch;
    facts.emplace_back("against the echo",
                       absl::StrFormat("%s (medians of %d rounds)", RatiosText(report, *point.echo), report.rounds));
    absl::StrAppend(&client_cpu, ", ",
                    PerCall(absl::ToDoubleSeconds(echo.client_cpu), static_cast<double>(echo.tally.calls())),
                    " one to the echo");
  }
  facts.emplace_back("client CPU", client_cpu);
  if (point.server.has_value()) AddServerFacts(*point.server, &facts);
  if (!point.metrics_lost.empty()) facts.emplace_back("metrics", absl::StrCat("lost: ", point.metrics_lost));
  if (point.prepare.has_value()) {
    facts.emplace_back("Prepare", absl::StrCat("p50 ", DurationText(point.prepare->Quantile(0.5)), ", max ",
                                               DurationText(point.prepare->max()), " of ", point.prepare->count(),
                                               " calls, not in the figures above"));
  }
  if (report.open_loop) {
    facts.emplace_back("sent late by",
                       absl::StrCat("p50 ", DurationText(s.send_lag.Quantile(0.5)), ", p99 ",
                                    DurationText(s.send_lag.Quantile(0.99)), " (in the latencies above)"));
  }
  if (s.bound_hits > 0 || s.unsent > 0) {
    facts.emplace_back(
        "BOUND REACHED",
        absl::StrCat(s.bound_hits, " calls waited since as many as may were under way, ", DurationText(s.bound_waits),
                     " in all; ", s.unsent,
                     " were due and never sent: the service, or the bench beside it, is slower than the rate"));
  }
  for (const auto& [label, count] : s.tally.errors) facts.emplace_back("failed", absl::StrCat(count, " x ", label));
  if (s.tally.failures.count() > 0) {
    facts.emplace_back("failures took", absl::StrCat("p50 ", DurationText(s.tally.failures.Quantile(0.5)), ", p99 ",
                                                     DurationText(s.tally.failures.Quantile(0.99))));
  }
  if (point.echo.has_value()) {
    for (const auto& [label, count] : point.echo->stretch.tally.errors) {
      facts.emplace_back("failed at the echo", absl::StrCat(count, " x ", label));
    }
  }
  if (point.verify.has_value()) AddVerifyFacts(*point.verify, &facts);
  return facts;
}

void VerifyReport::Merge(const VerifyReport& other) {
  checked += other.checked;
  skipped += other.skipped;
  wrong += other.wrong;
  mismatches.insert(mismatches.end(), other.mismatches.begin(), other.mismatches.end());
}

bool Report::wrong_replies() const {
  return std::any_of(points.begin(), points.end(),
                     [](const Point& point) { return point.verify.has_value() && point.verify->wrong > 0; });
}

std::string DurationText(absl::Duration duration) {
  const double us = absl::ToDoubleMicroseconds(duration);
  const auto with = [](double value, const char* unit) {
    return absl::StrFormat("%.*f %s", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value, unit);
  };
  if (us < 999.5) return with(us, "us");
  if (us < 999.5e3) return with(us / 1e3, "ms");
  return with(us / 1e6, "s");
}

std::string RateText(double per_second) {
  const auto with = [](double value, const char* unit) {
    return absl::StrFormat("%.*f%s", value < 9.995 ? 2 : value < 99.95 ? 1 : 0, value, unit);
  };
  if (per_second == 0) return "0";
  if (per_second < 999.5) return with(per_second, "");
  if (per_second < 999.5e3) return with(per_second / 1e3, "k");
  return with(per_second / 1e6, "M");
}

std::string TextReport(const Report& report) {
  std::string text = absl::StrCat(
      "engram-bench ", report.version, ", ",
      absl::FormatTime("%Y-%m-%d %H:%M:%S UTC", report.started, absl::UTCTimeZone()), "\n  target   ",
      absl::StrJoin(report.targets, ", "), " (", report.path, ")", "\n  server   ", report.model.server_version, ", ",
      report.model.backend, " ", report.model.isa, ", tables in ", report.model.residency, ", ",
      report.model.numerics_id, "\n  model    dim ", report.model.dim, ", hc ", report.model.hc, ", ",
      report.model.layers.size(), " engram layers, ", report.model.n_hash_cols, " rows of a token\n  load     ",
      report.load, "\n  machine  ", report.cpu, ", ", report.cores, report.cores == 1 ? " core" : " cores",
      report.same_host ? ", shared by server and bench" : "", "\n");
  if (!report.verify_against.empty()) absl::StrAppend(&text, "  verify   ", report.verify_against, "\n");
  text += '\n';
  std::vector<std::string> heads = {"form", "tokens", report.open_loop ? "rate" : "conc"};
  for (std::string& head : FigureHeads()) heads.push_back(std::move(head));
  Table table(std::move(heads));
  for (const Point& point : report.points) {
    table.Add(Row(report, point, point.calls, point.service));
    if (point.echo.has_value()) table.Add(Row(report, point, "  echo", point.echo->stretch));
  }
  text += table.Text();
  for (const Point& point : report.points) {
    absl::StrAppend(&text, "\n", PointName(report, point), "\n");
    for (const auto& [fact, what] : PointFacts(report, point)) absl::StrAppendFormat(&text, "  %-18s %s\n", fact, what);
  }
  return text;
}

}  // namespace engram::bench
