// Where a target is, so that no figure of a loopback is taken for a network's.

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>

#include "absl/strings/match.h"
#include "client/bench/load.h"

namespace engram::bench {
namespace {

enum class Reach { kLoopback, kOwnAddress, kElsewhere };

bool SameAddress(const sockaddr* a, const sockaddr* b) {
  if (a == nullptr || b == nullptr || a->sa_family != b->sa_family) return false;
  if (a->sa_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in*>(b)->sin_addr.s_addr;
  }
  return a->sa_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6*>(b)->sin6_addr, sizeof(in6_addr)) == 0;
}

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return (ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  }
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

Reach ReachOf(const std::string& target) {
  const size_t colon = target.rfind(':');
  std::string host = target.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return Reach::kElsewhere;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  if (IsLoopback(found->ai_addr)) return Reach::kLoopback;
  ifaddrs* own = nullptr;
  if (::getifaddrs(&own) != 0) return Reach::kElsewhere;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owned_interfaces(own, &::freeifaddrs);
  for (const ifaddrs* one = own; one != nullptr; one = one->ifa_next) {
    if (SameAddress(one->ifa_addr, found->ai_addr)) return Reach::kOwnAddress;
  }
  return Reach::kElsewhere;
}

}  // namespace

TargetPath PathOf(const std::string& target) {
  if (absl::StartsWith(target, "unix:")) return {true, "unix socket, same host"};
  switch (ReachOf(target)) {
    case Reach::kLoopback:
      return {true, "loopback TCP, same host"};
    case Reach::kOwnAddress:
      return {true, "TCP to an address of this host: loopback"};
    case Reach::kElsewhere:
      break;
  }
  return {false, "TCP over a network"};
}

}  // namespace engram::bench
