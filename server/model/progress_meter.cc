#include "server/model/progress_meter.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "absl/strings/str_format.h"

namespace engram {
namespace {

constexpr double kGiB = 1 << 30;

}  // namespace

std::string ProgressText(const std::string& label, int64_t bytes_done, int64_t bytes_total, double seconds) {
  const double done = static_cast<double>(bytes_done), total = static_cast<double>(bytes_total);
  const double rate = seconds > 0 ? done / seconds : 0;
  std::string text = absl::StrFormat("%s: %.2f of %.2f GiB, %.0f %%", label, done / kGiB, total / kGiB,
                                     total > 0 ? 100 * done / total : 100.0);
  if (rate > 0) absl::StrAppendFormat(&text, ", %.2f GiB/s, %.0f s left", rate / kGiB, (total - done) / rate);
  return text;
}

ProgressMeter::ProgressMeter(std::string label) : label_(std::move(label)), terminal_(isatty(STDERR_FILENO) != 0) {}

ProgressMeter::~ProgressMeter() {
  if (line_open_) std::fputc('\n', stderr);
}

void ProgressMeter::Update(int64_t bytes_done, int64_t bytes_total) {
  const Clock::time_point now = Clock::now();
  const double since_start = std::chrono::duration<double>(now - start_).count();
  const double since_last = std::chrono::duration<double>(now - last_).count();
  const bool reported = last_ != start_;
  const bool last_of_reported = reported && bytes_done == bytes_total;
  if (!last_of_reported && since_last < (terminal_ ? (reported ? 0.2 : 1.0) : 10.0)) return;
  last_ = now;
  const std::string text = ProgressText(label_, bytes_done, bytes_total, since_start);
  std::fprintf(stderr, terminal_ ? "\r%s\033[K" : "%s\n", text.c_str());
  std::fflush(stderr);
  line_open_ = terminal_;
}

}  // namespace engram
