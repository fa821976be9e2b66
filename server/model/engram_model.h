// What an engram needs of a model file: hostile bytes in, validated immutable weights out.
//
// Load() opens a GGUF (or shard 1 of a split), checks every rule of docs/formats.md, and keeps the tables and weights
// resident. An EngramModel never changes after that, so any thread may read it; whoever holds the shared_ptr pins the
// memory behind every pointer in it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/kernels.h"
#include "server/model/gguf.h"

namespace engram {

using Digest = std::array<uint8_t, 32>;  // SHA-256
std::string DigestHex(const Digest& digest);

enum class Residency {
  kRam,   // the table's bytes are read into anonymous memory
  kMmap,  // the table is the file's pages, read when first touched
};

struct LoadProgress {
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;  // tables and weights, bytes of the file
};

struct LoadOptions {
  Residency residency = Residency::kRam;
  // Layers to serve, by layer_id, in any order, each once; empty: all. The others are neither loaded nor listed; the
  // digests are of the whole model.
  std::vector<int64_t> layers;
  int threads = 1;  // for reading and expanding
  // Called from the loading thread, at most a few times a second, and once when done.
  std::function<void(const LoadProgress&)> progress;
  // Called from the loading thread with one line about what was left aside: a sidecar that is of no use, and why.
  std::function<void(const std::string&)> warn;
};

struct EngramGeometry {
  int64_t dim = 0;       // the model's hidden size
  int copies = 0;        // hc, 1..8
  int64_t head_dim = 0;  // key_length; 256
  int max_ngram = 0;     // N, 2..8
  int heads = 0;
  int columns = 0;  // n_hash_cols = (N - 1) * heads
  int64_t vocab = 0;
  int64_t compressed_vocab = 0;
  int32_t pad_id = 0;  // compressed
  float eps = 0;

  int64_t inputs() const { return columns * head_dim; }    // of wkv
  int64_t outputs() const { return dim * (copies + 1); }   // of wkv: a key for each copy, then the value
  int64_t highway_values() const { return copies * dim; }  // per token
};

struct EngramLayer {
  int64_t layer_id = 0;
  kernels::TableView table;
  GgufType table_type = GgufType::kQ2_K;
  kernels::ProjectionWeights wkv;
  GgufType wkv_type = GgufType::kBF16;  // as the file holds it
  kernels::GateWeights gate;
};

class EngramModel {
 public:
  // A failure is one line that names the file, the key or tensor, what it holds and what was expected.
  static absl::StatusOr<std::shared_ptr<const EngramModel>> Load(const std::string& path, const LoadOptions& options);

  virtual ~EngramModel() = default;

  const std::string& path() const { return path_; }
  const EngramGeometry& geometry() const { return geometry_; }
  // [vocab] compressed ids, -1 = unmapped.
  absl::Span<const int32_t> token_map() const { return token_map_; }
  // Constants of all layers, in the order of layers().
  const kernels::HashTables& hash_tables() const { return hash_tables_; }
  absl::Span<const EngramLayer> layers() const { return layers_; }
  Residency residency() const { return residency_; }

  // Over geometry, token_map, pad, multipliers, primes, offsets (docs/formats.md).
  const Digest& hash_digest() const { return hash_digest_; }
  // hash_digest plus eps, q/k, wkv, table type and row counts.
  const Digest& config_digest() const { return config_digest_; }
  // Over the tables' bytes too: of what was read into memory, or what a good sidecar says of a mapped file or of one of
  // which some layers are served. None: such a file without one.
  const std::optional<Digest>& content_digest() const { return content_digest_; }

  // Rows [first, first + count) of a layer's table as the file holds them, read from the file at this moment and not
  // from the resident table: out [count][84]. `layer` is an index into layers().
  virtual absl::Status ReadRowsFromFile(size_t layer, int64_t first, int64_t count, uint8_t* out) const = 0;
  // The same of bytes [at, at + bytes) of the table, for who takes all of it elsewhere.
  virtual absl::Status ReadTableFromFile(size_t layer, int64_t at, int64_t bytes, uint8_t* out) const = 0;

  // These rows of a layer's table (-1: none) will be read soon. Where the table is mapped, what is not in memory is
  // asked of the disk, all of it at once, without waiting; else nothing happens.
  virtual void WillReadRows(size_t layer, absl::Span<const int64_t> rows) const = 0;

 protected:
  EngramModel() = default;

  std::string path_;
  EngramGeometry geometry_;
  std::vector<int32_t> token_map_;
  std::vector<int64_t> multipliers_, primes_, offsets_;
  std::vector<uint64_t> reciprocals_;
  kernels::HashTables hash_tables_;
  std::vector<EngramLayer> layers_;
  Residency residency_ = Residency::kRam;
  Digest hash_digest_{}, config_digest_{};
  std::optional<Digest> content_digest_;
};

}  // namespace engram
