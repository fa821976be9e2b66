#include "client/bench/server_metrics.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"

namespace engram::bench {
namespace {

// Some hundred series of 100 bytes: far more is no server of ours.
constexpr size_t kMostBytes = size_t{16} << 20;

constexpr absl::string_view kStagePrefix = "engram_stage_duration_seconds";

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

absl::Status CannotRead(const std::string& address, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("--metrics ", address, ": ", why));
}

absl::StatusOr<std::string> Get(const std::string& address, absl::Duration timeout) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return CannotRead(address, "expected host:port");
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found); error != 0) {
    return CannotRead(address, ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, &::freeaddrinfo);
  const Socket socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval limit = absl::ToTimeval(timeout);
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (::connect(socket.fd(), found->ai_addr, found->ai_addrlen) != 0) return CannotRead(address, std::strerror(errno));
  const std::string request = absl::StrCat("GET /metrics HTTP/1.0\r\nHost: ", address, "\r\n\r\n");
  if (::send(socket.fd(), request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) {
    return CannotRead(address, std::strerror(errno));
  }
  const absl::Time deadline = absl::Now() + timeout;
  std::string answer;
  char buffer[16384];
  for (;;) {
    const ssize_t got = ::recv(socket.fd(), buffer, sizeof buffer, 0);
    if (got == 0) return answer;
    if (got < 0) return CannotRead(address, std::strerror(errno));
    answer.append(buffer, static_cast<size_t>(got));
    if (answer.size() > kMostBytes) return CannotRead(address, "the answer has more than 16 MiB");
    if (absl::Now() > deadline) return CannotRead(address, "the answer takes too long");
  }
}

double ValueOr(const MetricValues& values, const std::string& series, double otherwise) {
  const auto found = values.find(series);
  return found == values.end() ? otherwise : found->second;
}

std::optional<double> ValueIn(const MetricValues& values, const std::string& series) {
  const auto found = values.find(series);
  return found == values.end() ? std::nullopt : std::optional<double>(found->second);
}

}  // namespace

MetricValues ParseMetrics(absl::string_view text) {
  MetricValues values;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    // Labels may hold spaces; none of them holds a closing brace behind which a value stands.
    const size_t labels = line.rfind('}');
    const size_t space = line.find(' ', labels == absl::string_view::npos ? 0 : labels);
    if (space == absl::string_view::npos) continue;
    const std::vector<absl::string_view> rest = absl::StrSplit(line.substr(space), ' ', absl::SkipEmpty());
    double value = 0;
    if (rest.empty() || !absl::SimpleAtod(rest.front(), &value)) continue;
    values[std::string(line.substr(0, space))] = value;
  }
  return values;
}

absl::StatusOr<MetricValues> ReadMetrics(const std::string& address, absl::Duration timeout) {
  absl::string_view host = address;
  absl::ConsumePrefix(&host, "http://");
  absl::ConsumeSuffix(&host, "/");
  absl::ConsumeSuffix(&host, "/metrics");
  const absl::StatusOr<std::string> answer = Get(std::string(host), timeout);
  if (!answer.ok()) return answer.status();
  const size_t end = answer->find("\r\n\r\n");
  const absl::string_view first = absl::string_view(*answer).substr(0, answer->find("\r\n"));
  if (!absl::StartsWith(first, "HTTP/")) {
    return CannotRead(address,
                      "what answers there is no HTTP listener; the server's --http-listen is, its --listen is not");
  }
  if (end == std::string::npos || first.find(" 200 ") == absl::string_view::npos) {
    return CannotRead(address, absl::StrCat("GET /metrics was answered \"", first.substr(0, 80), "\""));
  }
  return ParseMetrics(absl::string_view(*answer).substr(end + 4));
}

ServerChange ChangeBetween(const MetricValues& before, const MetricValues& after) {
  ServerChange change;
  for (const auto& [series, value] : after) {
    absl::string_view name = series;
    if (absl::ConsumePrefix(&name, "engram_requests_total{")) {
      change.calls += value - ValueOr(before, series, 0);
    } else if (absl::ConsumePrefix(&name, kStagePrefix)) {
      const bool sum = absl::ConsumePrefix(&name, "_sum{stage=\"");
      if (!sum && !absl::ConsumePrefix(&name, "_count{stage=\"")) continue;
      if (!absl::ConsumeSuffix(&name, "\"}")) continue;
      ServerChange::Stage& stage = change.stages[std::string(name)];
      (sum ? stage.seconds : stage.count) = value - ValueOr(before, series, 0);
    }
  }
  const auto cpu_before = ValueIn(before, "process_cpu_seconds_total");
  const auto cpu_after = ValueIn(after, "process_cpu_seconds_total");
  if (cpu_before.has_value() && cpu_after.has_value()) change.cpu_seconds = *cpu_after - *cpu_before;
  change.resident_begin = ValueIn(before, "process_resident_memory_bytes");
  change.resident_end = ValueIn(after, "process_resident_memory_bytes");
  return change;
}

void ServerChange::Merge(const ServerChange& later) {
  for (const auto& [name, stage] : later.stages) {
    stages[name].seconds += stage.seconds;
    stages[name].count += stage.count;
  }
  calls += later.calls;
  if (cpu_seconds.has_value() && later.cpu_seconds.has_value()) *cpu_seconds += *later.cpu_seconds;
  resident_end = later.resident_end;
}

std::vector<std::string> StageOrder(const ServerChange& change) {
  constexpr absl::string_view kOrder[] = {"decode",  "queue", "hash", "gather", "h2d",
                                          "project", "gate",  "d2h",  "encode"};
  std::vector<std::string> names;
  for (const absl::string_view name : kOrder) {
    if (change.stages.count(std::string(name)) > 0) names.emplace_back(name);
  }
  for (const auto& [name, stage] : change.stages) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

}  // namespace engram::bench
