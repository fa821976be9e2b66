// The rules that constants of the n-gram hash obey, so that no file can make a row id wrap or leave its table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/types/span.h"

namespace engram {

struct HashRuleInput {
  int64_t compressed_vocab = 0;
  int64_t pad_id = 0;
  int64_t columns = 0;
  absl::Span<const int64_t> layer_ids;
  absl::Span<const int64_t> multipliers;  // [layers][max_ngram]
  absl::Span<const int64_t> primes;       // [layers][columns]
  absl::Span<const int64_t> offsets;      // [layers][columns]
  absl::Span<const int64_t> rows;         // [layers]
};

// A broken rule: which array (its name without the prefix), which element (-1 = not an array), what it holds, what was
// expected.
struct HashRuleBreach {
  std::string array;
  int64_t index = -1;
  int64_t held = 0;
  std::string expected;
};

// The first breach, in the order pad, multipliers, then layer by layer primes and offsets; nothing when all rules hold.
// The caller has checked the arrays' lengths.
std::optional<HashRuleBreach> FindHashRuleBreach(const HashRuleInput& input);

}  // namespace engram
