#include "client/shared_region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace engram::client {
namespace {

constexpr char kRegionComes = 1;
constexpr char kDeviceRegionComes = 2;
constexpr char kNoMemory = 0;
constexpr size_t kIpcHandleBytes = 64;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  int Take() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

absl::Status NoRegion(const RegionClaim& claim, absl::string_view why) {
  return absl::UnavailableError(
      absl::StrCat("no shared memory of ", claim.replica, " by its socket ", claim.socket, ": ", why));
}

// A connected socket on which the token was sent.
absl::StatusOr<Descriptor> Present(const RegionClaim& claim, absl::Duration timeout) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (claim.socket.empty() || claim.socket.size() >= sizeof name.sun_path) return NoRegion(claim, "no unix path");
  std::memcpy(name.sun_path, claim.socket.data(), claim.socket.size());
  Descriptor connection(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval limit = absl::ToTimeval(timeout);
  ::setsockopt(connection.fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  ::setsockopt(connection.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (::connect(connection.fd(), reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0 ||
      ::send(connection.fd(), claim.token.data(), claim.token.size(), MSG_NOSIGNAL) !=
          static_cast<ssize_t>(claim.token.size())) {
    return NoRegion(claim, std::strerror(errno));
  }
  return connection;
}

// The descriptor of the region; one byte comes with it.
absl::StatusOr<Descriptor> Receive(const RegionClaim& claim, int connection) {
  char byte = kRegionComes;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t got = 0;
  do {
    got = ::recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return NoRegion(claim, std::strerror(errno));
  if (got == 0) return NoRegion(claim, "it was closed: another server's, or the token came too late");
  // Whatever came is ours to close, also where it is not what was asked for: the control data has room for two.
  std::vector<Descriptor> came;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= header->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, reinterpret_cast<const char*>(header) + at, sizeof fd);
      came.emplace_back(fd);
    }
  }
  if (byte == kNoMemory) {
    return absl::ResourceExhaustedError(absl::StrCat(claim.replica, " has no memory for a region of ", claim.bytes));
  }
  if (byte != kRegionComes || came.size() != 1) return NoRegion(claim, "what came is no region");
  return std::move(came.front());
}

// The handle of a region on the device, behind one byte.
absl::StatusOr<std::string> ReceiveHandle(const RegionClaim& claim, int connection) {
  std::string came(1 + kIpcHandleBytes, '\0');
  size_t have = 0;
  while (have < came.size()) {
    const ssize_t got = ::recv(connection, came.data() + have, came.size() - have, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return NoRegion(claim, std::strerror(errno));
    if (got == 0) return NoRegion(claim, "it was closed: another server's, or the token came too late");
    have += static_cast<size_t>(got);
    if (came.front() == kNoMemory) {
      return absl::ResourceExhaustedError(
          absl::StrCat(claim.replica, " has no device memory for a region of ", claim.bytes));
    }
    if (came.front() != kDeviceRegionComes) return NoRegion(claim, "what came is no region on a device");
  }
  return came.substr(1);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedRegion>> SharedRegion::Fetch(const RegionClaim& claim, absl::Duration timeout) {
  absl::StatusOr<Descriptor> connection = Present(claim, timeout);
  if (!connection.ok()) return connection.status();
  if (claim.on_device) {
    absl::StatusOr<std::string> handle = ReceiveHandle(claim, connection->fd());
    if (!handle.ok()) return handle.status();
    return std::unique_ptr<SharedRegion>(new SharedRegion(claim, connection->Take(), nullptr, *std::move(handle)));
  }
  absl::StatusOr<Descriptor> region = Receive(claim, connection->fd());
  if (!region.ok()) return region.status();
  // It must not become shorter than what is mapped: that would be SIGBUS.
  struct stat file {};
  const int seals = ::fcntl(region->fd(), F_GET_SEALS);
  if (::fstat(region->fd(), &file) != 0 || claim.bytes < 1 || file.st_size < claim.bytes || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    return NoRegion(claim, "what came is not as long as was granted, or not sealed");
  }
  const auto bytes = static_cast<size_t>(claim.bytes);
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, region->fd(), /*offset=*/0);
  if (data == MAP_FAILED) return NoRegion(claim, std::strerror(errno));
  return std::unique_ptr<SharedRegion>(new SharedRegion(claim, connection->Take(), static_cast<char*>(data), {}));
}

SharedRegion::~SharedRegion() {
  ::close(connection_);
  if (ipc_handle_.empty()) ::munmap(data_, bytes_);
}

std::optional<uint64_t> SharedRegion::OffsetOf(absl::Span<const char> bytes) const {
  if (bytes.empty()) return 0;
  if (data_ == nullptr) return std::nullopt;
  const auto begin = reinterpret_cast<uintptr_t>(data_);
  const auto at = reinterpret_cast<uintptr_t>(bytes.data());
  if (at < begin || bytes.size() > bytes_ || at - begin > bytes_ - bytes.size()) return std::nullopt;
  return at - begin;
}

absl::Status SharedRegion::Usable() const {
  if (!spoiled_.load()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "the region is spoiled: a call with it ended without an answer, so its server may still write to it; open "
      "another");
}

}  // namespace engram::client
