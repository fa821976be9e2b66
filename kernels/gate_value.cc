#include "kernels/gate_value.h"

#include <cmath>

namespace engram::kernels {

float GateFromSums(const GateSums& sums, int64_t dim, float eps) {
  const float count = static_cast<float>(dim);
  const float mean_hh = static_cast<float>(sums.hh) / count;
  const float mean_kk = static_cast<float>(sums.kk) / count;
  const float rstd = (1.0f / std::sqrt(mean_hh + eps)) * (1.0f / std::sqrt(mean_kk + eps));
  const float inverse_sqrt_dim = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  const float dot = static_cast<float>(sums.hwk) * rstd * inverse_sqrt_dim;

  // Written as a comparison, because fmax would turn a NaN into 1e-6.
  const float magnitude = std::fabs(dot) < 1e-6f ? 1e-6f : std::fabs(dot);
  const double root = std::copysign(std::sqrt(static_cast<double>(magnitude)), static_cast<double>(dot));
  return static_cast<float>(1.0 / (1.0 + std::exp(-root)));
}

}  // namespace engram::kernels
