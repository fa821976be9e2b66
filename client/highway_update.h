// The worker's part of FORM_UPDATE, and of FORM_GATE with a prepared value: the same bits as FORM_HIGHWAY.
#pragma once

#include <cstdint>

#include "client/model_info.h"

namespace engram::client {

// Pointers may have any alignment; the caller has checked the lengths.
struct HighwayUpdate {
  HighwayDtype dtype = HighwayDtype::kF32;
  int64_t tokens = 0;
  int64_t hc = 0;
  int64_t dim = 0;
  const void* gates = nullptr;          // [tokens, hc] f32
  const void* value = nullptr;          // [tokens, dim] bf16
  const uint8_t* token_mask = nullptr;  // [tokens], 0 = masked; null: all live
  const void* highway = nullptr;        // [tokens, hc, dim] of `dtype`
  void* out = nullptr;                  // likewise; `highway` itself, or memory apart from it
};

// t = g * v rounded to f32, h + t rounded to f32, never fused; a bf16 sum is rounded once more. A masked token's bytes
// are copied: adding 0 would turn -0 into 0. Pure, any thread.
void UpdateHighway(const HighwayUpdate& update);

}  // namespace engram::client
