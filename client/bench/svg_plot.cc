#include "client/bench/svg_plot.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/bench/report.h"

namespace engram::bench {
namespace {

constexpr double kWidth = 640;
constexpr double kLeft = 64;
constexpr double kRight = 16;
constexpr int kBarsPerDecade = 20;

std::string Open(double height, absl::string_view title) {
  return absl::StrFormat("<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"%s\">", kWidth, height, Escaped(title));
}

std::string Text(double x, double y, absl::string_view anchor, absl::string_view text) {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>", x, y, anchor, Escaped(text));
}

std::string Line(absl::string_view kind, double x1, double y1, double x2, double y2) {
  return absl::StrFormat("<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>", kind, x1, y1, x2, y2);
}

// Round steps of 1, 2 or 5 that reach `most` in at most five.
std::vector<double> Ticks(double most) {
  double step = std::pow(10, std::floor(std::log10(std::max(most, 1e-12) / 5)));
  for (const double factor : {2.0, 2.5, 2.0}) {
    if (most / step <= 5) break;
    step *= factor;
  }
  std::vector<double> ticks;
  for (double at = 0; at <= most * 1.0001; at += step) ticks.push_back(at);
  return ticks;
}

// A logarithmic axis of nanoseconds.
struct TimeAxis {
  double from = 0;  // log10
  double to = 1;

  double X(absl::Duration at) const {
    const double log = std::log10(std::max(1.0, absl::ToDoubleNanoseconds(at)));
    return kLeft + (log - from) / (to - from) * (kWidth - kLeft - kRight);
  }
};

std::string TimeTicks(const TimeAxis& axis, double top, double bottom) {
  std::string svg;
  for (int decade = static_cast<int>(std::floor(axis.from)); decade <= static_cast<int>(std::ceil(axis.to)); ++decade) {
    for (const int step : {1, 2, 5}) {
      const absl::Duration at = absl::Nanoseconds(step * std::pow(10.0, decade));
      const double x = axis.X(at);
      if (x < kLeft - 0.5 || x > kWidth - kRight + 0.5) continue;
      // Within two decades there is room for all of them.
      if (step != 1 && axis.to - axis.from > 2) continue;
      svg += Line("grid", x, top, x, bottom) + Text(x, bottom + 16, "middle", DurationText(at));
    }
  }
  return svg;
}

std::string Mark(const TimeAxis& axis, absl::Duration at, absl::string_view name, double top, double bottom) {
  const double x = axis.X(at);
  const bool right = x > kWidth * 0.75;
  return Line("mark", x, top, x, bottom) +
         Text(right ? x - 4 : x + 4, top + 10, right ? "end" : "start", absl::StrCat(name, " ", DurationText(at)));
}

// One panel of a curve: ticks, a line through the points, a dot on each.
std::string Panel(absl::string_view name, const std::vector<double>& xs, const std::vector<double>& ys,
                  const std::vector<std::string>& labels, double top, double bottom,
                  const std::function<std::string(double)>& tick_text) {
  const double most = std::max(1e-12, *std::max_element(ys.begin(), ys.end()));
  const auto y_of = [&](double y) { return bottom - y / most * (bottom - top - 14); };
  std::string svg = Text(kLeft, top - 4, "start", name);
  for (const double tick : Ticks(most)) {
    svg += Line("grid", kLeft, y_of(tick), kWidth - kRight, y_of(tick)) +
           Text(kLeft - 6, y_of(tick) + 4, "end", tick_text(tick));
  }
  std::string path;
  for (size_t i = 0; i < xs.size(); ++i)
    absl::StrAppendFormat(&path, "%s%.1f,%.1f", i == 0 ? "" : " ", xs[i], y_of(ys[i]));
  svg += absl::StrCat("<polyline class=\"curve\" points=\"", path, "\"/>");
  for (size_t i = 0; i < xs.size(); ++i) {
    svg += absl::StrFormat("<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"><title>%s</title></circle>", xs[i],
                           y_of(ys[i]), Escaped(labels[i]));
  }
  return svg;
}

}  // namespace

std::string Escaped(absl::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        // Control characters are no part of a page.
        out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? '?' : c;
    }
  }
  return out;
}

std::string HistogramSvg(absl::string_view title, const LatencyHistogram& latency, const LatencyHistogram* other) {
  constexpr double kTop = 14, kBottom = 176, kHeight = 200;
  if (latency.count() == 0) return "<p>No call was served.</p>";
  const std::vector<LatencyHistogram::Bar> bars = latency.Bars(kBarsPerDecade);
  const std::vector<LatencyHistogram::Bar> others =
      other == nullptr ? std::vector<LatencyHistogram::Bar>() : other->Bars(kBarsPerDecade);
  absl::Duration low = bars.front().from, high = bars.back().to;
  if (!others.empty()) {
    low = std::min(low, others.front().from);
    high = std::max(high, others.back().to);
  }
  TimeAxis axis = {std::log10(absl::ToDoubleNanoseconds(low)), std::log10(absl::ToDoubleNanoseconds(high))};
  // At least half a decade, so that there is a tick.
  axis.to = std::max(axis.to, axis.from + 0.5);
  const auto most = [](const std::vector<LatencyHistogram::Bar>& of) {
    int64_t count = 1;
    for (const LatencyHistogram::Bar& bar : of) count = std::max(count, bar.count);
    return static_cast<double>(count);
  };
  const auto y_of = [&](int64_t count, double highest) {
    return kBottom - static_cast<double>(count) / highest * (kBottom - kTop - 16);
  };
  std::string svg = Open(kHeight, title) + TimeTicks(axis, kTop, kBottom);
  const double highest = most(bars);
  for (const LatencyHistogram::Bar& bar : bars) {
    if (bar.count == 0) continue;
    const double x = axis.X(bar.from);
    const double y = y_of(bar.count, highest);
    absl::StrAppendFormat(
        &svg,
        "<rect class=\"bar\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>%s to %s: %d "
        "calls</title></rect>",
        x, y, std::max(1.0, axis.X(bar.to) - x - 1), kBottom - y, DurationText(bar.from), DurationText(bar.to),
        bar.count);
  }
  if (!others.empty()) {
    std::string path = absl::StrFormat("M%.1f %.1f", axis.X(others.front().from), kBottom);
    for (const LatencyHistogram::Bar& bar : others) {
      absl::StrAppendFormat(&path, "V%.1fH%.1f", y_of(bar.count, most(others)), axis.X(bar.to));
    }
    absl::StrAppendFormat(&svg, "<path class=\"other\" d=\"%sV%.1f\"/>", path, kBottom);
  }
  svg += Line("axis", kLeft, kBottom, kWidth - kRight, kBottom) +
         Text(kLeft - 6, y_of(static_cast<int64_t>(highest), highest) + 4, "end",
              absl::StrCat(static_cast<int64_t>(highest))) +
         Mark(axis, latency.Quantile(0.5), "p50", 2, kBottom) + Mark(axis, latency.Quantile(0.99), "p99", 14, kBottom);
  return svg + "</svg>";
}

std::string CurveSvg(absl::string_view title, absl::string_view x_name, absl::string_view throughput_name,
                     const std::vector<CurvePoint>& points) {
  constexpr double kTop = 20, kMiddle = 150, kSecond = 182, kBottom = 290, kHeight = 330;
  const double from = std::log2(points.front().x);
  const double span = std::max(0.1, std::log2(points.back().x) - from);
  std::vector<double> xs, throughput, p99;
  std::vector<std::string> labels;
  std::string svg = Open(kHeight, title);
  for (const CurvePoint& point : points) {
    const double x = kLeft + 24 + (std::log2(point.x) - from) / span * (kWidth - kLeft - kRight - 48);
    // Neighbours may be too close for their numbers.
    if (xs.empty() || x - xs.back() > 24) svg += Text(x, kBottom + 16, "middle", absl::StrFormat("%g", point.x));
    xs.push_back(x);
    throughput.push_back(point.throughput);
    p99.push_back(absl::ToDoubleSeconds(point.p99));
    labels.push_back(absl::StrCat(x_name, " ", absl::StrFormat("%g", point.x), ": ", RateText(point.throughput), " ",
                                  throughput_name, ", p99 ", DurationText(point.p99)));
  }
  svg += Panel(throughput_name, xs, throughput, labels, kTop, kMiddle, [](double y) { return RateText(y); });
  svg += Panel("p99", xs, p99, labels, kSecond, kBottom,
               [](double y) { return y == 0 ? "0" : DurationText(absl::Seconds(y)); });
  return svg + Text((kLeft + kWidth - kRight) / 2, kBottom + 34, "middle", x_name) + "</svg>";
}

}  // namespace engram::bench
