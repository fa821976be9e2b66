// Values of small tensors (wkv, q, k) out of the types that files hold them in: F32, F16, BF16, Q8_0, Q2_K.
//
// Pure functions over plain memory. Inputs have any alignment and whole blocks; the caller has checked type and
// lengths.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "server/model/gguf_types.h"

namespace engram {

// f32 value of an IEEE half, exactly; of a NaN, a NaN.
float F32FromF16(uint16_t bits);

// Nearest bf16, ties to even; a NaN stays a (quiet) NaN.
kernels::Bf16 Bf16FromF32(float value);

// Whether the two functions below know the type.
bool CanExpand(GgufType type);

// `values` f32 values, a multiple of the type's block.
void ExpandToF32(GgufType type, const uint8_t* bytes, int64_t values, float* out);

// The same, rounded to bf16. BF16 is copied bit for bit.
void ExpandToBf16(GgufType type, const uint8_t* bytes, int64_t values, kernels::Bf16* out);

}  // namespace engram
