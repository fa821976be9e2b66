#include "server/model/hash_constants.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <unordered_set>

namespace engram {
namespace {

using Uint128 = unsigned __int128;

// numpy's SeedSequence for one integer of at most two words, pool of four.
class SeedSequence {
 public:
  explicit SeedSequence(uint64_t entropy) {
    const std::array<uint32_t, 4> words = {static_cast<uint32_t>(entropy), static_cast<uint32_t>(entropy >> 32), 0, 0};
    for (size_t i = 0; i < pool_.size(); ++i) pool_[i] = Hash(words[i]);
    for (size_t from = 0; from < pool_.size(); ++from) {
      for (size_t to = 0; to < pool_.size(); ++to) {
        if (from != to) pool_[to] = Mix(pool_[to], Hash(pool_[from]));
      }
    }
  }

  std::array<uint64_t, 4> State() const {
    uint32_t constant = 0x8B51F9DD;
    std::array<uint64_t, 4> out{};
    for (size_t i = 0; i < 2 * out.size(); ++i) {
      uint32_t word = pool_[i % pool_.size()] ^ constant;
      constant *= 0x58F38DED;
      word *= constant;
      word ^= word >> 16;
      out[i / 2] |= static_cast<uint64_t>(word) << (32 * (i % 2));
    }
    return out;
  }

 private:
  uint32_t Hash(uint32_t value) {
    value ^= constant_;
    constant_ *= 0x931E8875;
    value *= constant_;
    return value ^ value >> 16;
  }

  static uint32_t Mix(uint32_t x, uint32_t y) {
    const uint32_t mixed = x * 0xCA01F9DDu - y * 0x4973F715u;
    return mixed ^ mixed >> 16;
  }

  uint32_t constant_ = 0x43B0D7E5;
  std::array<uint32_t, 4> pool_{};
};

uint64_t MulMod(uint64_t a, uint64_t b, uint64_t n) { return static_cast<uint64_t>(Uint128{a} * b % n); }

uint64_t PowMod(uint64_t base, uint64_t exponent, uint64_t n) {
  uint64_t result = 1;
  for (base %= n; exponent != 0; exponent >>= 1) {
    if (exponent & 1) result = MulMod(result, base, n);
    base = MulMod(base, base, n);
  }
  return result;
}

}  // namespace

NumpyGenerator::NumpyGenerator(uint64_t seed) {
  const std::array<uint64_t, 4> words = SeedSequence(seed).State();
  increment_ = (Uint128{words[2]} << 64 | words[3]) << 1 | 1;
  Step();
  state_ += Uint128{words[0]} << 64 | words[1];
  Step();
}

void NumpyGenerator::Step() {
  constexpr Uint128 kMultiplier = Uint128{2549297995355413924u} << 64 | 4865540595714422341u;
  state_ = state_ * kMultiplier + increment_;
}

uint64_t NumpyGenerator::Next() {
  Step();
  return std::rotr(static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_),
                   static_cast<int>(state_ >> 122));
}

uint64_t NumpyGenerator::Below(uint64_t bound) {
  Uint128 product = Uint128{Next()} * bound;
  if (static_cast<uint64_t>(product) < bound) {
    const uint64_t threshold = (0 - bound) % bound;
    while (static_cast<uint64_t>(product) < threshold) product = Uint128{Next()} * bound;
  }
  return static_cast<uint64_t>(product >> 64);
}

bool IsPrime(uint64_t n) {
  // Miller-Rabin with these bases is exact for all 64-bit numbers.
  static constexpr uint64_t kBases[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
  if (n < 2) return false;
  for (uint64_t p : kBases) {
    if (n % p == 0) return n == p;
  }
  const int twos = std::countr_zero(n - 1);
  const uint64_t odd = (n - 1) >> twos;
  for (uint64_t base : kBases) {
    uint64_t x = PowMod(base, odd, n);
    bool passes = x == 1 || x == n - 1;
    for (int i = 1; i < twos && !passes; ++i) {
      x = MulMod(x, x, n);
      passes = x == n - 1;
    }
    if (!passes) return false;
  }
  return true;
}

std::vector<int64_t> MakeMultipliers(absl::Span<const int64_t> layer_ids, int max_ngram, int64_t compressed_vocab) {
  const int64_t bound = std::max<int64_t>(1, std::numeric_limits<int64_t>::max() / compressed_vocab / 2);
  std::vector<int64_t> multipliers;
  for (int64_t layer : layer_ids) {
    NumpyGenerator generator(10007 * static_cast<uint64_t>(layer));
    for (int i = 0; i < max_ngram; ++i) {
      multipliers.push_back(static_cast<int64_t>(2 * generator.Below(static_cast<uint64_t>(bound)) + 1));
    }
  }
  return multipliers;
}

std::vector<int64_t> MakePrimes(int64_t layers, int max_ngram, int heads, int64_t engram_vocab_size) {
  std::unordered_set<int64_t> seen;
  std::vector<int64_t> primes;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int size = 2; size <= max_ngram; ++size) {
      int64_t candidate = engram_vocab_size - 1;
      for (int head = 0; head < heads; ++head) {
        do {
          ++candidate;
        } while (seen.contains(candidate) || !IsPrime(static_cast<uint64_t>(candidate)));
        seen.insert(candidate);
        primes.push_back(candidate);
      }
    }
  }
  return primes;
}

std::vector<int64_t> MakeOffsets(absl::Span<const int64_t> primes, int64_t columns) {
  std::vector<int64_t> offsets;
  int64_t sum = 0;
  for (size_t i = 0; i < primes.size(); ++i) {
    if (i % columns == 0) sum = 0;
    offsets.push_back(sum);
    sum += primes[i];
  }
  return offsets;
}

}  // namespace engram
