// The same projection by libraries of others, where they are installed: what ours is compared with, in the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/kernels.h"

namespace engram::kernels {

struct Peer {
  const char* name;
  bool q2k;  // takes weights as Q2_K blocks, else as bf16
  // The projection of `tokens` tokens of x [tokens, inputs] bf16, ready to run on `threads` threads; weights are laid
  // out for it beforehand. It keeps what it needs of `weights` and `x` itself. Empty: the library cannot on this
  // machine.
  std::function<void()> (*prepare)(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, int threads);
};

// Those that this was built with; often none.
std::vector<Peer> Peers();

#ifdef ENGRAM_BENCH_ONEDNN
// bf16 weights, activations and results, f32 accumulation: oneDNN's matmul with weights in the layout it asks for.
std::function<void()> PrepareOneDnn(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, int threads);
#endif
#ifdef ENGRAM_BENCH_GGML
// Q2_K weights as in the file, and activations that ggml rounds to int8 (Q8_K) as part of the work; f32 results.
std::function<void()> PrepareGgml(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, int threads);
// The same with weights interleaved for the machine, where ggml has a layout for it.
std::function<void()> PrepareGgmlRepacked(const ProjectionWeights& weights, const Bf16* x, int64_t tokens, int threads);
#endif

}  // namespace engram::kernels
