// The report as one page: no script, nothing fetched, readable on a phone, in the dark and in print.

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/bench/report.h"
#include "client/bench/svg_plot.h"

namespace engram::bench {
namespace {

constexpr char kStyle[] = R"css(
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --muted: #59636e; --line: #d1d9e0; --bar: #2a78c8; --other: #a15c00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e6eaef; --muted: #9aa5b1; --line: #343c46; --bar: #5ea8f0; --other: #e0a050; --bad: #ff8a80; } }
@media print { :root { --paper: #fff; --ink: #000; --muted: #444; --line: #bbb; --bar: #2a78c8; --other: #a15c00; --bad: #b3261e; } section { break-inside: avoid; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--muted); font-weight: 600; } tr.echo td { color: var(--muted); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .5rem 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
svg { width: 100%; max-width: 40rem; height: auto; display: block; margin: .5rem 0; }
svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
.grid { stroke: var(--line); stroke-width: 1; } .axis { stroke: var(--muted); } .mark { stroke: var(--ink); stroke-dasharray: 3 3; }
.bar, .dot { fill: var(--bar); } .curve { fill: none; stroke: var(--bar); stroke-width: 2; }
.other { fill: none; stroke: var(--other); stroke-width: 1.5; }
.note { color: var(--muted); } .bad { color: var(--bad); font-weight: 600; }
)css";

class Page {
 public:
  explicit Page(const Report& report) : report_(report) {}

  std::string Html() {
    Head();
    Summary();
    Curves();
    for (const Point& point : report_.points) Details(point);
    html_ += "</body>\n</html>\n";
    return std::move(html_);
  }

 private:
  void Add(absl::string_view html) { absl::StrAppend(&html_, html, "\n"); }
  void Fact(absl::string_view name, absl::string_view text) {
    Add(absl::StrCat("<dt>", Escaped(name), "</dt><dd>", Escaped(text), "</dd>"));
  }

  void Head() {
    const std::string when = absl::FormatTime("%Y-%m-%d %H:%M UTC", report_.started, absl::UTCTimeZone());
    Add("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">");
    Add("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">");
    Add(absl::StrCat("<title>engram-bench, ", when, "</title>\n<style>", kStyle, "</style>\n</head>\n<body>"));
    Add(absl::StrCat("<h1>engram-bench, ", when, "</h1>"));
    if (report_.wrong_replies()) Add("<p class=\"bad\">Replies were wrong: see below.</p>");
    if (report_.same_host) {
      Add("<p class=\"note\">Server and bench ran on one host and shared its cores; nothing here went over a "
          "network.</p>");
    }
    Add("<dl>");
    const client::ModelInfo& model = report_.model;
    Fact("target", absl::StrCat(absl::StrJoin(report_.targets, ", "), " (", report_.path, ")"));
    Fact("server", absl::StrCat(model.server_version, ", ", model.backend, " ", model.isa, ", tables in ",
                                model.residency, ", ", model.numerics_id));
    Fact("model", absl::StrCat("dim ", model.dim, ", hc ", model.hc, ", ", model.layers.size(), " engram layers, ",
                               model.n_hash_cols, " rows of a token"));
    Fact("load", report_.load);
    Fact("machine", absl::StrCat(report_.cpu, ", ", report_.cores, report_.cores == 1 ? " core" : " cores"));
    if (!report_.verify_against.empty()) Fact("verify", report_.verify_against);
    Fact("command", report_.command);
    Fact("engram-bench", report_.version);
    Add("</dl>");
  }

  void Row(absl::string_view kind, const std::string& name, const Stretch& s) {
    Add(absl::StrCat("<tr", kind, "><td>", Escaped(name), "</td><td>", absl::StrJoin(FigureCells(s), "</td><td>"),
                     "</td></tr>"));
  }

  void Summary() {
    Add(absl::StrCat("<h2>All points</h2>\n<div class=\"wide\"><table><thead><tr><th>point</th><th>",
                     absl::StrJoin(FigureHeads(), "</th><th>"), "</th></tr></thead><tbody>"));
    for (const Point& point : report_.points) {
      Row("", PointName(report_, point), point.service);
      if (!point.echo.has_value()) continue;
      Row(" class=\"echo\"", absl::StrCat("the echo: ", RatiosText(report_, *point.echo)), point.echo->stretch);
    }
    Add("</tbody></table></div>");
    if (report_.points.empty() || !report_.points.front().echo.has_value()) return;
    Add(absl::StrCat(
        "<p class=\"note\">The echo answers the same number of bytes and computes nothing; the factors are "
        "the service's figure divided by the echo's, medians of ",
        report_.rounds, " rounds in turn.</p>"));
  }

  // What was swept: concurrency if it was, else tokens.
  void Curves() {
    std::map<std::pair<std::string, int64_t>, std::vector<CurvePoint>> by_tokens;
    std::map<std::string, std::vector<CurvePoint>> by_concurrency;
    for (const Point& point : report_.points) {
      const Stretch& s = point.service;
      const absl::Duration p99 = s.tally.latency.Quantile(0.99);
      if (point.concurrency > 0) {
        by_tokens[{point.calls, point.tokens_per_call}].push_back(
            {static_cast<double>(point.concurrency), s.PerSecond(s.tally.calls()), p99});
      }
      if (point.tokens_per_call > 0) {
        by_concurrency[point.calls].push_back(
            {static_cast<double>(point.tokens_per_call), s.PerSecond(s.tally.tokens), p99});
      }
    }
    bool swept = false;
    for (auto& [name, points] : by_tokens) {
      if (points.size() < 2) continue;
      if (!std::exchange(swept, true)) Add("<h2>Throughput and p99 over concurrency</h2>");
      const std::string title =
          absl::StrCat(name.first, name.second > 0 ? absl::StrCat(", ", name.second, " tokens a call") : "");
      Curve(title, "concurrency", "calls/s", points);
    }
    if (swept) return;
    for (auto& [name, points] : by_concurrency) {
      if (points.size() < 2) continue;
      if (!std::exchange(swept, true)) Add("<h2>Throughput and p99 over tokens a call</h2>");
      Curve(name, "tokens a call", "tokens/s", points);
    }
  }

  void Curve(const std::string& title, absl::string_view x, absl::string_view throughput,
             std::vector<CurvePoint>& points) {
    std::sort(points.begin(), points.end(), [](const CurvePoint& a, const CurvePoint& b) { return a.x < b.x; });
    Add(absl::StrCat("<section><h3>", Escaped(title), "</h3>", CurveSvg(title, x, throughput, points), "</section>"));
  }

  void Details(const Point& point) {
    const std::string name = PointName(report_, point);
    Add(absl::StrCat("<section><h2>", Escaped(name), "</h2>"));
    Add(HistogramSvg(absl::StrCat("How long calls took: ", name), point.service.tally.latency,
                     point.echo.has_value() ? &point.echo->stretch.tally.latency : nullptr));
    Add(absl::StrCat("<p class=\"note\">Bars: calls by latency",
                     report_.open_loop ? ", from the time they were due at" : "",
                     point.echo.has_value() ? "; line: the echo's, scaled to the same height" : "", ".</p>\n<dl>"));
    for (const auto& [fact, text] : PointFacts(report_, point)) Fact(fact, text);
    Add("</dl></section>");
  }

  const Report& report_;
  std::string html_;
};

}  // namespace

std::string HtmlReport(const Report& report) { return Page(report).Html(); }

}  // namespace engram::bench
