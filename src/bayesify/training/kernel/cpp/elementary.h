// Elementary functions written out, so that the compiler can make vector code of loops over them.
// In float to a rounding or two; in double they are the standard library's.
// Polynomials have their even and odd powers apart: two chains of half the length, since a CPU
// waits for the chain and not for the number of operations.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using Real = REAL;

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// exp(x) for x <= 0; 0 below -87.
inline float exp_negative(float x) {
  const float bounded = std::max(x, -87.0f);
  const float shifted = bounded * 1.44269504f + 12582912.0f;  // rounds to an integer
  const float power = shifted - 12582912.0f;
  float r = bounded - power * 0.693359375f;
  r -= power * -2.12194440e-4f;
  const float s = r * r;
  float even = 1.3981999507e-3f, odd = 1.9875691500e-4f;
  even = even * s + 4.1665795894e-2f;
  odd = odd * s + 8.3334519073e-3f;
  even = even * s + 5.0000001201e-1f;
  odd = odd * s + 1.6666665459e-1f;
  const float p = (odd * r + even) * s + r + 1.0f;
  // The integer is in the low bits of `shifted`; it is added to the exponent of p.
  const float scaled = bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
  return x < -87.0f ? 0.0f : scaled;
}

inline double exp_negative(double x) { return std::exp(x); }

// 1 / sqrt(x) for normal x > 0, to 1e-4: by its bits to 3 %, then an iteration of third order.
inline float rough_inverse_root(float x) {
  const float y = bits_to_float(0x5f37599eu - (float_to_bits(x) >> 1));
  const float rest = 1.0f - x * y * y;
  return y + y * (rest * (0.375f * rest + 0.5f));
}

// sqrt(x) for finite x >= 0 by arithmetic alone; of denormal numbers to 1e-19.
[[maybe_unused]] inline float root_by_arithmetic(float x) {
  const float y = rough_inverse_root(x), root = x * y;
  return root + 0.5f * root * (1.0f - root * y);
}

[[maybe_unused]] inline double root_by_arithmetic(double x) { return std::sqrt(x); }

// 1 / sqrt(x) for normal x > 0 by arithmetic alone.
[[maybe_unused]] inline float inverse_root(float x) {
  const float y = rough_inverse_root(x);
  return y + 0.5f * y * (1.0f - x * y * y);
}

[[maybe_unused]] inline double inverse_root(double x) { return 1.0 / std::sqrt(x); }

// log(x) for x > 0, x no denormal number.
inline float log_positive(float x) {
  const uint32_t bits = float_to_bits(x);
  // x = m 2^e with m in [sqrt(1/2), sqrt(2)).
  const uint32_t offset = bits - 0x3f3504f3u;
  const int32_t e = static_cast<int32_t>(offset) >> 23;
  const float m = bits_to_float((offset & 0x007fffffu) + 0x3f3504f3u);
  const float f = m - 1.0f;
  const float squared = f * f;
  float even = 7.0376836292e-2f, odd = -1.1514610310e-1f;
  even = even * squared + 1.1676998740e-1f;
  odd = odd * squared - 1.2420140846e-1f;
  even = even * squared + 1.4249322787e-1f;
  odd = odd * squared - 1.6668057665e-1f;
  even = even * squared + 2.0000714765e-1f;
  odd = odd * squared - 2.4999993993e-1f;
  even = even * squared + 3.3333331174e-1f;
  const float p = odd * f + even;
  const float power = static_cast<float>(e);
  float result = p * f * squared + power * -2.12194440e-4f - 0.5f * squared;
  return result + f + power * 0.693359375f;
}

inline double log_positive(double x) { return std::log(x); }

// log(1 + e) / e for 0 <= e <= 1.
inline float log1p_ratio(float e) {
  const float s = e * e;
  float even = 1.9487686e-2f, odd = -3.1639993e-3f;
  even = even * s + 1.0532951e-1f;
  odd = odd * s - 5.6269526e-2f;
  even = even * s + 1.9661018e-1f;
  odd = odd * s - 1.5263274e-1f;
  even = even * s + 3.3329665e-1f;
  odd = odd * s - 2.4951167e-1f;
  even = even * s + 1.0f;
  odd = odd * s - 4.9999891e-1f;
  return odd * e + even;
}

inline double log1p_ratio(double e) { return e < 1e-9 ? 1.0 - 0.5 * e : std::log1p(e) / e; }

inline Real softplus(Real rho) {
  const Real e = exp_negative(-std::fabs(rho));
  return std::max(rho, Real(0)) + e * log1p_ratio(e);
}

// rho with softplus(rho) = std, for std > 0, no denormal number: log(exp(std) - 1).
[[maybe_unused]] inline float inverse_softplus(float std) {
  const bool small = std < 0.5f;
  const float s = std * std;
  float even = 1.9841270e-4f, odd = 2.4801587e-5f;
  even = even * s + 8.3333333e-3f;
  odd = odd * s + 1.3888889e-3f;
  even = even * s + 1.6666667e-1f;
  odd = odd * s + 4.1666667e-2f;
  even = even * s + 1.0f;
  odd = odd * s + 0.5f;
  const float series = odd * std + even;  // (exp(std) - 1) / std
  const float within = small ? std * series : 1.0f - exp_negative(-std);
  return log_positive(within) + (small ? 0.0f : std);
}

[[maybe_unused]] inline double inverse_softplus(double std) {
  return std + std::log(-std::expm1(-std));
}

// The same for std < 0.5: log(std) + log((exp(std) - 1) / std), in powers of std.
[[maybe_unused]] inline float inverse_softplus_of_small(float std) {
  const float s = std * std;
  float even = 5.5114638e-6f;
  even = even * s - 3.4722222e-4f;
  even = even * s + 4.1666667e-2f;
  return log_positive(std) + (even * s + 0.5f * std);
}

[[maybe_unused]] inline double inverse_softplus_of_small(double std) {
  return inverse_softplus(std);
}

// d log std / d rho = (1 - exp(-std)) / std, for 0 <= std < 0.5.
[[maybe_unused]] inline float softplus_ratio_of_small(float std) {
  const float s = std * std;
  float even = 1.9841270e-4f, odd = -2.4801587e-5f;
  even = even * s + 8.3333333e-3f;
  odd = odd * s - 1.3888889e-3f;
  even = even * s + 1.6666667e-1f;
  odd = odd * s - 4.1666667e-2f;
  odd = odd * s - 0.5f;
  return (even * s + 1.0f) + odd * std;
}

// The same for any std.
[[maybe_unused]] inline float softplus_ratio(float std) {
  const float far = std::max(std, 0.5f);
  return std < 0.5f ? softplus_ratio_of_small(std) : (1.0f - exp_negative(-far)) / far;
}

[[maybe_unused]] inline double softplus_ratio(double std) {
  return std > 0.0 ? -std::expm1(-std) / std : 1.0;
}

[[maybe_unused]] inline double softplus_ratio_of_small(double std) { return softplus_ratio(std); }

// erf(x), to 4e-7: Abramowitz and Stegun 7.1.26 far out, the Taylor series near 0.
[[maybe_unused]] inline float error_function(float x) {
  const float z = x * x;
  float near = -7.5757576e-4f;
  near = near * z + 4.6296296e-3f;
  near = near * z - 2.3809524e-2f;
  near = near * z + 1.0e-1f;
  near = near * z - 3.3333333e-1f;
  near = x * (near * z + 1.0f) * 1.12837917f;
  const float size = std::fabs(x);
  const float t = 1.0f / (1.0f + 0.3275911f * size);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float far = 1.0f - p * t * exp_negative(-z);
  return size < 0.5f ? near : (x < 0.0f ? -far : far);
}

[[maybe_unused]] inline double error_function(double x) { return std::erf(x); }

}  // namespace
