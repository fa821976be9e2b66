#include "client/resolve.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/channels.h"

namespace engram::client {
namespace {

struct HostPort {
  std::string host;  // without brackets
  std::string port;
};

// `target` has passed CheckTarget and is no unix socket.
HostPort Split(const std::string& target) {
  const size_t colon = target.rfind(':');
  std::string host = target.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return {std::move(host), target.substr(colon + 1)};
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// `error` is getaddrinfo's, 0 for success.
AddressList LookUp(const HostPort& target, int flags, int& error) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* list = nullptr;
  error = getaddrinfo(target.host.c_str(), target.port.c_str(), &hints, &list);
  return {error == 0 ? list : nullptr, &freeaddrinfo};
}

}  // namespace

bool operator==(const Address& a, const Address& b) { return a.name == b.name && a.uri == b.uri; }

bool NeedsDns(const std::string& target) {
  if (absl::StartsWith(target, "unix:") || !CheckTarget(target).ok()) return false;
  int error = 0;
  LookUp(Split(target), AI_NUMERICHOST, error);
  return error != 0;
}

absl::StatusOr<std::vector<Address>> ResolveTarget(const std::string& target) {
  if (absl::Status status = CheckTarget(target); !status.ok()) return status;
  if (absl::StartsWith(target, "unix:")) return std::vector<Address>{{target, target}};

  int error = 0;
  const AddressList list = LookUp(Split(target), 0, error);
  if (error != 0) {
    const char* reason = error == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(error);
    return absl::UnavailableError(absl::StrCat(target, ": no address: ", reason));
  }
  std::vector<Address> addresses;
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    char host[NI_MAXHOST];
    char port[NI_MAXSERV];
    if (getnameinfo(info->ai_addr, info->ai_addrlen, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
      continue;
    }
    Address address;
    if (info->ai_family == AF_INET) {
      address.name = absl::StrCat(host, ":", port);
      address.uri = absl::StrCat("ipv4:", address.name);
    } else if (info->ai_family == AF_INET6) {
      address.name = absl::StrCat("[", host, "]:", port);
      // A URI's path has neither brackets nor a bare % (of a scope, "fe80::1%eth0").
      address.uri =
          absl::StrCat("ipv6:", absl::StrReplaceAll(address.name, {{"[", "%5B"}, {"]", "%5D"}, {"%", "%25"}}));
    } else {
      continue;
    }
    if (std::find(addresses.begin(), addresses.end(), address) == addresses.end()) addresses.push_back(address);
  }
  if (addresses.empty()) return absl::UnavailableError(absl::StrCat(target, ": no address: none of IPv4 or IPv6"));
  return addresses;
}

}  // namespace engram::client
