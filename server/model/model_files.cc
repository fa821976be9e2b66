#include "server/model/model_files.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/model/gguf_keys.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

constexpr const char* kNo = "split.no";
constexpr const char* kCount = "split.count";
constexpr const char* kTensors = "split.tensors.count";
constexpr int64_t kMaxShards = 65535;  // split.count is a U16 where llama.cpp writes it

struct ShardName {
  std::string stem;
  int64_t number = 0;
  int64_t count = 0;
};

// NAME-00001-of-00002.gguf taken apart; nothing for any other name.
std::optional<ShardName> ParseShardName(absl::string_view path) {
  constexpr size_t kDigits = 5;
  constexpr absl::string_view kOf = "-of-";
  if (!absl::EndsWith(path, ".gguf")) return std::nullopt;
  path.remove_suffix(5);
  constexpr size_t kTail = 1 + kDigits + kOf.size() + kDigits;
  if (path.size() < kTail) return std::nullopt;
  const absl::string_view tail = path.substr(path.size() - kTail);
  const absl::string_view number = tail.substr(1, kDigits), count = tail.substr(kTail - kDigits);
  const auto digits = [](absl::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  if (tail[0] != '-' || tail.substr(1 + kDigits, kOf.size()) != kOf || !digits(number) || !digits(count)) {
    return std::nullopt;
  }
  ShardName name;
  name.stem = std::string(path.substr(0, path.size() - kTail));
  if (!absl::SimpleAtoi(number, &name.number) || !absl::SimpleAtoi(count, &name.count)) return std::nullopt;
  return name;
}

absl::Status CheckShardKeys(const GgufHeader& header, int64_t number, int64_t count, int64_t tensors) {
  const KeyReader keys(header);
  ASSIGN_OR_RETURN(const int64_t no, keys.Integer(kNo, 0, kMaxShards));
  if (no != number - 1) return keys.Refuse(kNo, no, absl::StrCat(number - 1, " in shard ", number));
  ASSIGN_OR_RETURN(const int64_t held_count, keys.Integer(kCount, 1, kMaxShards));
  if (held_count != count) return keys.Refuse(kCount, held_count, absl::StrCat(count, " as in shard 1"));
  if (header.Find(kTensors) == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(const int64_t held_tensors, keys.Integer(kTensors, 0, INT64_MAX));
  if (held_tensors != tensors) return keys.Refuse(kTensors, held_tensors, absl::StrCat(tensors, " as in shard 1"));
  return absl::OkStatus();
}

}  // namespace

std::string ShardPath(const std::string& stem, int64_t number, int64_t count) {
  return absl::StrFormat("%s-%05d-of-%05d.gguf", stem, number, count);
}

absl::StatusOr<Shard> OpenShard(const std::string& path) {
  Shard shard;
  ASSIGN_OR_RETURN(shard.file, ModelFile::Open(path));
  const int64_t size = shard.file->size();
  // A first megabyte holds an engram's header, a few more a whole model's vocabulary. Read, not mapped, so that a
  // failing disk is an error and no signal.
  for (int64_t bytes = std::min<int64_t>(size, int64_t{1} << 20);;) {
    shard.header_bytes.resize(bytes);
    RETURN_IF_ERROR(shard.file->ReadAt(0, shard.header_bytes.data(), bytes));
    absl::StatusOr<GgufHeader> header = ParseGgufHeader(path, shard.header_bytes, size);
    if (header.ok()) {
      shard.header = *std::move(header);
      return shard;
    }
    if (!absl::IsOutOfRange(header.status())) return header.status();
    if (bytes >= kGgufMaxHeaderBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": its header is longer than ", kGgufMaxHeaderBytes, " bytes; expected a shorter one"));
    }
    bytes = std::min({bytes * 4, size, kGgufMaxHeaderBytes});
  }
}

absl::StatusOr<ModelFiles> ModelFiles::Open(const std::string& path) {
  ModelFiles files;
  ASSIGN_OR_RETURN(Shard first, OpenShard(path));
  files.shards_.push_back(std::move(first));
  const KeyReader keys(files.metadata());
  int64_t count = 1;
  if (files.metadata().Find(kCount) != nullptr) {
    ASSIGN_OR_RETURN(count, keys.Integer(kCount, 0, kMaxShards));
  }
  if (count <= 1) return files;

  const std::optional<ShardName> name = ParseShardName(path);
  ASSIGN_OR_RETURN(const int64_t no, keys.Integer(kNo, 0, kMaxShards));
  if (no != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": is shard ", no + 1, " of ", count, " (key '", kNo, "' holds ", no, "); expected shard 1, ",
        name.has_value() ? ShardPath(name->stem, 1, count) : "which holds the model's keys"));
  }
  if (!name.has_value() || name->number != 1 || name->count != count) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": key '", kCount, "' holds ", count,
                                                   "; expected a file name that ends in ", ShardPath("", 1, count),
                                                   ", so that the other shards can be found"));
  }
  ASSIGN_OR_RETURN(const int64_t tensors, keys.Integer(kTensors, 0, INT64_MAX));
  int64_t found = files.metadata().tensors.size();
  for (int64_t number = 2; number <= count; ++number) {
    const std::string shard_path = ShardPath(name->stem, number, count);
    absl::StatusOr<Shard> shard = OpenShard(shard_path);
    if (absl::IsNotFound(shard.status())) {
      return absl::NotFoundError(
          absl::StrCat(shard_path, ": shard ", number, " of ", count, " is missing; expected beside ", path));
    }
    if (!shard.ok()) return shard.status();
    RETURN_IF_ERROR(CheckShardKeys(shard->header, number, count, tensors));
    for (const GgufTensor& tensor : shard->header.tensors) {
      for (const Shard& before : files.shards_) {
        if (before.header.FindTensor(tensor.name) == nullptr) continue;
        return absl::InvalidArgumentError(absl::StrCat(shard_path, ": tensor ", GgufQuote(tensor.name), " stands in ",
                                                       before.file->path(), " too; expected once"));
      }
    }
    found += shard->header.tensors.size();
    files.shards_.push_back(*std::move(shard));
  }
  if (found != tensors) return keys.Refuse(kTensors, tensors, absl::StrCat(found, ", the tensors of all shards"));
  return files;
}

int64_t ModelFiles::total_bytes() const {
  int64_t bytes = 0;
  for (const Shard& shard : shards_) bytes += shard.file->size();
  return bytes;
}

absl::StatusOr<TensorPlace> ModelFiles::FindTensor(const std::string& name) const {
  for (const Shard& shard : shards_) {
    const GgufTensor* tensor = shard.header.FindTensor(name);
    if (tensor != nullptr) return TensorPlace{shard.file, *tensor};
  }
  return absl::NotFoundError(
      absl::StrCat(path(), ": tensor ", GgufQuote(name), " is missing",
                   shards_.size() > 1 ? absl::StrCat(" in all ", shards_.size(), " shards") : ""));
}

}  // namespace engram
