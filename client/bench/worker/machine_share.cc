#include "client/bench/worker/machine_share.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/bench/worker/clock.h"

namespace engram::bench {
namespace {

constexpr size_t kMostMetrics = 16 << 20;

struct Closer {
  int fd;
  ~Closer() { ::close(fd); }
};

absl::Status Unavailable(const std::string& address, absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("metrics of \"", address, "\": ", what));
}

// A connection to the first address that takes one; -1: none.
int Connect(const addrinfo* addresses) {
  for (const addrinfo* at = addresses; at != nullptr; at = at->ai_next) {
    const int fd = ::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
    if (fd < 0) continue;
    const timeval patience{.tv_sec = 5, .tv_usec = 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (::connect(fd, at->ai_addr, at->ai_addrlen) == 0) return fd;
    ::close(fd);
  }
  return -1;
}

}  // namespace

absl::StatusOr<double> EngineSeconds(absl::string_view metrics_text) {
  double sum = 0;
  for (const char* stage : {"hash", "gather", "project", "gate"}) {
    const std::string series = absl::StrCat("engram_stage_duration_seconds_sum{stage=\"", stage, "\"} ");
    double seconds = 0;
    bool found = false;
    for (absl::string_view line : absl::StrSplit(metrics_text, '\n')) {
      line = absl::StripSuffix(line, "\r");
      if (!absl::StartsWith(line, series)) continue;
      found = absl::SimpleAtod(line.substr(series.size()), &seconds);
      break;
    }
    if (!found) return absl::NotFoundError(absl::StrCat("the metrics have no ", absl::StripSuffix(series, " ")));
    sum += seconds;
  }
  return sum;
}

absl::StatusOr<std::string> ReadMetrics(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return Unavailable(address, "expected host:port");
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* addresses = nullptr;
  const std::string host = address.substr(0, colon), port = address.substr(colon + 1);
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &addresses); error != 0) {
    return Unavailable(address, gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(addresses, &freeaddrinfo);
  const Closer connection{Connect(addresses)};
  if (connection.fd < 0) return Unavailable(address, "no connection");
  const std::string request = absl::StrCat("GET /metrics HTTP/1.0\r\nHost: ", host, "\r\n\r\n");
  if (::send(connection.fd, request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) {
    return Unavailable(address, "the request was not taken");
  }
  std::string text;
  std::vector<char> buffer(1 << 16);
  ssize_t read = 0;
  while ((read = ::recv(connection.fd, buffer.data(), buffer.size(), 0)) > 0) {
    text.append(buffer.data(), static_cast<size_t>(read));
    if (text.size() > kMostMetrics) return Unavailable(address, "more than 16 MiB");
  }
  if (read < 0) return Unavailable(address, "no answer in 5 seconds");
  const size_t body = text.find("\r\n\r\n");
  if (body == std::string::npos || !absl::StrContains(text.substr(0, text.find('\r')), " 200")) {
    return Unavailable(address, "the answer is not HTTP's 200");
  }
  return text.substr(body + 4);
}

std::optional<BusyShare::Jiffies> BusyShare::ReadJiffies() {
  std::ifstream stat("/proc/stat");
  std::string cpu;
  if (!(stat >> cpu) || cpu != "cpu") return std::nullopt;
  // user nice system idle iowait irq softirq steal
  Jiffies jiffies;
  double value = 0;
  for (int i = 0; i < 8 && stat >> value; ++i) {
    jiffies.all += value;
    if (i != 3 && i != 4) jiffies.busy += value;
  }
  return jiffies;
}

std::optional<double> BusyShare::ReadEngine() {
  if (metrics_.empty()) return std::nullopt;
  const absl::StatusOr<std::string> text = ReadMetrics(metrics_);
  absl::StatusOr<double> seconds = text.ok() ? EngineSeconds(*text) : text.status();
  if (seconds.ok()) return *seconds;
  fault_ = std::string(seconds.status().message());
  return std::nullopt;
}

void BusyShare::Begin() {
  engine_began_ = ReadEngine();
  jiffies_began_ = ReadJiffies();
  began_ = ClockNow();
}

void BusyShare::End() {
  const double wall = absl::ToDoubleSeconds(ClockNow() - began_);
  const std::optional<Jiffies> jiffies = ReadJiffies();
  const std::optional<double> engine = ReadEngine();
  if (engine_began_.has_value() && engine.has_value()) engine_ = (*engine - *engine_began_) / wall;
  if (jiffies_began_.has_value() && jiffies.has_value() && jiffies->all > jiffies_began_->all) {
    machine_ = (jiffies->busy - jiffies_began_->busy) / (jiffies->all - jiffies_began_->all);
  }
}

}  // namespace engram::bench
