// The scalar end of the gate: from the three sums of one token and copy to g (docs/numerics.md, gate).
#pragma once

#include <cstdint>

namespace engram::kernels {

// Σ over dim, in f64.
struct GateSums {
  double hh = 0;   // h²
  double kk = 0;   // key²
  double hwk = 0;  // h·w·key
};

// g of one token and copy. A NaN in any sum gives a NaN. Pure; one function for every CPU twin and instruction set, so
// that they differ in the order of the sums alone.
float GateFromSums(const GateSums& sums, int64_t dim, float eps);

}  // namespace engram::kernels
