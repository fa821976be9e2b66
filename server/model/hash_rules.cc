#include "server/model/hash_rules.h"

#include <limits>

#include "absl/strings/str_cat.h"

namespace engram {
namespace {

// id * multiplier stays below 2^63 for every compressed id: the hash never wraps.
std::optional<HashRuleBreach> CheckMultipliers(const HashRuleInput& input) {
  const int64_t most = std::numeric_limits<int64_t>::max() / input.compressed_vocab;
  for (size_t i = 0; i < input.multipliers.size(); ++i) {
    const int64_t held = input.multipliers[i];
    if (held > 0 && held % 2 == 1 && held <= most) continue;
    return HashRuleBreach{
        "multipliers", static_cast<int64_t>(i), held,
        absl::StrCat("an odd number from 1 to ", most, ", which is 2^63 - 1 over the compressed vocabulary")};
  }
  return std::nullopt;
}

// Bucket after bucket inside the table. The running sum never leaves [0, rows], so it cannot wrap.
std::optional<HashRuleBreach> CheckBuckets(const HashRuleInput& input, size_t layer) {
  const std::string of_layer = absl::StrCat(" of layer ", input.layer_ids[layer]);
  int64_t sum = 0;
  for (int64_t column = 0; column < input.columns; ++column) {
    const int64_t index = static_cast<int64_t>(layer) * input.columns + column;
    const int64_t offset = input.offsets[index], prime = input.primes[index];
    if (prime < 2) return HashRuleBreach{"primes", index, prime, "at least 2"};
    if (offset != sum) {
      return HashRuleBreach{"offsets", index, offset, absl::StrCat(sum, ", the sum of the primes before it", of_layer)};
    }
    if (prime > input.rows[layer] - sum) {
      return HashRuleBreach{"primes", index, prime,
                            absl::StrCat("at most ", input.rows[layer] - sum, ": with offset ", offset,
                                         " it leaves the ", input.rows[layer], " rows of the table", of_layer)};
    }
    sum += prime;
  }
  return std::nullopt;
}

}  // namespace

std::optional<HashRuleBreach> FindHashRuleBreach(const HashRuleInput& input) {
  if (input.pad_id < 0 || input.pad_id >= input.compressed_vocab) {
    return HashRuleBreach{"pad_id", -1, input.pad_id,
                          absl::StrCat("a compressed id from 0 to ", input.compressed_vocab - 1)};
  }
  std::optional<HashRuleBreach> breach = CheckMultipliers(input);
  for (size_t layer = 0; layer < input.layer_ids.size() && !breach.has_value(); ++layer) {
    breach = CheckBuckets(input, layer);
  }
  return breach;
}

}  // namespace engram
