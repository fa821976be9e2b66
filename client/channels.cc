#include "client/channels.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/model_info.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

namespace engram::client {
namespace {

// A server allows one ping in 5 minutes without data and closes the connection over more (too_many_pings). 6 minutes
// stays under it with any server's defaults, and pings go out only while a call is in flight.
constexpr int kKeepaliveTimeMs = 6 * 60 * 1000;
constexpr int kKeepaliveTimeoutMs = 20 * 1000;

// gRPC waits 1 s before its second attempt and up to 2 min between later ones. A server that restarts is back sooner.
constexpr int kFirstReconnectMs = 100;
constexpr int kMaxReconnectMs = 5000;

// How long gRPC tries to connect, 20 s by default: a host that drops packets must not hold a call that long while
// another replica is there. Three SYNs (at 0, 1 and 3 s) go out within 5 s.
constexpr int kConnectTimeoutMs = 5000;

// An error lists up to 64 offenders of about 200 bytes, then base64 adds a third: 17 KiB, above gRPC's default of 8.
constexpr int kMaxMetadataBytes = 64 << 10;

}  // namespace

absl::Status CheckTarget(const std::string& target) {
  bool good = false;
  if (absl::StartsWith(target, "unix:")) {
    good = target.size() > 5;
  } else {
    const size_t colon = target.rfind(':');
    int port = 0;
    good = colon != std::string::npos && colon > 0 && absl::SimpleAtoi(target.substr(colon + 1), &port) && port > 0 &&
           port <= 65535;
  }
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("target is \"", target, "\", expected host:port or unix:/path"));
}

std::shared_ptr<grpc::Channel> OpenChannel(const std::string& uri, const std::string& authority,
                                           int64_t message_bytes) {
  grpc::ChannelArguments arguments;
  const int limit = static_cast<int>(message_bytes + kMaxEnvelopeBytes);  // < 2^31: ModelInfo's bound
  arguments.SetMaxReceiveMessageSize(limit);
  arguments.SetMaxSendMessageSize(limit);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  if (!authority.empty()) arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, authority);
  return grpc::CreateCustomChannel(uri, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace engram::client
