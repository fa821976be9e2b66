#include "server/transport/listeners.h"

#include <arpa/inet.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
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

absl::Status CannotListen(const std::string& address, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("--listen ", address, ": cannot listen there: ", why));
}

// A file descriptor, closed at the end.
class Socket {
 public:
  explicit Socket(int family) : fd_(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

// gRPC would silently take the path of a live server over, and fails without a reason where it cannot.
absl::Status CheckUnixFree(const std::string& address, const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.data(), path.size());
  const auto* to = reinterpret_cast<const sockaddr*>(&name);
  struct stat file {};
  if (::lstat(path.c_str(), &file) == 0) {
    if (!S_ISSOCK(file.st_mode)) return CannotListen(address, "there is a file that is no socket");
    const Socket probe(AF_UNIX);
    if (::connect(probe.fd(), to, sizeof name) == 0) return CannotListen(address, "another server answers there");
    return absl::OkStatus();  // left behind by a server that was killed; gRPC replaces it
  }
  const Socket probe(AF_UNIX);
  if (::bind(probe.fd(), to, sizeof name) != 0) return CannotListen(address, std::strerror(errno));
  ::unlink(path.c_str());
  return absl::OkStatus();
}

absl::Status CheckTcpFree(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found); error != 0) {
    return CannotListen(address, ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  const Socket probe(found->ai_family);
  const int on = 1;  // as gRPC does: connections of a server just stopped may linger
  ::setsockopt(probe.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(probe.fd(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(probe.fd(), 1) != 0) {
    return CannotListen(address, std::strerror(errno));
  }
  return absl::OkStatus();
}

// One spelling per address: "unix:/run//s" is "unix:/run/s".
std::string Normal(const std::string& address) {
  absl::string_view path = address;
  if (!absl::ConsumePrefix(&path, kUnix)) return address;
  return std::filesystem::path(std::string(path)).lexically_normal().string();
}

// What gRPC itself takes of the arriving bytes: reads of 8 KiB and up for some thousand connections.
constexpr int64_t kConnectionBytes = int64_t{64} << 20;

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
  in_addr ipv4{};
  const bool is_ipv4 = ::inet_pton(AF_INET, std::string(host).c_str(), &ipv4) == 1;  // a name may begin with 127. too
  const bool loopback =
      host == "localhost" || host == "[::1]" || (is_ipv4 && (ntohl(ipv4.s_addr) >> 24) == IN_LOOPBACKNET);
  if (!loopback && !insecure) {
    return absl::InvalidArgumentError(absl::StrCat("--listen ", address, ": ", host,
                                                   " is not loopback and this server speaks plaintext: bind loopback "
                                                   "or a unix socket, or say --insecure"));
  }
  return absl::OkStatus();
}

absl::Status CheckFree(const std::vector<std::string>& addresses) {
  for (size_t i = 0; i < addresses.size(); ++i) {
    const std::string& address = addresses[i];
    const bool any_port = absl::EndsWith(address, ":0");
    const auto same = [&](const std::string& other) { return Normal(other) == Normal(address); };
    if (!any_port && std::count_if(addresses.begin(), addresses.end(), same) > 1) {
      return absl::InvalidArgumentError(absl::StrCat("--listen ", address, ": given more than once"));
    }
    absl::string_view path = address;
    const absl::Status status =
        absl::ConsumePrefix(&path, kUnix) ? CheckUnixFree(address, std::string(path)) : CheckTcpFree(address);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Listeners>> Listeners::Start(const ListenerOptions& options, grpc::Service& service) {
  for (const std::string& address : options.addresses) {
    if (const absl::Status status = CheckAddress(address, options.insecure); !status.ok()) return status;
  }
  if (const absl::Status status = CheckFree(options.addresses); !status.ok()) return status;
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  // Near what the decoder admits and refuses by name: parsing makes up to 65 bytes in memory of one on the wire (a
  // swarm of empty sequences), so a message that cannot pass must not be parsed.
  const int message_bytes = ClampToInt(options.max_message_bytes + kEnvelopeBytes);
  builder.SetMaxReceiveMessageSize(message_bytes);
  builder.SetMaxSendMessageSize(message_bytes);
  // gRPC looks at a message's length only once it holds all of it, so that limit bounds no memory: without a quota one
  // call of 1.5 GiB made the server grow by 1.5 GiB before it was refused.
  builder.SetResourceQuota(
      grpc::ResourceQuota("arriving").Resize(static_cast<size_t>(options.max_arriving_bytes + kConnectionBytes)));
  // Two servers on one port would each get half of the connections: the second one must fail instead.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxMetadataBytes);
  if (options.max_connection_age > absl::ZeroDuration()) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                               ClampToInt(absl::ToInt64Milliseconds(options.max_connection_age)));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                               ClampToInt(absl::ToInt64Milliseconds(options.max_connection_age_grace)));
  }
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
      return CannotListen(address, "gRPC could not bind it");
    }
    listeners->addresses_.push_back(absl::StartsWith(address, kUnix)
                                        ? address
                                        : absl::StrCat(address.substr(0, address.rfind(':')), ":", ports[i]));
  }
  if (listeners->server_ == nullptr) return absl::UnavailableError("gRPC could not start the server");
  // Probes may ask for the server ("") or for the service by its name.
  listeners->server_->GetHealthCheckService()->SetServingStatus("engram.v1.EngramService", true);
  listeners->heartbeat_ = std::make_unique<Heartbeat>(*listeners->server_);
  return listeners;
}

void Listeners::SetServing(bool serving) { server_->GetHealthCheckService()->SetServingStatus(serving); }

void Listeners::Shutdown(absl::Duration timeout) {
  heartbeat_.reset();
  server_->Shutdown(absl::ToChronoTime(absl::Now() + timeout));
  server_->Wait();
}

}  // namespace engram
