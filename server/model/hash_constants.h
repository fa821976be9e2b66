// How the constants of the n-gram hash are made (docs/formats.md, "Making the constants"): exactly as the released
// model's.
//
// Pure functions; the lists are per layer, layer-major.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace engram {

// [layers][max_ngram]: odd numbers drawn by numpy's default_rng(10007 * layer_id).integers, re-made here bit for bit.
// `compressed_vocab` is 1 .. kMostCompressedVocab, ids are not negative.
std::vector<int64_t> MakeMultipliers(absl::Span<const int64_t> layer_ids, int max_ngram, int64_t compressed_vocab);

// Above it numpy draws with 32-bit words, which nobody needs.
inline constexpr int64_t kMostCompressedVocab = int64_t{1} << 29;

// [layers][(max_ngram - 1) * heads]: for each layer and n-gram size the search restarts at `engram_vocab_size`; every
// prime is taken once in the whole model. engram_vocab_size is 2 .. 2^40.
std::vector<int64_t> MakePrimes(int64_t layers, int max_ngram, int heads, int64_t engram_vocab_size);

// Running sum of each layer's primes, exclusive.
std::vector<int64_t> MakeOffsets(absl::Span<const int64_t> primes, int64_t columns);

bool IsPrime(uint64_t n);

// numpy.random.default_rng(seed), as far as it is needed: SeedSequence, PCG64 (XSL-RR 128/64), Lemire's bounded draw.
class NumpyGenerator {
 public:
  explicit NumpyGenerator(uint64_t seed);
  uint64_t Next();
  // In [0, bound), bound > 2^32: Generator.integers(0, bound).
  uint64_t Below(uint64_t bound);

 private:
  using Uint128 = unsigned __int128;
  void Step();

  Uint128 state_ = 0, increment_ = 0;
};

}  // namespace engram
