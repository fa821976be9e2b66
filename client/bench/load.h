// The load generator: all points of a run, one after the other, and the report of them.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "client/bench/load_options.h"
#include "client/bench/report.h"

namespace engram::bench {

// Blocks until every point is measured. `options` have passed CheckLoadOptions. `progress` is told what is going on
// now, in a short line without its end, on the calling thread. Errors: no server, another model, a file that cannot be
// read; calls that fail while measuring are part of the report. After each point `measured` gets the report as far as
// it goes, on the calling thread.
absl::StatusOr<Report> RunLoad(const LoadOptions& options, const std::function<void(const std::string&)>& progress,
                               const std::function<void(const Report&)>& measured);

// Whether the bytes to `target` stay on this machine, and what they go over: "unix socket, same host".
struct TargetPath {
  bool same_host = false;
  std::string text;
};
TargetPath PathOf(const std::string& target);

}  // namespace engram::bench
