// Two kinds of plot as SVG to stand in a page: colours are the page's own variables (--ink, --muted, --line, --bar,
// --other), so that they follow its light, dark and printed looks. Texts are escaped.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/bench/latency_histogram.h"

namespace engram::bench {

// Text as HTML and SVG may hold it, in elements and in quoted attributes.
std::string Escaped(absl::string_view text);

// How many calls took how long, on a logarithmic axis, with p50 and p99 marked. `other`, not null: a second histogram
// as a line of steps, each scaled to its own highest bar. `title` is read out in place of the picture.
std::string HistogramSvg(absl::string_view title, const LatencyHistogram& latency, const LatencyHistogram* other);

struct CurvePoint {
  double x = 0;  // > 0
  double throughput = 0;
  absl::Duration p99;
};

// Throughput, and below it p99, over x on a logarithmic axis; at least two points, ascending.
std::string CurveSvg(absl::string_view title, absl::string_view x_name, absl::string_view throughput_name,
                     const std::vector<CurvePoint>& points);

}  // namespace engram::bench
