#include "server/transport/listeners.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace engram {
namespace {

constexpr absl::string_view kUnix = "unix:";

// Keepalive of clients every 10 s or slower never trips too_many_pings (the client library pings every 30 s).
constexpr int kMinPingIntervalMs = 10'000;

absl::Status BadAddress(const std::string& address, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("--listen ", address, ": ", why, " (expected host:port or unix:/path)"));
}

// Does a live server answer on this unix socket? gRPC would silently take the path over.
bool UnixSocketInUse(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.data(), path.size());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool in_use = ::connect(fd, reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0;
  ::close(fd);
  return in_use;
}

int ClampToInt(int64_t n) { return static_cast<int>(std::min<int64_t>(n, std::numeric_limits<int>::max())); }

}  // namespace

absl::Status CheckAddress(const std::string& address, bool insecure) {
  absl::string_view rest = address;
  if (absl::ConsumePrefix(&rest, kUnix)) {
    if (rest.empty()) return BadAddress(address, "the socket's path is empty");
    if (rest.size() >= sizeof(sockaddr_un::sun_path)) {
      return BadAddress(address, absl::StrCat("the socket's path has ", rest.size(), " bytes, at most ",
                                              sizeof(sockaddr_un::sun_path) - 1, " fit"));
    }
    return absl::OkStatus();
  }
  const size_t colon = rest.rfind(':');
  int port = 0;
  if (colon == absl::string_view::npos || colon == 0 || !absl::SimpleAtoi(rest.substr(colon + 1), &port) || port < 0 ||
      port > 65535) {
    return BadAddress(address, "no host and port between 0 and 65535");
  }
  const absl::string_view host = rest.substr(0, colon);
  const bool loopback = host == "localhost" || host == "[::1]" || absl::StartsWith(host, "127.");
  if (!loopback && !insecure) {
    return absl::InvalidArgumentError(absl::StrCat("--listen ", address, ": ", host,
                                                   " is not loopback and this server speaks plaintext: bind loopback "
                                                   "or a unix socket, or say --insecure"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Listeners>> Listeners::Start(const ListenerOptions& options, grpc::Service& service) {
  for (const std::string& address : options.addresses) {
    if (const absl::Status status = CheckAddress(address, options.insecure); !status.ok()) return status;
    absl::string_view path = address;
    if (absl::ConsumePrefix(&path, kUnix) && UnixSocketInUse(std::string(path))) {
      return absl::AlreadyExistsError(absl::StrCat("--listen ", address, ": another server answers on this socket"));
    }
  }
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  const int message_bytes = ClampToInt(options.max_message_bytes + kEnvelopeBytes);
  builder.SetMaxReceiveMessageSize(message_bytes);
  builder.SetMaxSendMessageSize(message_bytes);
  // Two servers on one port would each get half of the connections: the second one must fail instead.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  std::vector<int> ports(options.addresses.size(), -1);
  for (size_t i = 0; i < options.addresses.size(); ++i) {
    builder.AddListeningPort(options.addresses[i], grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.RegisterService(&service);

  std::unique_ptr<Listeners> listeners(new Listeners);
  listeners->server_ = builder.BuildAndStart();
  for (size_t i = 0; i < options.addresses.size(); ++i) {
    const std::string& address = options.addresses[i];
    if (listeners->server_ == nullptr || ports[i] <= 0) {
      // gRPC does not say which address failed or why; the first without a port is the one.
      if (ports[i] > 0) continue;
      return absl::UnavailableError(absl::StrCat("--listen ", address, ": cannot listen there (is it in use?)"));
    }
    listeners->addresses_.push_back(absl::StartsWith(address, kUnix)
                                        ? address
                                        : absl::StrCat(address.substr(0, address.rfind(':')), ":", ports[i]));
  }
  if (listeners->server_ == nullptr) return absl::UnavailableError("gRPC could not start the server");
  return listeners;
}

void Listeners::SetServing(bool serving) { server_->GetHealthCheckService()->SetServingStatus(serving); }

void Listeners::Shutdown(absl::Duration timeout) {
  server_->Shutdown(absl::ToChronoTime(absl::Now() + timeout));
  server_->Wait();
}

}  // namespace engram
