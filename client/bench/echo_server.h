// What a transport of gRPC's can do at most: a server that answers raw messages with raw messages and computes nothing.
//
// The last 8 bytes of a request, little endian, say how many bytes the answer has. The answer is the request's own
// bytes as far as they go, then bytes of memory that is there already: nothing is copied or allocated for it. It is
// asked as EngramService.Apply, through gRPC's callbacks, as engram-server is.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/bench/command.h"

namespace engram::bench {

class EchoServer {
 public:
  // `address`: "host:port", port 0 for a free one, or "unix:/path". UNAVAILABLE where it cannot listen there.
  static absl::StatusOr<std::unique_ptr<EchoServer>> Start(const std::string& address);
  ~EchoServer();

  const std::string& address() const { return address_; }  // with the port that was chosen

 private:
  struct Parts;
  EchoServer();

  std::unique_ptr<Parts> parts_;
  std::string address_;
};

// engram-bench echo-server: prints "listening on ADDR", then serves until its stdin ends or it is killed.
Command AddEchoServerCommand(CLI::App& app);

}  // namespace engram::bench
