// The figures of `engram-bench worker`, for people and for programs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/bench/worker/worker_options.h"
#include "client/bench/worker/worker_play.h"

namespace engram::bench {

// One run: so many workers with one form.
struct WorkerRun {
  client::Form form = client::Form::kRowsNative;
  int workers = 1;
  bool local = false;  // the table in this process, no server
  PlayFigures figures;
  std::optional<double> engine_busy;   // share of the time; of the server's engine
  std::optional<double> machine_busy;  // of this machine's processors
};

// What holds the workers up:
// - "server-bound": the server's engine computed for 0.9 of the time or more; or for half of it or more, and what it
//   computed for a step of every worker takes longer than a step, so that no faster network could let them run at their
//   pace;
// - "machine-bound": neither is known, and this machine's processors were busy for 0.9 of the time or more;
// - "saturated": nothing is known of the engine, and fewer than 0.9 of the tokens that the steps offer were served;
// - "": none of these.
absl::string_view BoundOf(const WorkerRun& run, absl::Duration step);

struct WorkerReport {
  WorkerOptions options;
  std::vector<int32_t> layer_ids;
  std::string server;  // one line: backend, isa, version
  bool loopback = false;
  std::vector<WorkerRun> runs;
};

std::string ReportText(const WorkerReport& report);
std::string ReportJson(const WorkerReport& report);

}  // namespace engram::bench
