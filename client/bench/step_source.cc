#include "client/bench/step_source.h"

#include "absl/strings/str_cat.h"

namespace engram::bench {

SteadySource::SteadySource(const client::ModelInfo& model, const SteadyLoad& load, size_t slots, int64_t highway_starts)
    : tokens_(load.seed, model.vocab, load.ngram_pool),
      load_(load),
      lookback_(model.lookback_length()),
      position_limit_(model.limits.position_limit),
      highway_starts_(highway_starts),
      slots_(slots) {
  const auto per_call = static_cast<size_t>(load.sequences_per_call);
  const size_t groups = load.sessions == 0 ? slots : static_cast<size_t>(load.sessions) / per_call;
  for (size_t group = 0; group < groups; ++group) {
    std::vector<Sequence> sequences(per_call);
    for (size_t i = 0; i < per_call; ++i) {
      const size_t number = group * per_call + i;
      if (load.sessions > 0) sequences[i].session = absl::StrCat(load.session_prefix, number);
      sequences[i].key = Mix(load.seed ^ Mix(number));
    }
    slots_[group % slots].groups.push_back(std::move(sequences));
  }
}

void SteadySource::Next(size_t slot, Step* step) {
  Slot& own = slots_[slot];
  std::vector<Sequence>& group = own.groups[own.next++ % own.groups.size()];
  step->form = load_.form;
  step->highway_at = static_cast<int64_t>(Mix(slot ^ Mix(static_cast<uint64_t>(own.calls++))) %
                                          static_cast<uint64_t>(highway_starts_));
  step->sequences.resize(group.size());
  const auto count = static_cast<int64_t>(group.size());
  for (int64_t i = 0; i < count; ++i) {
    Sequence& sequence = group[static_cast<size_t>(i)];
    const int64_t tokens = load_.tokens_per_call / count + (i < load_.tokens_per_call % count ? 1 : 0);
    if (sequence.position + tokens > position_limit_) {
      sequence.key = Mix(sequence.key);
      sequence.position = 0;
    }
    StepSequence& out = step->sequences[static_cast<size_t>(i)];
    out.session = sequence.session;
    out.start_pos = sequence.position;
    tokens_.Fill(sequence.key, sequence.position, tokens, lookback_, &out.token_ids, &out.lookback);
    sequence.position += tokens;
  }
}

void SteadySource::Restart(size_t slot) {
  for (std::vector<Sequence>& group : slots_[slot].groups) {
    for (Sequence& sequence : group) {
      sequence.key = Mix(sequence.key);
      sequence.position = 0;
    }
  }
}

std::vector<std::string> SteadySource::sessions() const {
  std::vector<std::string> names;
  for (const Slot& slot : slots_) {
    for (const std::vector<Sequence>& group : slot.groups) {
      for (const Sequence& sequence : group) {
        if (!sequence.session.empty()) names.push_back(sequence.session);
      }
    }
  }
  return names;
}

}  // namespace engram::bench
