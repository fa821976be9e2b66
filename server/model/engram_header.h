// What a model file says of its engram, checked, before any tensor is read: dialect A of docs/formats.md.
//
// Every rule of docs/formats.md is applied here, so whoever holds an EngramHeader may trust lengths, ranges and shapes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/engram_model.h"
#include "server/model/model_files.h"

namespace engram {

struct LayerTensors {
  TensorPlace table, wkv, q, k;
};

struct EngramHeader {
  std::string architecture;
  std::string engram_prefix;  // "deepseek41.engram." or "deepseek4.engram.", as layer_ids has it
  EngramGeometry geometry;
  std::vector<int64_t> layer_ids;    // ascending
  std::vector<int32_t> token_map;    // [vocab]
  std::vector<int64_t> multipliers;  // [layers][max_ngram]
  std::vector<int64_t> primes;       // [layers][columns]
  std::vector<int64_t> offsets;      // [layers][columns]
  std::vector<LayerTensors> layers;  // in the order of layer_ids

  int64_t rows(size_t layer) const { return layers[layer].table.tensor.ne[1]; }
};

absl::StatusOr<EngramHeader> ReadEngramHeader(const ModelFiles& files);

// Bounds beyond which a file is refused: far above any engram, low enough that no product of them leaves 63 bits.
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxHeads = 1024;
inline constexpr int64_t kMaxDim = int64_t{1} << 24;

}  // namespace engram
