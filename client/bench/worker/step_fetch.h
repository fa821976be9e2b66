// How a worker gets what its engram layers need: asked for at the top of a step, and again as each layer is reached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/bench/worker/population.h"

namespace engram::bench {

// From when something was sent for to when it was there (clock.h); empty: nothing was.
struct FetchSpan {
  absl::Duration begin, end;
  absl::Duration length() const { return end - begin; }
};

struct LayerArrival {
  FetchSpan ahead;  // of what could be sent before the layer was reached, and counts with no other layer
  FetchSpan then;   // of what could not
  absl::Duration ready() const { return std::max(ahead.end, then.end); }  // may lie behind us
  absl::Duration latency() const { return ahead.length() + then.length(); }
};

struct FetchTotals {
  int64_t calls = 0;
  int64_t bytes_up = 0;  // of messages, without the framing of gRPC and HTTP/2
  int64_t bytes_down = 0;
  int64_t verified = 0;                   // layers of a step
  std::map<std::string, int64_t> errors;  // by code and reason

  void Add(const FetchTotals& other) {
    calls += other.calls;
    bytes_up += other.bytes_up;
    bytes_down += other.bytes_down;
    verified += other.verified;
    for (const auto& [error, count] : other.errors) errors[error] += count;
  }
};

// Of one worker, used by its thread alone. For every step: Begin, Await for each layer in order, perhaps Verify.
class StepFetch {
 public:
  virtual ~StepFetch() = default;

  // The ids are known. Sends what can go now, and waits for nothing. `step` is borrowed until the last Await returned.
  virtual void Begin(const PlannedStep& step) = 0;

  // The layer is reached: sends what could not go before, and returns when all of the layer is there, or has failed:
  // the step goes on without it, and errors are counted.
  virtual LayerArrival Await(size_t layer) = 0;

  // After the step: compares what came with an answer to one plain call. DATA_LOSS says where they differ.
  virtual absl::Status Verify(const PlannedStep& step) = 0;

  // Since the last time it was asked.
  virtual FetchTotals TakeTotals() = 0;
};

// For each worker, by its number.
using FetchMaker = std::function<absl::StatusOr<std::unique_ptr<StepFetch>>(int worker)>;

}  // namespace engram::bench
