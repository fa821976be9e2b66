// One file of a model on disk: opened once, read by position, mapped in part.
//
// Only regular files are opened (a FIFO or a device would hang or never end). Reads are complete or an error: a short
// read means the file shrank since it was opened. Safe to use from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace engram {

// Read-only pages of a file, unmapped when dropped. Reading them when the file has shrunk, or the disk fails, is a
// SIGBUS.
class FileMapping {
 public:
  FileMapping(void* pages, size_t pages_bytes, size_t skip) : pages_(pages), pages_bytes_(pages_bytes), skip_(skip) {}
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  const uint8_t* data() const { return static_cast<const uint8_t*>(pages_) + skip_; }  // any alignment

 private:
  void* pages_;
  size_t pages_bytes_;
  size_t skip_;
};

class ModelFile {
 public:
  static absl::StatusOr<std::shared_ptr<const ModelFile>> Open(const std::string& path);
  ~ModelFile();
  ModelFile(const ModelFile&) = delete;
  ModelFile& operator=(const ModelFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  // When it was last written, nanoseconds since 1970: when it was opened, like size().
  int64_t modified_ns() const { return modified_ns_; }

  // FailedPrecondition where the file, by whatever name it now has, was written since it was opened.
  absl::Status CheckUnchanged() const;

  // Fills out[0, bytes) from byte `offset` on.
  absl::Status ReadAt(int64_t offset, uint8_t* out, int64_t bytes) const;

  // Maps [offset, offset + bytes), for reads at random places: the kernel reads no pages ahead.
  absl::StatusOr<std::unique_ptr<const FileMapping>> MapForRandomReads(int64_t offset, int64_t bytes) const;

  // [offset, offset + bytes) will be read soon: what is not in memory is asked of the disk, without waiting. A hint.
  void WillRead(int64_t offset, int64_t bytes) const;

  // The file will be read once: its pages need not push anything else out of the page cache. A hint.
  void AdviseReadOnce() const;

 private:
  ModelFile(std::string path, int fd, int64_t size, int64_t modified_ns)
      : path_(std::move(path)), fd_(fd), size_(size), modified_ns_(modified_ns) {}

  const std::string path_;
  const int fd_;
  const int64_t size_;
  const int64_t modified_ns_;
};

}  // namespace engram
