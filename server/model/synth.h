// Makes model files of dialect A with seeded contents: for tests, benchmarks, and machines that lack the real model.
//
// Constants are made exactly as the released model's are (hash_constants.h); the file loads like any other. Contents
// depend on the options and the seed only, not on the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/gguf_types.h"

namespace engram {

struct SynthOptions {
  std::string out;  // NAME.gguf; with split > 1 the files are NAME-00001-of-0000N.gguf
  std::vector<int64_t> layers = {1, 14};
  int64_t dim = 64;
  int64_t hc = 4;
  int64_t max_ngram = 4;
  int64_t heads = 8;
  int64_t vocab = 512;
  int64_t compressed_vocab = 400;
  int64_t dead_tokens = 0;          // entries of token_map that are -1
  int64_t pad_id = 2;               // compressed; token_map[pad_id] is made to differ from it
  int64_t engram_vocab_size = 211;  // where the search for primes begins: about the rows of one column
  double rows_scale = 1;            // of engram_vocab_size
  double eps = 1e-20;
  GgufType wkv_type = GgufType::kQ2_K;
  GgufType qk_type = GgufType::kF32;  // F32, F16 or BF16
  int64_t alignment = 32;
  int64_t split = 1;
  uint64_t seed = 1;
  int threads = 1;
  bool force = false;  // replace files that exist
  // Called a few times a second from the calling thread, and once when done.
  std::function<void(int64_t bytes_done, int64_t bytes_total)> progress;
};

// The geometry of a preset, "tiny" or "v41".
absl::StatusOr<SynthOptions> SynthPreset(const std::string& name);

// Writes the files and returns their paths. They appear under their names only when they are complete. AlreadyExists
// where one stands already, ResourceExhausted where the disk is too small, InvalidArgument for a geometry that no file
// may have.
absl::StatusOr<std::vector<std::string>> WriteSynthModel(const SynthOptions& options);

// The same model as the bytes of one file (split is ignored): for small ones.
absl::StatusOr<std::string> SynthModelBytes(const SynthOptions& options);

}  // namespace engram
