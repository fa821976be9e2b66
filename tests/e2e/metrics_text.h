// What a running server's /metrics says.
#pragma once

#include <string>

namespace engram::e2e {

// One GET over a plain socket: status line, headers and body.
std::string HttpGet(const std::string& address, const std::string& path);

// The value of the series of that name (labels included, as Prometheus prints them); NaN where there is none.
double MetricOf(const std::string& address, const std::string& series);

// Asks until it has that value, 30 s at the most.
bool AwaitMetric(const std::string& address, const std::string& series, double value);

}  // namespace engram::e2e
