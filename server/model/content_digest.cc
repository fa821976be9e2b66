#include "server/model/content_digest.h"

#include <algorithm>
#include <atomic>

#include "server/model/chunk_threads.h"
#include "server/model/digests.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

constexpr absl::string_view kContentTag = "engram.content_digest.v1\n";

// One read: large enough that a disk streams. The digest, at 2 GB/s a thread, never waits for memory.
constexpr int64_t kPiece = int64_t{8} << 20;

absl::StatusOr<Digest> DigestChunk(const TensorPlace& table, int64_t chunk, std::atomic<int64_t>& bytes_done) {
  const int64_t end = std::min(table.tensor.bytes, (chunk + 1) * kContentChunk);
  std::vector<uint8_t> piece(static_cast<size_t>(std::min(kPiece, table.tensor.bytes)));
  Sha256 sha;
  for (int64_t at = chunk * kContentChunk; at < end; at += kPiece) {
    const int64_t bytes = std::min(kPiece, end - at);
    RETURN_IF_ERROR(table.file->ReadAt(table.tensor.offset + at, piece.data(), bytes));
    sha.Add(absl::MakeConstSpan(piece).first(static_cast<size_t>(bytes)));
    bytes_done += bytes;
  }
  return sha.Finish();
}

}  // namespace

Digest ContentDigest(const EngramHeader& header, const Digest& config_digest, absl::Span<const ChunkDigests> layers) {
  Sha256 sha;
  sha.AddText(kContentTag);
  sha.Add(config_digest);
  for (size_t i = 0; i < header.layers.size(); ++i) {
    sha.AddI64(header.layer_ids[i]);
    sha.AddI64(header.rows(i));
    sha.AddI64(header.layers[i].table.tensor.bytes);
    sha.AddI64(static_cast<int64_t>(layers[i].size()));
    for (const Digest& chunk : layers[i]) sha.Add(chunk);
  }
  return sha.Finish();
}

absl::StatusOr<Digest> DigestTables(const EngramHeader& header, const Digest& config_digest, int threads,
                                    const std::function<void(int64_t, int64_t)>& progress) {
  struct Leaf {
    size_t layer;
    int64_t chunk;
  };
  std::vector<Leaf> leaves;
  std::vector<ChunkDigests> digests(header.layers.size());
  int64_t bytes_total = 0;
  for (size_t i = 0; i < header.layers.size(); ++i) {
    const TensorPlace& table = header.layers[i].table;
    table.file->AdviseReadOnce();
    bytes_total += table.tensor.bytes;
    digests[i].resize(static_cast<size_t>(ContentChunks(table.tensor.bytes)));
    for (int64_t chunk = 0; chunk < ContentChunks(table.tensor.bytes); ++chunk) leaves.push_back({i, chunk});
  }
  std::atomic<int64_t> bytes_done = 0;
  const auto report = [&] {
    if (progress) progress(bytes_done.load(), bytes_total);
  };
  RETURN_IF_ERROR(RunChunks(
      static_cast<int64_t>(leaves.size()), threads,
      [&](int64_t i) -> absl::Status {
        const Leaf& leaf = leaves[static_cast<size_t>(i)];
        ASSIGN_OR_RETURN(digests[leaf.layer][static_cast<size_t>(leaf.chunk)],
                         DigestChunk(header.layers[leaf.layer].table, leaf.chunk, bytes_done));
        return absl::OkStatus();
      },
      report));
  report();
  return ContentDigest(header, config_digest, digests);
}

}  // namespace engram
