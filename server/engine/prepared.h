// A prepared result: what was hashed, gathered and projected ahead of the layers. What a ticket stands for.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "server/engine/staging.h"

namespace engram {

// Written by the engine once, immutable after; shared by the ticket store and the calls that use it.
struct Prepared {
  struct LayerKv {
    int layer = 0;         // index into EngramModel::layers()
    StagingMemory memory;  // of kv

    kernels::Bf16* kv() const { return reinterpret_cast<kernels::Bf16*>(memory.get()); }  // [tokens, dim * (hc + 1)]
  };

  int64_t tokens = 0;
  std::vector<int64_t> ids;         // [tokens][layers of the model][columns]
  std::vector<uint8_t> token_mask;  // [tokens]; empty: all live
  std::vector<LayerKv> layers;      // those asked for, in the order asked for

  // Null where the layer was not prepared.
  const LayerKv* Find(int layer) const {
    for (const LayerKv& kv : layers) {
      if (kv.layer == layer) return &kv;
    }
    return nullptr;
  }
};

}  // namespace engram
