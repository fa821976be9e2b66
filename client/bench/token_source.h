// Which tokens a sequence has: a function of seed, sequence and position alone, so that any position's look-back is
// known without keeping a history, and every run of one seed sends the same ids.
//
// Ids are Zipf-like (the k-th most frequent one about 1/k as often as the first, the low ids being the frequent ones,
// as tokenizers number them), so that n-grams, and with them table rows, repeat as they do in text. With a pool,
// sequences are made of phrases of 8 tokens, drawn Zipf-like from that many: whole n-grams repeat, as in prompts with
// templates.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace engram::bench {

// 64 well-mixed bits of a 64-bit state (splitmix64): for seeds and for everything drawn here.
uint64_t Mix(uint64_t state);

// The same of a name.
uint64_t MixName(absl::string_view name);

// In [0, 1), from 53 bits of it.
double UnitOf(uint64_t bits);

// In [0, count), Zipf-like: the density at k is about 1 / (k + 1).
int64_t ZipfOf(uint64_t bits, int64_t count);

// Immutable; any thread.
class TokenSource {
 public:
  // `vocab` >= 1. `ngram_pool` phrases; 0: every id is drawn by itself.
  TokenSource(uint64_t seed, int64_t vocab, int64_t ngram_pool) : seed_(seed), vocab_(vocab), ngram_pool_(ngram_pool) {}

  // In [0, vocab); -1 before the sequence's start.
  int32_t At(uint64_t sequence, int64_t position) const;

  // The ids at [start_pos, start_pos + tokens), and the `lookback` ones before, newest first. Both are overwritten.
  void Fill(uint64_t sequence, int64_t start_pos, int64_t tokens, int lookback, std::vector<int32_t>* token_ids,
            std::vector<int32_t>* lookback_ids) const;

 private:
  uint64_t seed_;
  int64_t vocab_;
  int64_t ngram_pool_;
};

}  // namespace engram::bench
