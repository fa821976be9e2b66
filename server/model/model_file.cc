#include "server/model/model_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace engram {
namespace {

absl::Status SystemError(const std::string& path, const char* what, int error) {
  const std::string message = absl::StrCat(path, ": ", what, ": ", strerror(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(message);
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

// A year beyond 2262 wraps: still a number that changes when the file does.
int64_t ModifiedNs(const struct stat& status) {
  return static_cast<int64_t>(static_cast<uint64_t>(status.st_mtim.tv_sec) * 1'000'000'000u +
                              static_cast<uint64_t>(status.st_mtim.tv_nsec));
}

}  // namespace

FileMapping::~FileMapping() { munmap(pages_, pages_bytes_); }

absl::StatusOr<std::shared_ptr<const ModelFile>> ModelFile::Open(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return SystemError(path, "cannot be opened", errno);
  struct stat status;
  if (fstat(fd, &status) != 0) {
    const int error = errno;
    close(fd);
    return SystemError(path, "cannot be examined", error);
  }
  if (!S_ISREG(status.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": is ", S_ISDIR(status.st_mode) ? "a directory" : "not a regular file", "; expected a GGUF file"));
  }
  return std::shared_ptr<const ModelFile>(new ModelFile(path, fd, status.st_size, ModifiedNs(status)));
}

ModelFile::~ModelFile() { close(fd_); }

absl::Status ModelFile::CheckUnchanged() const {
  struct stat status;
  if (fstat(fd_, &status) != 0) return SystemError(path_, "cannot be examined", errno);
  if (status.st_size == size_ && ModifiedNs(status) == modified_ns_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(path_, ": was written while it was read; expected ", size_,
                                                    " bytes of ", modified_ns_, " ns, it has ", status.st_size, " of ",
                                                    ModifiedNs(status)));
}

absl::Status ModelFile::ReadAt(int64_t offset, uint8_t* out, int64_t bytes) const {
  while (bytes > 0) {
    // Linux reads at most 2 GiB - 4 KiB a call whatever is asked.
    const ssize_t got = pread(fd_, out, std::min<int64_t>(bytes, int64_t{1} << 30), offset);
    if (got < 0) {
      if (errno == EINTR) continue;
      return SystemError(path_, absl::StrCat("cannot be read at byte ", offset).c_str(), errno);
    }
    if (got == 0) {
      return absl::DataLossError(
          absl::StrCat(path_, ": ends at byte ", offset, " when read; it had ", size_, " bytes when it was opened"));
    }
    out += got;
    offset += got;
    bytes -= got;
  }
  return absl::OkStatus();
}

void ModelFile::WillRead(int64_t offset, int64_t bytes) const {
  // Not madvise: that takes the lock of the address space, which page faults want too.
  posix_fadvise(fd_, offset, bytes, POSIX_FADV_WILLNEED);
}

absl::StatusOr<std::unique_ptr<const FileMapping>> ModelFile::MapForRandomReads(int64_t offset, int64_t bytes) const {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t begin = offset / page * page;
  const size_t skip = offset - begin;
  void* pages = mmap(nullptr, bytes + skip, PROT_READ, MAP_SHARED, fd_, begin);
  if (pages == MAP_FAILED) return SystemError(path_, absl::StrCat("cannot map ", bytes, " bytes").c_str(), errno);
  auto mapping = std::make_unique<const FileMapping>(pages, bytes + skip, skip);
  // A row is 84 bytes at a random place: read-ahead would multiply the disk's work. A hint, so failure is no error.
  madvise(pages, bytes + skip, MADV_RANDOM);
  return mapping;
}

void ModelFile::AdviseReadOnce() const { posix_fadvise(fd_, 0, 0, POSIX_FADV_NOREUSE); }

}  // namespace engram
