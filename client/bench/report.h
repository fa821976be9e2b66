// What a run measured, as all its reports tell it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "client/bench/server_metrics.h"
#include "client/bench/tally.h"
#include "client/model_info.h"

namespace engram::bench {

// Replies compared with what this process computed.
struct VerifyReport {
  int64_t checked = 0;
  int64_t skipped = 0;  // chosen, and not looked at since too many waited
  int64_t wrong = 0;
  std::vector<std::string> mismatches;  // the first of them: session, position, layer, element

  void Merge(const VerifyReport& other);
};

// The same calls to an echo server, alternating with the service's.
struct EchoReport {
  Stretch stretch;
  // Of the rounds, their medians: the service's calls per second (closed loop) and its p50, each divided by the echo's.
  // None where no round had calls of both that were served.
  std::optional<double> throughput_ratio;
  std::optional<double> p50_ratio;
};

// One combination of form, tokens and concurrency.
struct Point {
  std::string calls;            // the form, or "trace" where the steps of one have theirs
  int64_t tokens_per_call = 0;  // 0: as the trace has them
  int64_t concurrency = 0;      // closed loop; 0 in an open one
  double rate = 0;              // open loop; 0 with the trace's own times

  Stretch service;
  std::optional<LatencyHistogram> prepare;  // of the Prepare calls, which are not in `service`
  std::optional<EchoReport> echo;
  std::optional<ServerChange> server;
  std::string metrics_lost;  // why the server's figures are missing though they were asked for; else empty
  std::optional<VerifyReport> verify;
};

struct Report {
  std::string version;
  std::string command;  // as it was typed
  absl::Time started;
  std::string cpu;  // of the machine that this runs on
  int cores = 0;

  std::vector<std::string> targets;
  std::string path;  // "unix socket, same host": what the bytes went over
  bool same_host = false;
  client::ModelInfo model;

  std::string load;  // in words: dtype, layers, sequences, sessions, seed, loop
  bool open_loop = false;
  int rounds = 1;
  std::string verify_against;  // "bit for bit (cpu/...)", or by which tolerances; empty: not verified
  std::vector<Point> points;

  bool wrong_replies() const;
};

// "1.05 ms", "78 us".
std::string DurationText(absl::Duration duration);
// "12.3k", "1.20M": three digits.
std::string RateText(double per_second);

// "highway, 16 tokens, concurrency 4".
std::string PointName(const Report& report, const Point& point);

// A stretch's row in any table: calls, calls/s, tokens/s, GB/s up and down, p50, p90, p99,
// p99.9, max, failed. A quantile that so few calls cannot show is "–", as every figure is where none was served.
std::vector<std::string> FigureHeads();
std::vector<std::string> FigureCells(const Stretch& stretch);

// "throughput 0.75 x, p50 1.25 x"; "–" for a ratio that there is not, and none of throughput for an open loop.
std::string RatiosText(const Report& report, const EchoReport& echo);

// What stands below a point's row: what each is about, and the figure in words.
std::vector<std::pair<std::string, std::string>> PointFacts(const Report& report, const Point& point);

// The table for a terminal and what stands around it.
std::string TextReport(const Report& report);
std::string JsonReport(const Report& report);
// One page that needs nothing else.
std::string HtmlReport(const Report& report);

}  // namespace engram::bench
