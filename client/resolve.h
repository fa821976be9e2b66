// From a target of the caller's to the addresses of the servers behind it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace engram::client {

struct Address {
  std::string name;  // "127.0.0.1:8001", "[::1]:8001", "unix:/path": for people, and a replica's name
  std::string uri;   // the same for gRPC: "ipv4:127.0.0.1:8001", "ipv6:%5B::1%5D:8001", "unix:/path"
};

bool operator==(const Address& a, const Address& b);

// "host:port" without brackets, i.e. a name that DNS knows; literal addresses and unix sockets never change.
bool NeedsDns(const std::string& target);

// All addresses of `target`, each once, in the resolver's order. Blocks: the system's resolver may take tens of seconds
// over a name whose servers are silent, none over a literal address. UNAVAILABLE names the target and the resolver's
// reason; INVALID_ARGUMENT as CheckTarget says. OK is never empty. Thread-safe.
absl::StatusOr<std::vector<Address>> ResolveTarget(const std::string& target);

}  // namespace engram::client
