// The clock that workers are played by: CLOCK_MONOTONIC, as a duration since its origin.
#pragma once

#include "absl/time/time.h"

namespace engram::bench {

absl::Duration ClockNow();

// Sleeps until that moment; returns at once where it has passed. Never spins: the server may share the processors.
void SleepUntil(absl::Duration moment);

// This thread's sleeps end within a microsecond of their time instead of the usual 50, as far as the kernel can.
void SleepExactly();

}  // namespace engram::bench
