// What a stretch of load did.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/time/time.h"
#include "client/bench/latency_histogram.h"

namespace engram::bench {

// One thread's, or the sum of several. Not thread-safe.
struct Tally {
  LatencyHistogram latency;   // of calls that were served
  LatencyHistogram failures;  // of the others: how soon a caller knows
  int64_t tokens = 0;
  int64_t payload_up = 0;                 // bytes of tensors and token ids in requests
  int64_t payload_down = 0;               // bytes of tensors in replies
  std::map<std::string, int64_t> errors;  // by "RESOURCE_EXHAUSTED QUEUE_FULL"

  int64_t calls() const { return latency.count(); }
  int64_t failed() const {
    int64_t sum = 0;
    for (const auto& [label, count] : errors) sum += count;
    return sum;
  }

  void Merge(const Tally& other) {
    latency.Merge(other.latency);
    failures.Merge(other.failures);
    tokens += other.tokens;
    payload_up += other.payload_up;
    payload_down += other.payload_down;
    for (const auto& [label, count] : other.errors) errors[label] += count;
  }
};

// A stretch, or the sum of several with the same settings.
struct Stretch {
  Tally tally;
  absl::Duration elapsed;  // closed loop: from the first call's start to the last one's end; open: in which calls began
  absl::Duration client_cpu;  // of this process, but not of checking replies

  // Open loop alone.
  LatencyHistogram send_lag;   // from the intended time of a call to its sending
  int64_t bound_hits = 0;      // calls that waited, since as many as allowed were under way
  int64_t unsent = 0;          // calls that were due and not sent when the time was over
  absl::Duration bound_waits;  // how long calls waited for others to end

  double PerSecond(int64_t amount) const {
    return elapsed > absl::ZeroDuration() ? static_cast<double>(amount) / absl::ToDoubleSeconds(elapsed) : 0;
  }

  void Merge(const Stretch& other) {
    tally.Merge(other.tally);
    elapsed += other.elapsed;
    client_cpu += other.client_cpu;
    send_lag.Merge(other.send_lag);
    bound_hits += other.bound_hits;
    unsent += other.unsent;
    bound_waits += other.bound_waits;
  }
};

}  // namespace engram::bench
