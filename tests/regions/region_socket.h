// The worker's end of a region listener's socket, byte by byte, so that a test can get it wrong.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace engram {

class RegionSocket {
 public:
  explicit RegionSocket(const std::string& path) : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path, path.data(), path.size());
    connected_ = ::connect(fd_, reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0;
  }
  ~RegionSocket() { Close(); }
  RegionSocket(const RegionSocket&) = delete;
  RegionSocket& operator=(const RegionSocket&) = delete;

  bool connected() const { return connected_; }
  int fd() const { return fd_; }

  bool Send(const std::string& bytes) {
    return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }

  // The byte that came, with the descriptor where there was one (the caller's to close); -1: closed, or silent for 20
  // s.
  int Receive(int* descriptor) {
    *descriptor = -1;
    pollfd polled{fd_, POLLIN, 0};
    if (::poll(&polled, 1, 20'000) != 1) return -1;
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (::recvmsg(fd_, &message, MSG_CMSG_CLOEXEC) != 1) return -1;
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) std::memcpy(descriptor, CMSG_DATA(header), sizeof(int));
    return byte;
  }

  // Has the other end closed, within 20 s, without a word?
  bool ClosedByServer() {
    int descriptor = -1;
    return Receive(&descriptor) == -1 && descriptor == -1 && !Silent();
  }

  void Close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  bool Silent() {
    pollfd polled{fd_, POLLIN, 0};
    return ::poll(&polled, 1, 0) == 0;
  }

  int fd_;
  bool connected_ = false;
};

}  // namespace engram
