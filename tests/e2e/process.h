// Our programs as a user runs them: started with arguments, watched through their pipes, ended by pid.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace engram::e2e {

// A folder of the test's own, removed with everything in it.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct Finished {
  int exit_code = -1;  // 128 + n where signal n ended it
  std::string out;
  std::string err;
};

// Runs a program to its end; after `timeout_seconds` it is killed and the exit code says so (137).
Finished RunToEnd(const std::vector<std::string>& command, int timeout_seconds = 60);

// A running engram-server that listens on a unix socket and on a free TCP port.
class ServerProcess {
 public:
  // `args` come on top of listeners, a free metrics port and no drain delay. An error is the server's own stderr.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(const std::string& model,
                                                              const std::vector<std::string>& args = {});
  ~ServerProcess();  // SIGKILL if it still runs

  const std::string& unix_address() const { return unix_address_; }
  const std::string& tcp_address() const { return tcp_address_; }
  const std::string& metrics_address() const { return metrics_address_; }
  pid_t pid() const { return pid_; }

  // Sends the signal and waits; the exit code as in Finished.
  int Stop(int signal);

  // What it has written to stderr so far.
  std::string Log() const;

 private:
  ServerProcess() = default;

  TempDir dir_;
  pid_t pid_ = -1;
  std::string unix_address_, tcp_address_, metrics_address_;
};

// A line of a process's /proc status, in MiB: "VmRSS:", "VmHWM:".
int64_t MemoryMebibytes(pid_t pid, const std::string& line);

}  // namespace engram::e2e
