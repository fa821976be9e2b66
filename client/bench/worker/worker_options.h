// The flags of `engram-bench worker`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/bench/worker/wire_fetch.h"
#include "client/bench/worker/worker_play.h"
#include "client/model_info.h"

namespace CLI {
class App;
}

namespace engram::bench {

struct WorkerOptions {
  std::vector<std::string> targets = {"127.0.0.1:8001"};
  double connect_timeout_secs = 10;
  double timeout_secs = 30;
  std::string metrics;  // host:port; empty: not read

  double step_ms = 8.45;
  int depth = 40;
  int batch = 32;
  int spec_k = 5;
  double accept = 0.6;
  int64_t prompt_mean = 256;
  int64_t output_mean = 512;
  int64_t prefill_chunk = 64;

  std::vector<std::string> forms = {"rows-native"};
  std::vector<int> workers = {1};
  int tp = 1;
  std::string fanout = "slice";
  std::string calls = "chain";
  std::string dtype = "bf16";

  double duration_secs = 10;
  double warm_up_secs = 1;
  uint64_t seed = 1;
  int verify_every = 0;

  std::string baseline;  // "local"; empty: none
  std::string model;
  std::string residency = "ram";

  std::string json;  // a path; empty: none
};

// Adds the flags to the command's app; `options` outlives its parsing.
void AddWorkerFlags(CLI::App* command, WorkerOptions* options);

// What no flag's own check can see, as far as the server's model is not needed for it. INVALID_ARGUMENT names the flag.
absl::Status CheckWorkerOptions(const WorkerOptions& options);

// Of a name that --form takes; kAuto for any other.
client::Form FormOf(const std::string& name);

// INVALID_ARGUMENT where the model has a layer beyond --depth.
absl::StatusOr<PlayOptions> PlayOptionsOf(const WorkerOptions& options, const client::ModelInfo& model, int workers);

WireFetchOptions FetchOptionsOf(const WorkerOptions& options, const PlayOptions& play, client::Form form);

}  // namespace engram::bench
