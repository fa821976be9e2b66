// Seeded numbers of the scales a trained engram has, each made from its place alone: any thread may make any part.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "server/model/gguf_types.h"

namespace engram {

// The `index`-th 64-bit number of stream `stream` (SplitMix64: a counter through a mixer).
inline uint64_t CounterRandom(uint64_t stream, uint64_t index) {
  uint64_t z = stream + (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

// Q2_K blocks [first, first + blocks) of a stream: values of both signs, most of 0.01 to 0.1, d and dmin finite.
void SynthQ2KBlocks(uint64_t stream, int64_t first, int64_t blocks, uint8_t* out);

// The values of the same blocks in another type (F32, F16, BF16, Q8_0, Q2_K): whole blocks of 256 values.
void SynthBlocks(GgufType type, uint64_t stream, int64_t first, int64_t blocks, uint8_t* out);

// A norm's weights: within 10 % of 1, as F32, F16 or BF16.
void SynthNorm(GgufType type, uint64_t stream, int64_t values, uint8_t* out);

// Nearest half, ties to even; too large is infinite.
uint16_t F16FromF32(float value);

}  // namespace engram
