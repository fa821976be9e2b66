// An echo server in a process of its own, so that it costs its caller what a server costs.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace engram::bench {

class EchoProcess {
 public:
  // Starts `program` echo-server over the same kind of transport as `like` ("unix:/path" or "host:port"): a socket in a
  // temporary folder, or a free port of 127.0.0.1. Waits until it listens.
  static absl::StatusOr<std::unique_ptr<EchoProcess>> Start(const std::string& program, const std::string& like);
  // Ends it, and waits for that.
  ~EchoProcess();
  EchoProcess(const EchoProcess&) = delete;
  EchoProcess& operator=(const EchoProcess&) = delete;

  const std::string& address() const { return address_; }
  pid_t pid() const { return pid_; }

 private:
  EchoProcess() = default;

  pid_t pid_ = -1;
  int stdin_ = -1;  // it ends when this does, however we end
  std::string folder_;
  std::string address_;
};

// The program that this is.
std::string OwnProgram();

}  // namespace engram::bench
