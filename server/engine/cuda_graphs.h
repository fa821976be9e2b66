// Launches of recurring shape, recorded once and replayed as one.
//
// A key stands for launches that are the same to the last argument: their pointers are the lane's own buffers, and what
// differs between steps stands in memory that they read.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/engine/cuda_resources.h"

namespace engram {

// For one thread at a time.
class CudaGraphs {
 public:
  // Layer, tokens of each path, gates of each type.
  using Key = std::array<int64_t, 6>;

  // Keeps the shapes used last: decode steps of up to 64 tokens have one each.
  static constexpr size_t kMostShapes = 64;
  // Every so many replays, the launches run one by one, so that their stages can be timed.
  static constexpr int kReplaysPerTiming = 32;

  explicit CudaGraphs(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {}

  // Runs what `launch` puts into `stream`: by itself the first time, recorded the second, replayed from then on.
  // `launch(timed)` may record events where `timed`; `timed` says afterwards whether it did. Where recording fails
  // the shape stays one that is launched by itself.
  absl::Status Run(const Key& key, CUstream_st* stream, const std::function<absl::Status(bool timed)>& launch,
                   bool& timed);

 private:
  struct Shape {
    Key key;
    int uses = 0;
    CudaGraph graph;
  };

  CudaGraph Record(CUstream_st* stream, const std::function<absl::Status(bool timed)>& launch) const;

  const std::shared_ptr<const CudaDevice> device_;
  std::list<Shape> shapes_;  // used last first
  absl::flat_hash_map<Key, std::list<Shape>::iterator> by_key_;
};

}  // namespace engram
