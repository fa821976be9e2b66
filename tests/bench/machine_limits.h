// What this machine can do at best, measured in the run whose figures are read against it.
#pragma once

#include <cstdint>

#include "kernels/workers.h"

namespace engram::kernels {

struct MachineLimits {
  double read_bytes = 0;   // per second, all threads, from memory in huge pages, as packed weights are
  double copy_bytes = 0;   // per second, read and written together, in ordinary pages, as messages are
  double touch_lines = 0;  // cache lines at random places of a large table, per second, all threads
  double bf16_flops = 0;   // per second, all threads: vdpbf16ps, or FMA where there is none; 0: neither
};

// Takes about a second. `table` is what random lines are read from.
MachineLimits MeasureLimits(Workers& workers, const uint8_t* table, int64_t table_bytes);

// Cache lines read at random places of the table, per second, all threads: what a gather cannot outrun.
double MeasureTouches(Workers& workers, const uint8_t* table, int64_t table_bytes);

}  // namespace engram::kernels
