// A stretch of load: calls of one kind to the service, or of the same sizes to an echo, in a closed or an open loop.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/bench/arrivals.h"
#include "client/bench/connections.h"
#include "client/bench/request_composer.h"
#include "client/bench/step_source.h"
#include "client/bench/tally.h"

namespace engram::bench {

// A ticket and what was prepared for it.
struct PreparedStep {
  std::string ticket;
  Step step;
};

// A served reply that may be looked at. Called on the connection's threads, so it must not block; `step` is gone when
// it returns.
using ReplySeen = std::function<void(const Step& step, const grpc::ByteBuffer& reply)>;

struct LoadRunOptions {
  bool echo = false;  // requests and replies of the same sizes, to an echo server
  size_t slots = 1;   // calls under way at most; closed loop: all the time
  absl::Duration duration = {};
  absl::Duration timeout = {};  // of a call
  // Not empty: calls by ticket, slot i by number i modulo their count.
  const std::vector<PreparedStep>* prepared = nullptr;
  ReplySeen reply_seen = {};  // may be empty
};

// Each of these blocks until every call it started has ended. A call counts when it was started in the time given,
// whenever it ends; its latency goes into the histogram if it was served, else it is an error by its code and reason.

// Every slot makes its next call as soon as the one before has ended. Latencies are from sending to the reply.
Stretch RunClosedLoop(Connections& connections, const RequestComposer& composer, StepSource& source,
                      const LoadRunOptions& options);

// Calls are made when they are due, by whichever slot is free. Latencies are from the time that the call was due at to
// the reply, so what it waits in here for a slot is in it. When the time is over, calls that were due and found no slot
// are counted and not made.
Stretch RunOpenLoop(Connections& connections, const RequestComposer& composer, StepSource& source, Arrivals& arrivals,
                    const LoadRunOptions& options);

// `count` tickets, each for the next step of its slot in `source`; lanes 0 .. count - 1. The first failure ends it.
// `took` gets each call's latency.
absl::StatusOr<std::vector<PreparedStep>> PrepareSteps(Connections& connections, const RequestComposer& composer,
                                                       StepSource& source, size_t count, absl::Duration timeout,
                                                       LatencyHistogram* took);

// One call of a few bytes to what should be `engram-bench echo-server` at `address`, which the error names:
// UNAVAILABLE.
absl::Status ProbeEcho(Connections& connections, const std::string& address, absl::Duration timeout);

}  // namespace engram::bench
