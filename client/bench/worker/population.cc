#include "client/bench/worker/population.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace engram::bench {

Population::Population(const PopulationOptions& options) : options_(options), random_(options.seed) {
  for (int i = 0; i < options_.batch; ++i) sequences_.push_back(UnderWay());
}

// The library's distributions differ between implementations; a seed is to mean the same everywhere.
double Population::Uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

int64_t Population::Geometric(int64_t mean) {
  if (mean <= 1) return 1;
  const double stay = 1 - 1 / static_cast<double>(mean);
  return 1 + static_cast<int64_t>(std::log1p(-Uniform()) / std::log(stay));
}

Population::Sequence Population::Arrive() {
  // Room for one step of decoding at the least.
  const int64_t most = std::max<int64_t>(1, options_.position_limit - options_.spec_k - 1);
  const int64_t prompt = std::min(Geometric(options_.prompt_mean), most);
  Sequence sequence{.history = client::SequenceHistory(options_.max_ngram)};
  sequence.prompt_end = prompt;
  sequence.left = Geometric(options_.output_mean);
  sequence.arrival = ++arrivals_;
  return sequence;
}

Population::Sequence Population::UnderWay() {
  Sequence sequence = Arrive();
  // Lengths are geometric: what is left does not depend on what has been.
  const int64_t most = std::max<int64_t>(1, options_.position_limit - options_.spec_k - 1);
  sequence.settled = std::min(most, sequence.prompt_end + Geometric(options_.output_mean) - 1);
  sequence.prompt_end = sequence.settled;
  std::vector<int32_t> lookback;
  for (int64_t back = 1; back < options_.max_ngram; ++back) {
    lookback.push_back(back <= sequence.settled ? Id() : client::kDeadToken);
  }
  // Cannot fail: what lies before position 0 is dead, and nothing else is.
  sequence.history = *client::SequenceHistory::Seeded(options_.max_ngram, sequence.settled, lookback);
  sequence.newest = Id();
  return sequence;
}

PlannedStep Population::Next() {
  for (Sequence& sequence : sequences_) {
    if (sequence.left > 0 && sequence.settled + options_.spec_k + 1 <= options_.position_limit) continue;
    sequence = options_.prefill_chunk > 0 ? Arrive() : UnderWay();
  }
  PlannedStep step;
  std::vector<Sequence*> waiting;
  for (Sequence& sequence : sequences_) {
    if (sequence.settled < sequence.prompt_end) {
      waiting.push_back(&sequence);
    } else {
      Decode(sequence, step);
    }
  }
  std::sort(waiting.begin(), waiting.end(), [](auto* a, auto* b) { return a->arrival < b->arrival; });
  int64_t room = options_.prefill_chunk;
  for (Sequence* sequence : waiting) {
    const int64_t tokens = std::min(room, sequence->prompt_end - sequence->settled);
    if (tokens == 0) break;
    room -= tokens;
    Prefill(*sequence, tokens, step);
  }
  return step;
}

void Population::Decode(Sequence& sequence, PlannedStep& step) {
  std::vector<int32_t> ids = {sequence.newest};
  for (int draft = 0; draft < options_.spec_k; ++draft) ids.push_back(Id());
  int64_t accepted = 0;
  while (accepted < options_.spec_k && Uniform() < options_.accept) ++accepted;
  Run(sequence, std::move(ids), step);
  sequence.settled += accepted + 1;
  sequence.newest = Id();
  step.emitted += std::min(accepted + 1, sequence.left);
  sequence.left -= accepted + 1;
}

void Population::Prefill(Sequence& sequence, int64_t tokens, PlannedStep& step) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < tokens; ++i) ids.push_back(Id());
  Run(sequence, std::move(ids), step);
  step.prefill_tokens += tokens;
  sequence.settled += tokens;
  if (sequence.settled < sequence.prompt_end) return;
  // The prompt's last position gives the first token.
  sequence.newest = Id();
  step.emitted += 1;
  sequence.left -= 1;
}

void Population::Run(Sequence& sequence, std::vector<int32_t> ids, PlannedStep& step) {
  StepRun run;
  run.start_pos = sequence.settled;
  // Neither can fail: positions up to `settled` are known.
  run.lookback = *sequence.history.Lookback(sequence.settled);
  sequence.history.Write(sequence.settled, ids, {}).IgnoreError();
  run.token_ids = std::move(ids);
  step.tokens += static_cast<int64_t>(run.token_ids.size());
  step.arrived += sequence.ran ? 0 : 1;
  sequence.ran = true;
  step.runs.push_back(std::move(run));
}

}  // namespace engram::bench
