// KL(q || p) of a weight, in nats, less what is the same for all weights of a prior; see step.cpp.

#pragma once

#include <cstring>
#include <limits>

#include "elementary.h"

namespace {

// A number as its mantissa in [1, 2) times 2^exponent. The sum of many logarithms is that of the
// product of the mantissas, and of the exponents: a multiplication and an addition for each.
struct Factor {
  Real mantissa;
  int32_t exponent;
};

// x is positive and no denormal number.
[[maybe_unused]] inline Factor factor_of(float x) {
  const uint32_t bits = float_to_bits(x);
  return {bits_to_float((bits & 0x007fffffu) | 0x3f800000u), static_cast<int32_t>(bits >> 23) - 127};
}

[[maybe_unused]] inline Factor factor_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t exponent = static_cast<int32_t>(bits >> 52) - 1023;
  bits = (bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof mantissa);
  return {static_cast<Real>(mantissa), exponent};
}

// std = softplus(rho), and log std as shift + log(number): finite for every rho, also where std
// vanishes.
struct LogSpread {
  Real std, number, shift;
};

[[maybe_unused]] inline LogSpread log_spread_of(Real rho) {
  const Real e = exp_negative(-std::fabs(rho));
  const Real series = log1p_ratio(e);
  const bool positive = rho >= Real(0);
  const Real std = std::max(rho, Real(0)) + e * series;
  return {std, positive ? std : series, std::min(rho, Real(0))};
}

// What a weight adds to the KL: value - log(number), with a number of at most 2.
struct Cost {
  Real value, number;
};

constexpr double kLog2Pi = 1.8378770664093453;

// A weight less the prior's mean is `weight`, its mean less that `centred`.
#if EXACT && PRIOR == 0
[[maybe_unused]] inline Cost kl_of(Real centred, Real std, Real first) {
  return {Real(0.5) * first * (std * std + centred * centred), Real(1)};
}

[[maybe_unused]] inline double constant_of(const double* numbers) {
  return -0.5 - 0.5 * std::log(numbers[0]);
}
#elif EXACT && PRIOR == 1
// E|w| of a Gaussian.
[[maybe_unused]] inline Real mean_magnitude(Real centred, Real std) {
  const Real positive = std::max(std, std::numeric_limits<Real>::min());
  const Real bound = Real(50) * positive;
  const Real z = std::min(std::max(centred, -bound), bound) / positive;
  return centred * error_function(z * Real(0.7071067811865476)) +
         std * Real(0.7978845608028654) * exp_negative(Real(-0.5) * z * z);
}

[[maybe_unused]] inline Cost kl_of(Real centred, Real std, Real first) {
  return {first * mean_magnitude(centred, std), Real(1)};
}

[[maybe_unused]] inline double constant_of(const double* numbers) {
  return std::log(2.0) - std::log(numbers[0]) - 0.5 * (1.0 + kLog2Pi);
}
#elif PRIOR == 0
[[maybe_unused]] inline Cost minus_log_prior(Real weight, Real first, Real, Real) {
  return {Real(0.5) * first * weight * weight, Real(1)};
}

[[maybe_unused]] inline double constant_of(const double* numbers) {
  return -0.5 * std::log(numbers[0]);
}
#elif PRIOR == 1
[[maybe_unused]] inline Cost minus_log_prior(Real weight, Real first, Real, Real) {
  return {first * std::fabs(weight), Real(1)};
}

[[maybe_unused]] inline double constant_of(const double* numbers) {
  return std::log(2.0) - std::log(numbers[0]) - 0.5 * kLog2Pi;
}
#else
// The value at 0 of the wide component is left out; see constant_of.
[[maybe_unused]] inline Cost minus_log_prior(Real weight, Real slab, Real spike, Real log_ratio) {
  const Real squared = Real(0.5) * weight * weight;
  // The odds of the narrow component.
  const Real odds = squared * (slab - spike) - log_ratio;
  return {squared * slab - std::max(odds, Real(0)), Real(1) + exp_negative(-std::fabs(odds))};
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
