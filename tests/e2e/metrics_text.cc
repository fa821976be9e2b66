#include "tests/e2e/metrics_text.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <limits>
#include <thread>

namespace engram::e2e {

std::string HttpGet(const std::string& address, const std::string& path) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  std::string text;
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    if (::send(fd, request.data(), request.size(), 0) > 0) {
      char buffer[4096];
      for (ssize_t n = 0; (n = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) text.append(buffer, static_cast<size_t>(n));
    }
  }
  ::close(fd);
  return text;
}

double MetricOf(const std::string& address, const std::string& series) {
  const std::string text = HttpGet(address, "/metrics");
  const size_t line = text.find("\n" + series + " ");
  if (line == std::string::npos) return std::numeric_limits<double>::quiet_NaN();
  return std::stod(text.substr(line + series.size() + 2));
}

bool AwaitMetric(const std::string& address, const std::string& series, double value) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (MetricOf(address, series) != value) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace engram::e2e
