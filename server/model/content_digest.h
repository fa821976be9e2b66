// content_digest: a SHA-256 tree over the tables' bytes (docs/formats.md, 4), and the sidecar that remembers it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/model/engram_header.h"
#include "server/model/engram_model.h"
#include "server/model/model_files.h"

namespace engram {

// A leaf of the tree: 64 MiB of one table, less at its end. Threads digest leaves side by side.
inline constexpr int64_t kContentChunk = int64_t{64} << 20;

constexpr int64_t ContentChunks(int64_t table_bytes) { return (table_bytes + kContentChunk - 1) / kContentChunk; }

// SHA-256 of each chunk of a layer's table, in order.
using ChunkDigests = std::vector<Digest>;

// The root. `layers`: one per layer, each of ContentChunks(bytes of the table) digests.
Digest ContentDigest(const EngramHeader& header, const Digest& config_digest, absl::Span<const ChunkDigests> layers);

// Reads every table once and digests it, on up to `threads` threads; for files that are not loaded.
absl::StatusOr<Digest> DigestTables(const EngramHeader& header, const Digest& config_digest, int threads,
                                    const std::function<void(int64_t bytes_done, int64_t bytes_total)>& progress);

// What MODEL.digest says; MODEL is the path that is named to load the model.
std::string SidecarPath(const std::string& model_path);

// The text of a sidecar for these files as they are now. Fails where a file's name cannot stand in it.
absl::StatusOr<std::string> SidecarText(const ModelFiles& files, const Digest& config_digest,
                                        const Digest& content_digest);

// The content_digest of a sidecar's text: hostile bytes, of whatever length. The error says why it is of no use: it
// does not parse, or speaks of another config_digest or of files of other names, sizes or times.
absl::StatusOr<Digest> ParseSidecar(absl::string_view text, const ModelFiles& files, const Digest& config_digest);

// Reads and parses the sidecar beside the model. NotFound: there is none.
absl::StatusOr<Digest> ReadSidecar(const ModelFiles& files, const Digest& config_digest);

// Writes the sidecar beside the model: whole, or not at all. Fails where a file was written since it was opened.
absl::Status WriteSidecar(const ModelFiles& files, const Digest& config_digest, const Digest& content_digest);

}  // namespace engram
