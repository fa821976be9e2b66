// What a run of the load generator is to do, as its flags say it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/bench/arrivals.h"
#include "client/model_info.h"

namespace engram::bench {

struct LoadOptions {
  // Connection.
  std::vector<std::string> targets = {"127.0.0.1:8001"};
  int channels = 2;  // to each target
  int client_threads = 2;
  double connect_timeout_secs = 5;
  double timeout_secs = 30;  // of a call

  // What the calls are: every combination of the three is a point.
  std::vector<client::Form> forms = {client::Form::kHighway};
  std::vector<int64_t> tokens_per_call = {1};
  std::vector<int64_t> concurrency = {1};
  int64_t sequences_per_call = 1;
  client::HighwayDtype dtype = client::HighwayDtype::kF32;
  std::vector<int32_t> layers;  // empty: all
  int64_t sessions = 0;         // 0: stateless, with look-back
  bool prepare = false;
  int64_t ngram_pool = 0;
  uint64_t seed = 1;
  std::string trace;  // path; its steps in place of tokens_per_call, sequences_per_call and ngram_pool

  // How long and when.
  double duration_secs = 5;
  double warmup_secs = 1;
  double rate = 0;  // calls per second, open loop; 0: closed loop, or the trace's own times
  ArrivalKind arrivals = ArrivalKind::kPoisson;
  int64_t max_outstanding = 1024;

  // What it is compared with.
  bool echo = false;
  std::string echo_target;
  int rounds = 5;
  double verify_fraction = 0;
  std::string model;    // path
  std::string metrics;  // host:port of the server's HTTP listener; empty: not asked

  // Reports.
  std::string json;
  std::string html;

  bool open_loop() const { return rate > 0 || arrivals == ArrivalKind::kTrace; }
};

// "1,2,4" and ranges "1:8" or "1:16:5" in any mixture, in their order, duplicates left out; each in [1, most].
// INVALID_ARGUMENT names the entry and what was expected.
absl::StatusOr<std::vector<int64_t>> ParseCounts(const std::string& text, int64_t most);

// "highway,kv": each of highway, kv, update, gate, rows-native, rows-bf16, also in capitals and with '_', as the proto
// writes them.
absl::StatusOr<std::vector<client::Form>> ParseForms(const std::string& text);

// What no flag can see alone. INVALID_ARGUMENT names the flags.
absl::Status CheckLoadOptions(const LoadOptions& options);

// What a server of these limits cannot take in one message. INVALID_ARGUMENT with the bound.
absl::Status CheckCallSize(client::Form form, client::HighwayDtype dtype, int64_t tokens, int64_t layers,
                           const client::ModelInfo& model);

// What the model and limits that are served cannot take.
absl::Status CheckAgainstModel(const LoadOptions& options, const client::ModelInfo& model);

}  // namespace engram::bench
