// A file opened before the work whose result it is to hold, so that a bad path costs no work.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace engram::client {

// Errors name the path and what the system says. What the file held stays until Write(); a file that is new, and that
// Write() never filled, is removed.
class OutputFile {
 public:
  OutputFile() = default;
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  absl::Status Open(const std::string& path);

  // The file's whole content, part after part. Closes it.
  absl::Status Write(absl::Span<const std::string> parts);

 private:
  absl::Status Error(absl::string_view what) const;

  std::string path_;
  int fd_ = -1;
  bool remove_ = false;
};

}  // namespace engram::client
