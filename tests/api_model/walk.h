// A random walk through the step API: what the driver's server answers is held against the plain model, bit by bit.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/api_model/plain_api.h"
#include "tests/api_model/random_calls.h"

namespace engram {

// A server and the ways into it. Used by one thread.
class ApiDriver {
 public:
  virtual ~ApiDriver() = default;

  // Sends all of them, in order, without waiting for answers between: on their stream, or unary where there is one.
  virtual std::vector<Reply> Run(const std::vector<Planned>& calls) = 0;
  // Ends the stream; a later call by it opens it anew. Returns when its tickets are gone: `ticket` is one of them,
  // empty for none.
  virtual void EndStream(uint64_t stream, const std::string& ticket) = 0;
};

// How often each thing has happened: a walk that never leaves the path proves little.
struct Tally {
  std::map<std::string, int> refused;   // by reason, sequences of partial calls too
  std::map<std::string, int> answered;  // by kind and form
  int partly_served = 0, none_served = 0, gone_tickets = 0, bursts = 0;
};

struct WalkOptions {
  PlainApiOptions plain;
  RandomCallsOptions calls;
  int64_t longest_burst = 6;      // of calls in flight together; 1: the outcome of each is certain
  absl::Duration longest_wait{};  // that passes now and then, between calls
};

class Walk {
 public:
  Walk(uint32_t seed, PlainCompute& compute, WalkOptions options, ApiDriver& driver, Tally& tally);

  // A burst of calls, or the end of a stream. A disagreement is a fatal test failure.
  void Step();

  absl::Time now() const { return now_; }
  PlainApi& plain() { return plain_; }

 private:
  void EndStream();
  void Check(const Planned& planned, const ExpectedReply& expected, const Reply& got);

  Tally& tally_;
  const WalkOptions options_;
  PlainApi plain_;
  RandomCalls calls_;
  ApiDriver& driver_;
  absl::Time now_ = absl::UnixEpoch();
  int64_t bursts_ = 0;
};

// Steps of several seeds. `walk_seed` makes a server and walks through it for so many steps; it stops at a fatal
// failure. ENGRAM_MODEL_TEST_SEED picks one seed, ENGRAM_MODEL_TEST_STEPS their length. True where nothing was picked,
// so that a tally may be judged.
bool WalkSeeds(uint32_t seeds, int64_t steps, const std::function<void(uint32_t seed, int64_t steps)>& walk_seed);

// What a walk of thousands of steps must have met.
void ExpectWellTravelled(const Tally& tally);

}  // namespace engram
