// Into the layouts of projection_layout.h. Plain code: it runs once per weight, or once per token.
#pragma once

#include "kernels/cpu/projection_layout.h"
#include "kernels/workers.h"

namespace engram::kernels {

// Blocks of Q2_K in their order; only where the file holds Q2_K.
void PackQ2K(const ProjectionWeights& weights, uint8_t* packed, Workers& workers);

// As bf16, whatever the file holds.
void PackBf16(const ProjectionWeights& weights, uint8_t* packed, Workers& workers);

// x [tokens, inputs] by tiles; `packed` is as large.
void PackTokens(const Bf16* x, const Tiles& tiles, int64_t inputs, Bf16* packed, Workers& workers);

}  // namespace engram::kernels
