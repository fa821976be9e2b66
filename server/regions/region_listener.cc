#include "server/regions/region_listener.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/observe/log.h"

namespace engram {
namespace {

constexpr char kRegionComes = 1;
constexpr char kDeviceRegionComes = 2;
constexpr char kNoMemory = 0;

// Between two looks at dropped regions that calls still use: those calls' batches take milliseconds.
constexpr absl::Duration kSweepInterval = absl::Milliseconds(10);
// Before the next accept() when there was no descriptor left for one.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);

absl::Status CannotListen(const std::string& path, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("--shm-listen unix:", path, ": cannot listen there: ", why));
}

// Binds and listens, as the header says of the mode: the file gets that of the socket, less the umask.
bool BindAndListen(int fd, const sockaddr_un& name) {
  return ::fchmod(fd, 0660) == 0 && ::bind(fd, reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0 &&
         ::listen(fd, SOMAXCONN) == 0;
}

// Is the path that of a socket on which nobody answers?
bool IsLeftBehind(const sockaddr_un& name) {
  struct stat file {};
  if (::lstat(name.sun_path, &file) != 0 || !S_ISSOCK(file.st_mode)) return false;
  const int probe = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  const bool refused =
      ::connect(probe, reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0 && errno == ECONNREFUSED;
  ::close(probe);
  return refused;
}

bool SendByte(int connection, char byte, const int* descriptor) {
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptor, sizeof(int));
  }
  return ::sendmsg(connection, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
}

// At once or not at all: it is far less than a new connection's buffer.
bool SendDeviceHandle(int connection, const std::string& handle) {
  const std::string answer = kDeviceRegionComes + handle;
  return ::send(connection, answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(answer.size());
}

std::string PeerOf(int connection) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return "unknown";
  return absl::StrCat("uid ", peer.uid, " pid ", peer.pid);
}

int MillisecondsUntil(absl::Time due) {
  if (due == absl::InfiniteFuture()) return -1;
  const absl::Duration left = std::clamp(due - absl::Now(), absl::ZeroDuration(), absl::Minutes(1));
  return static_cast<int>(absl::ToInt64Milliseconds(left)) + 1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<RegionListener>> RegionListener::Start(const RegionListenerOptions& options,
                                                                      RegionStore& store) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (options.path.empty() || options.path.size() >= sizeof name.sun_path) {
    return CannotListen(options.path, absl::StrCat("the path has ", options.path.size(), " bytes, expected 1 to ",
                                                   sizeof name.sun_path - 1));
  }
  std::memcpy(name.sun_path, options.path.data(), options.path.size());
  const int listening = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  bool bound = listening >= 0 && BindAndListen(listening, name);
  int error = errno;
  if (!bound && error == EADDRINUSE && IsLeftBehind(name)) {
    ::unlink(name.sun_path);
    bound = BindAndListen(listening, name);
    error = errno;
  }
  const int wake = bound ? ::eventfd(0, EFD_CLOEXEC) : -1;
  if (bound && wake < 0) error = errno;
  if (wake < 0) {
    const absl::Status status = CannotListen(options.path, std::strerror(error));
    if (bound) ::unlink(name.sun_path);
    if (listening >= 0) ::close(listening);
    return status;
  }
  return std::unique_ptr<RegionListener>(new RegionListener(options, store, listening, wake));
}

RegionListener::RegionListener(const RegionListenerOptions& options, RegionStore& store, int listening, int wake)
    : options_(options), store_(store), listening_(listening), wake_(wake), thread_([this] { Run(); }) {}

RegionListener::~RegionListener() {
  const uint64_t one = 1;
  // An eventfd takes it: its count is 0.
  if (::write(wake_, &one, sizeof one) != sizeof one) Log(LogLevel::kError, "the region listener was not woken");
  thread_.join();
  ::unlink(options_.path.c_str());
  ::close(listening_);
  ::close(wake_);
}

void RegionListener::Run() {
  for (;;) {
    absl::Time due = store_.Sweep() ? absl::Now() + kSweepInterval : absl::InfiniteFuture();
    const bool accepts = accept_at_ <= absl::Now();
    if (!accepts) due = std::min(due, accept_at_);
    std::vector<pollfd> polled = {{wake_, POLLIN, 0}, {accepts ? listening_ : -1, POLLIN, 0}};
    for (const Connection& connection : connections_) {
      polled.push_back({connection.fd, POLLIN, 0});
      due = std::min(due, connection.until);
    }
    // A failure is a signal's, or the system's for want of memory: the next round asks again.
    if (::poll(polled.data(), polled.size(), MillisecondsUntil(due)) < 0) continue;
    if (polled[0].revents != 0) break;
    const absl::Time now = absl::Now();
    std::vector<Connection> kept;
    for (size_t i = 0; i < connections_.size(); ++i) {
      Connection& connection = connections_[i];
      const bool good = connection.until > now && (polled[i + 2].revents == 0 || Read(connection));
      if (good) {
        kept.push_back(std::move(connection));
      } else {
        Close(connection);
      }
    }
    connections_ = std::move(kept);
    if (polled[1].revents != 0) Accept();
  }
  for (const Connection& connection : connections_) Close(connection);
}

void RegionListener::Accept() {
  const int fd = ::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    // The client may have gone again. Where there is no descriptor left, the socket stays readable: wait a little.
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      accept_at_ = absl::Now() + kAcceptPause;
    }
    return;
  }
  const auto waits = [](const Connection& connection) { return connection.region.empty(); };
  if (static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(), waits)) >= options_.max_waiting) {
    const auto oldest = std::find_if(connections_.begin(), connections_.end(), waits);
    Close(*oldest);
    connections_.erase(oldest);
  }
  connections_.push_back({.fd = fd, .until = absl::Now() + options_.token_timeout, .token = {}, .region = {}});
}

bool RegionListener::Read(Connection& connection) {
  if (!connection.region.empty()) return false;  // nothing is to come any more but its end
  char buffer[kRegionTokenBytes + 1];
  const ssize_t got = ::recv(connection.fd, buffer, sizeof buffer - connection.token.size(), MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  connection.token.append(buffer, static_cast<size_t>(got));
  if (connection.token.size() < kRegionTokenBytes) return true;
  return connection.token.size() == kRegionTokenBytes && Answer(connection);
}

bool RegionListener::Answer(Connection& connection) {
  absl::StatusOr<ClaimedRegion> claimed = store_.Claim(connection.token);
  connection.token.clear();
  if (!claimed.ok()) {
    if (!absl::IsNotFound(claimed.status())) {
      Log(LogLevel::kWarning, "no memory for a region",
          {{"why", std::string(claimed.status().message())}, {"peer", PeerOf(connection.fd)}});
      SendByte(connection.fd, kNoMemory, nullptr);
    }
    return false;
  }
  connection.region = claimed->id;
  connection.until = absl::InfiniteFuture();
  const int descriptor = claimed->region->fd();
  const bool on_device = descriptor < 0;
  if (!(on_device ? SendDeviceHandle(connection.fd, claimed->region->device_handle())
                  : SendByte(connection.fd, kRegionComes, &descriptor))) {
    return false;
  }
  Log(LogLevel::kInfo, "region opened",
      {{"bytes", absl::StrCat(claimed->region->bytes())},
       {"where", on_device ? "device" : "host"},
       {"peer", PeerOf(connection.fd)}});
  return true;
}

void RegionListener::Close(const Connection& connection) {
  if (!connection.region.empty()) store_.Drop(connection.region);
  ::close(connection.fd);
}

}  // namespace engram
