// MODEL.digest: a line per fact, written by `engram-model digest --write`.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/model/content_digest.h"
#include "server/model/status_macros.h"

namespace engram {
namespace {

constexpr absl::string_view kTag = "engram.digest.v1";
// 65535 shards whose names have 200 bytes fit; nothing that is read into memory here is larger.
constexpr int64_t kMaxSidecarBytes = int64_t{16} << 20;

// Of 2^32: eight in a row that are taken are no accident.
constexpr int kMostNames = 8;

absl::string_view BaseName(absl::string_view path) { return path.substr(path.rfind('/') + 1); }

absl::Status Unfit(absl::string_view what, absl::string_view holds, absl::string_view expected) {
  return absl::FailedPreconditionError(
      absl::StrCat(what, " is ", absl::CHexEscape(holds.substr(0, 100)), "; expected ", expected));
}

// Takes the next line apart; without a line feed at its end it is no line.
absl::StatusOr<absl::string_view> TakeLine(absl::string_view& text, int number, absl::string_view key) {
  const size_t end = text.find('\n');
  absl::string_view line = text.substr(0, end == absl::string_view::npos ? text.size() : end);
  const absl::string_view whole = line;
  if (end == absl::string_view::npos || !absl::ConsumePrefix(&line, key)) {
    return Unfit(absl::StrCat("line ", number), whole, absl::StrCat("'", key, "…' and a line feed"));
  }
  text.remove_prefix(end + 1);
  return line;
}

absl::StatusOr<Digest> TakeDigest(absl::string_view& text, int number, absl::string_view key) {
  ASSIGN_OR_RETURN(const absl::string_view hex, TakeLine(text, number, key));
  Digest digest;
  const bool digits =
      std::all_of(hex.begin(), hex.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
  if (hex.size() != 2 * digest.size() || !digits) {
    return Unfit(absl::StrCat("line ", number), hex, "64 hex digits");
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  std::copy(bytes.begin(), bytes.end(), digest.begin());
  return digest;
}

std::string ShardLine(const ModelFile& file) {
  return absl::StrCat("shard ", file.size(), " ", file.modified_ns(), " ", BaseName(file.path()));
}

absl::Status CannotWrite(const std::string& path, int error) {
  return absl::UnavailableError(absl::StrCat(path, ": cannot be written: ", strerror(error)));
}

// A new file beside `target`; returns its path. A run that was killed may have left one of any name.
absl::StatusOr<std::string> WriteBeside(const std::string& target, absl::string_view text) {
  std::random_device random;
  std::string path;
  int fd = -1;
  for (int i = 0; i < kMostNames && fd < 0; ++i) {
    path = absl::StrCat(target, ".partial-", absl::Hex(random(), absl::kZeroPad8));
    fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0 && errno != EEXIST) break;
  }
  if (fd < 0) return CannotWrite(path, errno);
  int error = 0;
  while (!text.empty() && error == 0) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 && fsync(fd) != 0) error = errno;
  if (close(fd) != 0 && error == 0) error = errno;
  if (error == 0) return path;
  unlink(path.c_str());
  return CannotWrite(path, error);
}

}  // namespace

std::string SidecarPath(const std::string& model_path) { return absl::StrCat(model_path, ".digest"); }

absl::StatusOr<std::string> SidecarText(const ModelFiles& files, const Digest& config_digest,
                                        const Digest& content_digest) {
  std::string text = absl::StrCat(kTag, "\ncontent_digest ", DigestHex(content_digest), "\nconfig_digest ",
                                  DigestHex(config_digest), "\n");
  for (const Shard& shard : files.shards()) {
    if (absl::StrContains(shard.file->path(), '\n')) {
      return absl::InvalidArgumentError(
          absl::StrCat(absl::CHexEscape(shard.file->path()), ": a name with a line feed cannot stand in a sidecar"));
    }
    absl::StrAppend(&text, ShardLine(*shard.file), "\n");
  }
  return text;
}

absl::StatusOr<Digest> ParseSidecar(absl::string_view text, const ModelFiles& files, const Digest& config_digest) {
  ASSIGN_OR_RETURN(const absl::string_view rest, TakeLine(text, 1, kTag));
  if (!rest.empty()) return Unfit("line 1", absl::StrCat(kTag, rest), kTag);
  ASSIGN_OR_RETURN(const Digest content, TakeDigest(text, 2, "content_digest "));
  ASSIGN_OR_RETURN(const Digest config, TakeDigest(text, 3, "config_digest "));
  if (config != config_digest) return Unfit("its config_digest", DigestHex(config), DigestHex(config_digest));
  int number = 4;
  for (const Shard& shard : files.shards()) {
    absl::string_view line = text;
    ASSIGN_OR_RETURN(const absl::string_view held, TakeLine(line, number, "shard "));
    text = line;
    const std::string expected = ShardLine(*shard.file);
    if (absl::StrCat("shard ", held) != expected) {
      return Unfit(absl::StrCat("line ", number), absl::StrCat("shard ", held),
                   absl::StrCat(expected, " (bytes, time of writing, name)"));
    }
    ++number;
  }
  if (!text.empty()) return Unfit(absl::StrCat("line ", number), text, "nothing");
  return content;
}

absl::StatusOr<Digest> ReadSidecar(const ModelFiles& files, const Digest& config_digest) {
  ASSIGN_OR_RETURN(const auto file, ModelFile::Open(SidecarPath(files.path())));
  if (file->size() > kMaxSidecarBytes) {
    return Unfit("its size", absl::StrCat(file->size()), absl::StrCat("at most ", kMaxSidecarBytes, " bytes"));
  }
  std::string text(static_cast<size_t>(file->size()), '\0');
  RETURN_IF_ERROR(file->ReadAt(0, reinterpret_cast<uint8_t*>(text.data()), file->size()));
  return ParseSidecar(text, files, config_digest);
}

absl::Status WriteSidecar(const ModelFiles& files, const Digest& config_digest, const Digest& content_digest) {
  ASSIGN_OR_RETURN(const std::string text, SidecarText(files, config_digest, content_digest));
  for (const Shard& shard : files.shards()) RETURN_IF_ERROR(shard.file->CheckUnchanged());
  const std::string path = SidecarPath(files.path());
  ASSIGN_OR_RETURN(const std::string partial, WriteBeside(path, text));
  if (rename(partial.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const absl::Status status = CannotWrite(path, errno);
  unlink(partial.c_str());
  return status;
}

}  // namespace engram
