#include "client/bench/worker/clock.h"

#include <sys/prctl.h>
#include <time.h>

#include <cerrno>

namespace engram::bench {

absl::Duration ClockNow() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::DurationFromTimespec(now);
}

void SleepUntil(absl::Duration moment) {
  const timespec until = absl::ToTimespec(moment);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

void SleepExactly() { prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); }

}  // namespace engram::bench
