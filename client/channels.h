// Connections to one server: what an address may look like, and the settings that every channel of the client has.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "grpcpp/channel.h"

namespace engram::client {

// INVALID_ARGUMENT unless `target` is "host:port", "[ipv6]:port" or "unix:/path".
absl::Status CheckTarget(const std::string& target);

// A channel to `uri` (gRPC's "ipv4:127.0.0.1:8001", "unix:/path") that shares its connection with no other channel, and
// connects when it is first used. `authority` is what the server is told it was called by; empty: gRPC's default.
// Messages of up to message_bytes and an envelope pass, message_bytes + kMaxEnvelopeBytes < 2^31. Proxies named in the
// environment are not used, and gRPC repeats nothing on its own beyond what the server has not seen.
std::shared_ptr<grpc::Channel> OpenChannel(const std::string& uri, const std::string& authority, int64_t message_bytes);

}  // namespace engram::client
