#include "client/bench/token_source.h"

#include <algorithm>
#include <cmath>

namespace engram::bench {
namespace {

constexpr int64_t kPhraseTokens = 8;

}  // namespace

uint64_t Mix(uint64_t state) {
  state += 0x9E3779B97F4A7C15u;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

uint64_t MixName(absl::string_view name) {
  uint64_t state = name.size();
  for (const char c : name) state = Mix(state ^ static_cast<unsigned char>(c));
  return state;
}

double UnitOf(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

int64_t ZipfOf(uint64_t bits, int64_t count) {
  // The inverse of log(k + 1) / log(count + 1), the distribution of a density that falls as 1 / (k + 1).
  const double rank = std::exp(UnitOf(bits) * std::log1p(static_cast<double>(count)));
  return std::clamp<int64_t>(static_cast<int64_t>(rank) - 1, 0, count - 1);
}

int32_t TokenSource::At(uint64_t sequence, int64_t position) const {
  if (position < 0) return -1;
  const auto at = static_cast<uint64_t>(position);
  if (ngram_pool_ == 0) return static_cast<int32_t>(ZipfOf(Mix(seed_ ^ Mix(sequence ^ Mix(at))), vocab_));
  const int64_t phrase = ZipfOf(Mix(seed_ ^ Mix(sequence ^ Mix(at / kPhraseTokens))), ngram_pool_);
  const uint64_t within = static_cast<uint64_t>(phrase) * kPhraseTokens + at % kPhraseTokens;
  return static_cast<int32_t>(ZipfOf(Mix(seed_ ^ Mix(~within)), vocab_));
}

void TokenSource::Fill(uint64_t sequence, int64_t start_pos, int64_t tokens, int lookback,
                       std::vector<int32_t>* token_ids, std::vector<int32_t>* lookback_ids) const {
  token_ids->clear();
  for (int64_t t = 0; t < tokens; ++t) token_ids->push_back(At(sequence, start_pos + t));
  lookback_ids->clear();
  for (int i = 1; i <= lookback; ++i) lookback_ids->push_back(At(sequence, start_pos - i));
}

}  // namespace engram::bench
