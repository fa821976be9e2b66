// Workers at play: each a thread that runs steps against a clock and waits for what its engram layers need.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/bench/latency_histogram.h"
#include "client/bench/worker/population.h"
#include "client/bench/worker/step_fetch.h"

namespace engram::bench {

struct PlayOptions {
  absl::Duration step = absl::Microseconds(8450);
  int depth = 40;
  std::vector<int32_t> layer_ids;  // ascending, each in [0, depth)
  int workers = 1;
  PopulationOptions population;  // the seed of worker i is its own, made of this one
  absl::Duration warm_up = absl::Seconds(1);
  absl::Duration duration = absl::Seconds(10);  // measured: steps that begin in it, and one per worker at the least
  int verify_every = 0;                         // steps; 0: never
};

// Of the measured steps of all workers.
struct PlayFigures {
  int64_t steps = 0;
  int64_t failed_steps = 0;  // of them: went on without something, since a call failed
  int64_t tokens = 0;        // looked up
  int64_t prefill_tokens = 0;
  int64_t emitted = 0;                    // tokens that users got
  int64_t arrived = 0;                    // sequences
  absl::Duration realised;                // sum of the steps' lengths
  absl::Duration fetched;                 // sum over steps: time in which something was on its way
  absl::Duration exposed;                 // likewise: time that was waited
  std::vector<LatencyHistogram> waits;    // per layer: exposed
  std::vector<LatencyHistogram> fetches;  // per layer: latency
  LatencyHistogram late;                  // how long after a step's begin its thread came to send
  FetchTotals totals;
  std::string mismatch;  // of the first verified step that was wrong; empty: none

  void Merge(const PlayFigures& other);

  double slowdown(absl::Duration step) const;  // mean length / step - 1
  double hidden() const;                       // 1 - exposed / fetched, at least 0
};

// Plays them to the end. `measuring` is called as the measured time begins, `measured` as it ends, on this thread:
// there the server's own figures are read. An error is the maker's.
absl::StatusOr<PlayFigures> Play(const PlayOptions& options, const FetchMaker& make,
                                 const std::function<void()>& measuring, const std::function<void()>& measured);

}  // namespace engram::bench
