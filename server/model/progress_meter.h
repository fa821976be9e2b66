// Progress of minutes-long work on stderr: one line that is rewritten on a terminal, a log line every ten seconds
// otherwise; with rate and time left. Silent for work that ends within a second. Not for several threads at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace engram {

class ProgressMeter {
 public:
  explicit ProgressMeter(std::string label);
  ~ProgressMeter();  // leaves the terminal on a fresh line

  void Update(int64_t bytes_done, int64_t bytes_total);

 private:
  using Clock = std::chrono::steady_clock;

  const std::string label_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
  bool line_open_ = false;
};

// "12.3 GiB written, 1.2 GiB/s, 40 s left" from numbers: the text of one report.
std::string ProgressText(const std::string& label, int64_t bytes_done, int64_t bytes_total, double seconds);

}  // namespace engram
