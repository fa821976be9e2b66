// The sequences a decode worker has in hand: which token ids each step of its runs over.
//
// A step verifies drafts: a decoding sequence sends its newest token, whose position is the first that is not settled,
// and spec_k drafts behind it. Drafts are accepted one after the other, each with the chance `accept`, up to the first
// that is not; then the model's own token follows. So 1 to spec_k + 1 positions settle, and the next step begins at the
// first that did not, over the rejected drafts. A sequence that has its tokens leaves, and another arrives with a
// prompt, whose prefill rides along in chunks: at most prefill_chunk tokens a step, first come, first served.
//
// Ids are uniform over the vocabulary: no n-gram comes twice, which is the worst case for every cache. Replayable: the
// same options give the same steps. Pure: no clock, no wire. Not thread-safe.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "client/sequence_history.h"

namespace engram::bench {

struct PopulationOptions {
  int batch = 32;              // sequences in hand, >= 1
  int spec_k = 5;              // drafts, >= 0
  double accept = 0.6;         // [0, 1]
  int64_t prompt_mean = 256;   // tokens, >= 1; geometric
  int64_t output_mean = 512;   // likewise
  int64_t prefill_chunk = 64;  // >= 0; 0: prompts are prefilled elsewhere, sequences arrive ready to decode
  int64_t vocab = 0;           // >= 1
  int max_ngram = 4;           // N, 2..8
  int64_t position_limit = 1 << 20;
  uint64_t seed = 1;
};

// Consecutive tokens of one sequence.
struct StepRun {
  int64_t start_pos = 0;
  std::vector<int32_t> token_ids;
  std::vector<int32_t> lookback;  // the N-1 ids before, newest first, -1 = before the start
};

struct PlannedStep {
  std::vector<StepRun> runs;
  int64_t tokens = 0;          // of all runs
  int64_t prefill_tokens = 0;  // of them
  int64_t emitted = 0;         // tokens that the step gives its users: accepted drafts and the model's own
  int64_t arrived = 0;         // sequences that run for the first time
};

class Population {
 public:
  // Begins in the middle: sequences as a worker that has been running for long holds them.
  explicit Population(const PopulationOptions& options);

  // The next step. What it will accept is drawn too, and stands in the step after.
  PlannedStep Next();

  // No step has more.
  int64_t max_step_tokens() const { return options_.batch * (options_.spec_k + 1) + options_.prefill_chunk; }

 private:
  struct Sequence {
    client::SequenceHistory history;
    int64_t settled = 0;     // positions [0, settled) stand
    int64_t prompt_end = 0;  // decodes once settled has reached it
    int64_t left = 0;        // tokens it still wants
    int32_t newest = 0;      // the id at `settled`, once it decodes
    int64_t arrival = 0;
    bool ran = false;
  };

  Sequence Arrive();
  Sequence UnderWay();
  void Decode(Sequence& sequence, PlannedStep& step);
  void Prefill(Sequence& sequence, int64_t tokens, PlannedStep& step);
  // Adds the run and remembers its ids.
  void Run(Sequence& sequence, std::vector<int32_t> ids, PlannedStep& step);

  double Uniform();                 // [0, 1)
  int64_t Geometric(int64_t mean);  // >= 1
  int32_t Id() { return static_cast<int32_t>(Uniform() * static_cast<double>(options_.vocab)); }

  const PopulationOptions options_;
  std::mt19937_64 random_;
  int64_t arrivals_ = 0;
  std::vector<Sequence> sequences_;
};

}  // namespace engram::bench
