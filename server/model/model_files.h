// A model as one GGUF file or as the shards of a split, seen as one set of keys and tensors.
//
// Shards are named NAME-00001-of-0000N.gguf. Shard 1 holds all keys of the model; a tensor lies whole in any one shard;
// every shard has its own alignment. Only headers are read.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/gguf.h"
#include "server/model/model_file.h"

namespace engram {

// A tensor and the file that holds it.
struct TensorPlace {
  std::shared_ptr<const ModelFile> file;
  GgufTensor tensor;
};

struct Shard {
  std::shared_ptr<const ModelFile> file;
  std::vector<uint8_t> header_bytes;  // what the header's values point into
  GgufHeader header;
};

// Reads and parses the header of one file.
absl::StatusOr<Shard> OpenShard(const std::string& path);

class ModelFiles {
 public:
  // `path`: a whole model, or shard 1 of a split; any other shard is refused, and a missing one is named.
  static absl::StatusOr<ModelFiles> Open(const std::string& path);

  const std::string& path() const { return shards_.front().file->path(); }
  const std::deque<Shard>& shards() const { return shards_; }
  // The header that holds the model's keys.
  const GgufHeader& metadata() const { return shards_.front().header; }
  int64_t total_bytes() const;

  // NotFound names the tensor.
  absl::StatusOr<TensorPlace> FindTensor(const std::string& name) const;

 private:
  std::deque<Shard> shards_;  // a deque, because the first header is read from while others are added
};

// NAME-00002-of-00005.gguf for (".../NAME.gguf" without its suffix, 2, 5).
std::string ShardPath(const std::string& stem, int64_t number, int64_t count);

}  // namespace engram
