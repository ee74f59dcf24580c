// KL(q || p) of a weight, in nats, less what is the same for all weights of a prior; see step.cpp.

#pragma once

#include <limits>

#include "elementary.h"

namespace {

struct LogSpread {
  Real std;  // softplus(rho)
  Real log_std;
};

// The logarithm is finite for every rho, also where std vanishes.
[[maybe_unused]] inline LogSpread log_spread_of(Real rho) {
  const Real e = exp_negative(-std::fabs(rho));
  const Real series = log1p_ratio(e);
  const bool positive = rho >= Real(0);
  const Real std = std::max(rho, Real(0)) + e * series;
  return {std, log_positive(positive ? std : series) + (positive ? Real(0) : rho)};
}

constexpr double kLog2Pi = 1.8378770664093453;

// A weight less the prior's mean is `weight`, its mean less that `centred`.
#if EXACT && PRIOR == 0
#define KL_OF(centred, std, first) (Real(0.5) * (first) * ((std) * (std) + (centred) * (centred)))

[[maybe_unused]] inline double constant_of(const double* numbers) {
  return -0.5 - 0.5 * std::log(numbers[0]);
}
#elif EXACT && PRIOR == 1
#define KL_OF(centred, std, first) ((first) * mean_magnitude(centred, std))

// E|w| of a Gaussian.
[[maybe_unused]] inline Real mean_magnitude(Real centred, Real std) {
  const Real positive = std::max(std, std::numeric_limits<Real>::min());
  const Real bound = Real(50) * positive;
  const Real z = std::min(std::max(centred, -bound), bound) / positive;
  return centred * error_function(z * Real(0.7071067811865476)) +
         std * Real(0.7978845608028654) * exp_negative(Real(-0.5) * z * z);
}

[[maybe_unused]] inline double constant_of(const double* numbers) {
  return std::log(2.0) - std::log(numbers[0]) - 0.5 * (1.0 + kLog2Pi);
}
#elif PRIOR == 0
#define MINUS_LOG_PRIOR(weight, first, second, third) (Real(0.5) * (first) * (weight) * (weight))

[[maybe_unused]] inline double constant_of(const double* numbers) {
  return -0.5 * std::log(numbers[0]);
}
#elif PRIOR == 1
#define MINUS_LOG_PRIOR(weight, first, second, third) ((first) * std::fabs(weight))

[[maybe_unused]] inline double constant_of(const double* numbers) {
  return std::log(2.0) - std::log(numbers[0]) - 0.5 * kLog2Pi;
}
#else
#define MINUS_LOG_PRIOR(weight, first, second, third) \
  minus_log_mixture(weight, first, second, third)

// Less that of the wide component at 0.
[[maybe_unused]] inline Real minus_log_mixture(Real weight, Real slab, Real spike, Real log_ratio) {
  const Real squared = Real(0.5) * weight * weight;
  // The odds of the narrow component.
  const Real odds = squared * (slab - spike) - log_ratio;
  const Real e = exp_negative(-std::fabs(odds));
  return squared * slab - std::max(odds, Real(0)) - e * log1p_ratio(e);
}

[[maybe_unused]] inline double constant_of(const double* numbers) {
  // log(pi / (1 - pi)) follows from the third number.
  const double log_odds = numbers[2] - 0.5 * std::log(numbers[0]) + 0.5 * std::log(numbers[1]);
  const double log_share = log_odds > 0 ? -std::log1p(std::exp(-log_odds))
                                        : log_odds - std::log1p(std::exp(log_odds));
  return -log_share - 0.5 * std::log(numbers[0]);
}
#endif

}  // namespace
