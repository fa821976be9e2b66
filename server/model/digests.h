// hash_digest and config_digest: SHA-256 over the byte encodings written down in docs/formats.md.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/model/engram_header.h"
#include "server/model/engram_model.h"

namespace engram {

// SHA-256 of what is added, piece by piece.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Add(absl::Span<const uint8_t> bytes);
  void AddText(absl::string_view text);
  void AddI64(int64_t value);  // little endian, as all integers here
  void AddU32(uint32_t value);
  void AddI32s(absl::Span<const int32_t> values);
  void AddI64s(absl::Span<const int64_t> values);
  Digest Finish();  // once

 private:
  void* context_;  // EVP_MD_CTX
};

Digest HashDigest(const EngramHeader& header);

// SHA-256 of the bytes of the small tensors of a layer, as the file holds them.
struct WeightDigests {
  Digest wkv, q, k;
};

// `weights`: one per layer.
Digest ConfigDigest(const EngramHeader& header, const Digest& hash_digest, absl::Span<const WeightDigests> weights);

// Reads a tensor piece by piece and digests it: for a look at a file that is not loaded.
absl::StatusOr<Digest> DigestTensor(const TensorPlace& place);

}  // namespace engram
