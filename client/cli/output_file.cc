#include "client/cli/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace engram::client {

OutputFile::~OutputFile() {
  if (fd_ >= 0) close(fd_);
  if (remove_) unlink(path_.c_str());
}

absl::Status OutputFile::Open(const std::string& path) {
  path_ = path;
  fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  remove_ = fd_ >= 0;
  if (fd_ < 0 && errno == EEXIST) fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  return fd_ < 0 ? Error("cannot be opened for writing") : absl::OkStatus();
}

absl::Status OutputFile::Write(absl::Span<const std::string> parts) {
  // A pipe or a terminal has no length to cut.
  if (ftruncate(fd_, 0) != 0 && errno != EINVAL) return Error("cannot be emptied");
  for (absl::string_view rest : parts) {
    while (!rest.empty()) {
      const ssize_t put = write(fd_, rest.data(), rest.size());
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) return Error("cannot be written");
      rest.remove_prefix(static_cast<size_t>(put));
    }
  }
  if (close(std::exchange(fd_, -1)) != 0) return Error("cannot be written");
  remove_ = false;
  return absl::OkStatus();
}

absl::Status OutputFile::Error(absl::string_view what) const {
  return absl::ErrnoToStatus(errno, absl::StrCat(path_, ": ", what));
}

}  // namespace engram::client
