#include "server/model/digests.h"

#include <openssl/evp.h>

#include <algorithm>
#include <bit>

#include "absl/strings/escaping.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

constexpr absl::string_view kHashTag = "engram.hash_digest.v1\n";
constexpr absl::string_view kConfigTag = "engram.config_digest.v1\n";

static_assert(std::endian::native == std::endian::little, "integers are digested as they lie in memory");

EVP_MD_CTX* Context(void* context) { return static_cast<EVP_MD_CTX*>(context); }

}  // namespace

std::string DigestHex(const Digest& digest) {
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) { EVP_DigestInit_ex(Context(context_), EVP_sha256(), nullptr); }

Sha256::~Sha256() { EVP_MD_CTX_free(Context(context_)); }

void Sha256::Add(absl::Span<const uint8_t> bytes) { EVP_DigestUpdate(Context(context_), bytes.data(), bytes.size()); }

void Sha256::AddText(absl::string_view text) { EVP_DigestUpdate(Context(context_), text.data(), text.size()); }

void Sha256::AddI64(int64_t value) { EVP_DigestUpdate(Context(context_), &value, sizeof value); }

void Sha256::AddU32(uint32_t value) { EVP_DigestUpdate(Context(context_), &value, sizeof value); }

void Sha256::AddI32s(absl::Span<const int32_t> values) {
  EVP_DigestUpdate(Context(context_), values.data(), values.size() * sizeof(int32_t));
}

void Sha256::AddI64s(absl::Span<const int64_t> values) {
  EVP_DigestUpdate(Context(context_), values.data(), values.size() * sizeof(int64_t));
}

Digest Sha256::Finish() {
  Digest digest;
  EVP_DigestFinal_ex(Context(context_), digest.data(), nullptr);
  return digest;
}

Digest HashDigest(const EngramHeader& header) {
  const EngramGeometry& geometry = header.geometry;
  Sha256 sha;
  sha.AddText(kHashTag);
  sha.AddI64(static_cast<int64_t>(header.layer_ids.size()));
  sha.AddI64(geometry.max_ngram);
  sha.AddI64(geometry.heads);
  sha.AddI64(geometry.head_dim);
  sha.AddI64(geometry.vocab);
  sha.AddI64(geometry.compressed_vocab);
  sha.AddI64(geometry.pad_id);
  sha.AddI64s(header.layer_ids);
  sha.AddI32s(header.token_map);
  sha.AddI64s(header.multipliers);
  sha.AddI64s(header.primes);
  sha.AddI64s(header.offsets);
  return sha.Finish();
}

Digest ConfigDigest(const EngramHeader& header, const Digest& hash_digest, absl::Span<const WeightDigests> weights) {
  Sha256 sha;
  sha.AddText(kConfigTag);
  sha.Add(hash_digest);
  sha.AddI64(header.geometry.dim);
  sha.AddI64(header.geometry.copies);
  sha.AddU32(std::bit_cast<uint32_t>(header.geometry.eps));
  for (size_t i = 0; i < header.layers.size(); ++i) {
    const LayerTensors& layer = header.layers[i];
    sha.AddI64(header.layer_ids[i]);
    sha.AddU32(static_cast<uint32_t>(layer.table.tensor.type));
    sha.AddI64(header.rows(i));
    sha.AddU32(static_cast<uint32_t>(layer.wkv.tensor.type));
    sha.Add(weights[i].wkv);
    sha.AddU32(static_cast<uint32_t>(layer.q.tensor.type));
    sha.Add(weights[i].q);
    sha.AddU32(static_cast<uint32_t>(layer.k.tensor.type));
    sha.Add(weights[i].k);
  }
  return sha.Finish();
}

absl::StatusOr<Digest> DigestTensor(const TensorPlace& place) {
  constexpr int64_t kPiece = int64_t{4} << 20;
  std::vector<uint8_t> piece(std::min(kPiece, place.tensor.bytes));
  Sha256 sha;
  for (int64_t done = 0; done < place.tensor.bytes;) {
    const int64_t bytes = std::min(kPiece, place.tensor.bytes - done);
    RETURN_IF_ERROR(place.file->ReadAt(place.tensor.offset + done, piece.data(), bytes));
    sha.Add(absl::MakeConstSpan(piece.data(), bytes));
    done += bytes;
  }
  return sha.Finish();
}

}  // namespace engram
