// The variational step in one pass over the weights, for processors.
//
// For each weight: the gradients of the loss in mean and rho, the optimiser, the noise of the next
// step's sample, and that sample. The formulas are those of formulas.py and threefry.py, which say
// where they come from; tests compare the two.
// Elementary functions are written out, so that the compiler can make vector code of the loops.
//
// Compiled for each use, by macros:
//   REAL       float or double
//   PRIOR      0 Gaussian, 1 Laplace, 2 scale mixture
//   EXACT      1 where the KL has a closed form, 0 where it is estimated at the sampled weight
//   OPTIMIZER  0 SGD, 1 SGD with momentum, 2 Adam
//   MOMENTS    0 where the network runs on sampled weights, 1 where on means and stds

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

using Real = REAL;

constexpr int64_t kBlock = 256;  // numbers of one block: cosines, then sines
constexpr int64_t kHalf = kBlock / 2;
constexpr int64_t kChunk = 32 * kBlock;  // what a thread takes at a time

// ---- elementary functions -------------------------------------------------------------------

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
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t scale = (static_cast<uint32_t>(static_cast<int32_t>(power)) + 127u) << 23;
  return x < -87.0f ? 0.0f : p * bits_to_float(scale);
}

inline double exp_negative(double x) { return std::exp(x); }

// log(x) for 0 < x <= 1, x no denormal number.
inline float log_fraction(float x) {
  const uint32_t bits = float_to_bits(x);
  // x = m 2^e with m in [sqrt(1/2), sqrt(2)).
  const uint32_t offset = bits - 0x3f3504f3u;
  const int32_t e = static_cast<int32_t>(offset) >> 23;
  const float m = bits_to_float((offset & 0x007fffffu) + 0x3f3504f3u);
  const float f = m - 1.0f;
  float p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const float squared = f * f;
  const float power = static_cast<float>(e);
  float result = p * f * squared + power * -2.12194440e-4f - 0.5f * squared;
  return result + f + power * 0.693359375f;
}

inline double log_fraction(double x) { return std::log(x); }

// log(1 + e) / e for 0 <= e <= 1.
inline float log1p_ratio(float e) {
  float p = -3.1639993e-3f;
  p = p * e + 1.9487686e-2f;
  p = p * e - 5.6269526e-2f;
  p = p * e + 1.0532951e-1f;
  p = p * e - 1.5263274e-1f;
  p = p * e + 1.9661018e-1f;
  p = p * e - 2.4951167e-1f;
  p = p * e + 3.3329665e-1f;
  p = p * e - 4.9999891e-1f;
  return p * e + 1.0f;
}

inline double log1p_ratio(double e) { return e < 1e-9 ? 1.0 - 0.5 * e : std::log1p(e) / e; }

inline Real softplus(Real rho) {
  const Real e = exp_negative(-std::fabs(rho));
  return std::max(rho, Real(0)) + e * log1p_ratio(e);
}

struct Spread {
  Real std;    // softplus(rho)
  Real ratio;  // d log std / d rho
};

// With one division, and none of 0 by 0 where std vanishes.
inline Spread spread_of(Real rho) {
  const Real e = exp_negative(-std::fabs(rho));
  const Real series = log1p_ratio(e);
  const bool positive = rho >= Real(0);
  const Real std = std::max(rho, Real(0)) + e * series;
  // Of rho < 0 the ratio is [e / (1 + e)] / [e series].
  const Real ratio = Real(1) / ((Real(1) + e) * (positive ? std : series));
  return {std, ratio};
}

#if PRIOR == 1 && EXACT
// erf(x), to 2e-7: Abramowitz and Stegun 7.1.26 far out, the Taylor series near 0.
inline float error_function(float x) {
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

inline double error_function(double x) { return std::erf(x); }
#endif

// ---- noise ------------------------------------------------------------------------------------

inline uint32_t rotated(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

// Threefry-2x32 of 20 rounds (Salmon et al. 2011).
inline void threefry(uint32_t k0, uint32_t k1, uint32_t& x0, uint32_t& x1) {
  const uint32_t keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
  constexpr int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  x0 += keys[0];
  x1 += keys[1];
#pragma GCC unroll 20
  for (int round = 0; round < 20; ++round) {
    x0 += x1;
    x1 = rotated(x1, rotations[round % 8]) ^ x0;
    if (round % 4 == 3) {
      const int turn = round / 4 + 1;
      x0 += keys[turn % 3];
      x1 += keys[(turn + 1) % 3] + static_cast<uint32_t>(turn);
    }
  }
}

inline void cos_sin(int32_t turns, float& cosine, float& sine) {
  // The nearest quarter turn, and the rest in integers: exact.
  const uint32_t quarter = (static_cast<uint32_t>(turns) + 0x20000000u) >> 30;
  const int32_t rest = static_cast<int32_t>(static_cast<uint32_t>(turns) - (quarter << 30));
  const float x = static_cast<float>(rest) * 1.46291807927e-9f;  // 2 pi / 2^32
  const float z = x * x;
  float s = -1.9515295891e-4f;
  s = s * z + 8.3321608736e-3f;
  s = s * z - 1.6666654611e-1f;
  s = s * z * x + x;
  float c = 2.443315711809948e-5f;
  c = c * z - 1.388731625493765e-3f;
  c = c * z + 4.166664568298827e-2f;
  c = c * z * z - 0.5f * z + 1.0f;
  const bool swapped = quarter & 1u;
  const float first = swapped ? s : c;
  const float second = swapped ? c : s;
  const uint32_t cos_sign = ((quarter + 1u) & 2u) << 30;
  const uint32_t sin_sign = (quarter & 2u) << 30;
  cosine = bits_to_float(float_to_bits(first) ^ cos_sign);
  sine = bits_to_float(float_to_bits(second) ^ sin_sign);
}

inline void cos_sin(int32_t turns, double& cosine, double& sine) {
  const double angle = turns * 1.4629180792671596e-09;
  cosine = std::cos(angle);
  sine = std::sin(angle);
}

// One block of standard normals (Box and Muller 1958).
inline void normals(uint32_t k0, uint32_t k1, uint32_t step, int64_t block, Real* out) {
  const uint32_t first = static_cast<uint32_t>(block * kHalf);
#pragma omp simd
  for (int64_t j = 0; j < kHalf; ++j) {
    uint32_t x0 = first + static_cast<uint32_t>(j), x1 = step;
    threefry(k0, k1, x0, x1);
    const Real u = static_cast<Real>(static_cast<int32_t>(x0 >> 1)) * Real(4.656612873077393e-10) +
                   Real(2.3283064365386963e-10);
    const Real radius = std::sqrt(Real(-2) * log_fraction(u));
    Real cosine, sine;
    cos_sin(static_cast<int32_t>(x1), cosine, sine);
    out[j] = radius * cosine;
    out[kHalf + j] = radius * sine;
  }
}

// ---- the step ---------------------------------------------------------------------------------

// A vector whose parts, one for each parameter, lie apart; a part that is null is zero.
class Parts {
 public:
  Parts(const int64_t* starts, int64_t count, const Real* const* parts, int64_t at)
      : starts_(starts), parts_(parts) {
    part_ = std::upper_bound(starts, starts + count, at) - starts - 1;
  }

  // The next numbers, in order.
  void copy(int64_t from, int64_t size, Real* out) {
    for (int64_t at = from; at < from + size;) {
      while (starts_[part_ + 1] <= at) ++part_;
      const int64_t end = std::min(from + size, starts_[part_ + 1]);
      if (const Real* part = parts_[part_])
        std::memcpy(out + (at - from), part + (at - starts_[part_]), (end - at) * sizeof(Real));
      else
        std::fill(out + (at - from), out + (end - from), Real(0));
      at = end;
    }
  }

 private:
  const int64_t* starts_;
  const Real* const* parts_;
  int64_t part_;
};

}  // namespace

extern "C" {

struct Rates {
  double lr, beta1, beta2, eps, correction1, correction2;
};

// Mirrored in native.py.
struct Step {
  int64_t num_weights, num_parameters, num_threads;
  const int64_t* starts;       // of each parameter in the flat vector, and its end
  const Real* const* in_mean;  // gradients of each parameter, in its weights or its means
  const Real* const* in_std;   // and in its standard deviations; of MOMENTS
  Real *mean, *rho;
  Real* leaf;  // the sampled weights, or of MOMENTS the standard deviations
  Real *mean_first, *mean_second, *rho_first, *rho_second;
  const Real* prior_mean;  // or null for zeros
  const uint8_t* kept;     // or null where nothing was pruned
  uint32_t key0, key1, step, next;
  double kl_factor, prior[3];
  Rates of_mean, of_rho;
  double in_log_std;  // out: the sum of the loss's derivatives in log std
};
}

namespace {

// An optimiser's constants, in the precision of the vectors.
struct Mover {
  explicit Mover(const Rates& rates)
      : lr(Real(rates.lr / rates.correction1)),
        beta1(Real(rates.beta1)),
        beta2(Real(rates.beta2)),
        rest1(Real(1.0 - rates.beta1)),
        rest2(Real(1.0 - rates.beta2)),
        eps(Real(rates.eps)),
        root(Real(1.0 / std::sqrt(rates.correction2))) {}

  inline Real operator()(Real value, Real gradient, [[maybe_unused]] Real* first,
                         [[maybe_unused]] Real* second) const {
#if OPTIMIZER == 2
    *first += rest1 * (gradient - *first);
    *second = beta2 * *second + rest2 * gradient * gradient;
    return value - lr * *first / (std::sqrt(*second) * root + eps);
#elif OPTIMIZER == 1
    *first = beta1 * *first + gradient;
    return value - lr * *first;
#else
    return value - lr * gradient;
#endif
  }

  Real lr, beta1, beta2, rest1, rest2, eps, root;
};

// What the network runs on next.
inline void fill_leaf(const Step* s, int64_t base, int64_t size, [[maybe_unused]] Real* noise) {
  const Real* rho = s->rho + base;
  Real* leaf = s->leaf + base;
#if MOMENTS
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) leaf[j] = softplus(rho[j]);
#else
  const Real* mean = s->mean + base;
  normals(s->key0, s->key1, s->next, base / kBlock, noise);
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) leaf[j] = mean[j] + softplus(rho[j]) * noise[j];
#endif
  if (s->kept)
    for (int64_t j = 0; j < size; ++j) leaf[j] = s->kept[base + j] ? leaf[j] : Real(0);
}

}  // namespace

extern "C" void refresh(const Step* s) {
#pragma omp parallel for schedule(static) num_threads(s->num_threads)
  for (int64_t start = 0; start < s->num_weights; start += kChunk) {
    Real noise[kBlock];
    const int64_t stop = std::min(start + kChunk, s->num_weights);
    for (int64_t base = start; base < stop; base += kBlock)
      fill_leaf(s, base, std::min(kBlock, stop - base), noise);
  }
}

extern "C" void update(Step* s) {
  const Mover move_mean(s->of_mean), move_rho(s->of_rho);
  const Real kl_factor = Real(s->kl_factor);
  [[maybe_unused]] const Real prior[3] = {Real(s->prior[0]), Real(s->prior[1]), Real(s->prior[2])};
  double total = 0.0;
#pragma omp parallel for schedule(static) num_threads(s->num_threads) reduction(+ : total)
  for (int64_t start = 0; start < s->num_weights; start += kChunk) {
    Real noise[kBlock], grad_mean[kBlock], grad_std[kBlock];
    Real centre[kBlock] = {}, strength[kBlock];
    std::fill(strength, strength + kBlock, kl_factor);
    Parts in_mean(s->starts, s->num_parameters, s->in_mean, start);
#if MOMENTS
    Parts in_std(s->starts, s->num_parameters, s->in_std, start);
#endif
    const int64_t stop = std::min(start + kChunk, s->num_weights);
    for (int64_t base = start; base < stop; base += kBlock) {
      const int64_t size = std::min(kBlock, stop - base);
      in_mean.copy(base, size, grad_mean);
#if MOMENTS
      in_std.copy(base, size, grad_std);
#endif
#if MOMENTS && !EXACT
      normals(s->key0, s->key1, s->step, base / kBlock, noise);
#endif
      if (s->prior_mean) std::copy_n(s->prior_mean + base, size, centre);
      if (s->kept)
        for (int64_t j = 0; j < size; ++j) {
          const bool kept = s->kept[base + j];
          strength[j] = kept ? kl_factor : Real(0);
          grad_mean[j] = kept ? grad_mean[j] : Real(0);
        }
      Real *mean = s->mean + base, *rho = s->rho + base;
      [[maybe_unused]] const Real* leaf = s->leaf + base;
      Real *mean_first = s->mean_first + base, *rho_first = s->rho_first + base;
      Real *mean_second = s->mean_second + base, *rho_second = s->rho_second + base;
      Real sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < size; ++j) {
        const Spread q = spread_of(rho[j]);
        const Real centred = mean[j] - centre[j];
#if !MOMENTS
        [[maybe_unused]] const Real deviation = leaf[j] - mean[j];
        const Real of_nll = grad_mean[j] * deviation;
#else
        [[maybe_unused]] const Real deviation = q.std * noise[j];
        const Real of_nll = grad_std[j] * q.std;
#endif
        Real kl_mean, kl_log_std;
#if PRIOR == 0 && EXACT
        kl_mean = centred * prior[0];
        kl_log_std = q.std * q.std * prior[0];
#elif PRIOR == 1 && EXACT
        const Real positive = std::max(q.std, std::numeric_limits<Real>::min());
        const Real bound = Real(50) * positive;
        const Real z = std::min(std::max(centred, -bound), bound) / positive;
        kl_mean = prior[0] * error_function(z * Real(0.7071067811865476));
        kl_log_std = prior[0] * q.std * Real(0.7978845608028654) * exp_negative(Real(-0.5) * z * z);
#else
        const Real weight = centred + deviation;
#if PRIOR == 0
        kl_mean = weight * prior[0];
#elif PRIOR == 1
        kl_mean = weight > 0 ? prior[0] : (weight < 0 ? -prior[0] : Real(0));
#else
        // The odds of the narrow component; weighed by what it adds, so that nothing cancels.
        const Real odds = weight * weight * Real(0.5) * (prior[0] - prior[1]) - prior[2];
        const Real e = exp_negative(-std::fabs(odds));
        const Real narrow = (odds > 0 ? Real(1) : e) / (Real(1) + e);
        kl_mean = weight * (prior[0] + (prior[1] - prior[0]) * narrow);
#endif
        kl_log_std = kl_mean * deviation;
#endif
        const Real in_log_std = of_nll + (kl_log_std - Real(1)) * strength[j];
        mean[j] = move_mean(mean[j], grad_mean[j] + kl_mean * strength[j], mean_first + j,
                            mean_second + j);
        rho[j] = move_rho(rho[j], in_log_std * q.ratio, rho_first + j, rho_second + j);
        sum += in_log_std;
      }
      total += sum;
      fill_leaf(s, base, size, noise);
    }
  }
  s->in_log_std = total;
}
