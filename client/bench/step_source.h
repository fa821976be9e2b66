// Where the steps of a run come from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/bench/step.h"
#include "client/bench/token_source.h"
#include "client/model_info.h"

namespace engram::bench {

// Steps for a number of slots: callers that make one call at a time. Each slot by one thread at a time, different slots
// by any threads.
class StepSource {
 public:
  virtual ~StepSource() = default;

  // Overwrites *step with the slot's next one. Never ends.
  virtual void Next(size_t slot, Step* step) = 0;

  // The slot's last call failed, and the server may know less of its sequences than was sent: they begin anew.
  virtual void Restart(size_t slot) = 0;
};

struct SteadyLoad {
  client::Form form = client::Form::kHighway;
  int64_t tokens_per_call = 1;
  int64_t sequences_per_call = 1;  // share the tokens; at most as many as those
  int64_t sessions = 0;            // in all; 0: stateless with look-back, one group of sequences to a slot
  std::string session_prefix;      // new to the server
  int64_t ngram_pool = 0;
  uint64_t seed = 1;
};

// The same call again and again, each slot further along in sequences of its own. A slot with several groups of
// sessions takes them in turn; each session is in one slot alone, so that its calls keep their order.
class SteadySource final : public StepSource {
 public:
  // With sessions: at least slots * sequences_per_call of them.
  SteadySource(const client::ModelInfo& model, const SteadyLoad& load, size_t slots, int64_t highway_starts);

  void Next(size_t slot, Step* step) override;
  void Restart(size_t slot) override;

  std::vector<std::string> sessions() const;  // all names used; for CloseSessions

 private:
  struct Sequence {
    std::string session;
    uint64_t key = 0;  // of its tokens
    int64_t position = 0;
  };
  struct Slot {
    std::vector<std::vector<Sequence>> groups;
    size_t next = 0;  // group
    int64_t calls = 0;
  };

  const TokenSource tokens_;
  const SteadyLoad load_;
  const int lookback_;
  const int64_t position_limit_;
  const int64_t highway_starts_;
  std::vector<Slot> slots_;
};

}  // namespace engram::bench
