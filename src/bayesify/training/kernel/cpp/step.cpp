// The variational step in one pass over the weights, for CPUs.
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
//   OPTIMIZER  0 SGD, 1 SGD with momentum, 2 Adam, 3 none: the gradients are written instead,
//              4 IVON (PRIOR 0 and EXACT 1 only)
//   LEAF       0 where the network runs on sampled weights, 1 on means and standard deviations,
//              2 on means and variances
//   SEVERAL    1 where the gradient is averaged over several weight samples (LEAF 0 only)
//   BLOCKS     1 where the prior's numbers differ between blocks of weights

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "elementary.h"
#include "kl.h"
#include "noise.h"
#include "parts.h"
#include "score.h"

namespace {

constexpr int64_t kBorders = 3;
constexpr int64_t kChunk = 32 * kBlock;  // weights that a thread takes at a time

}  // namespace

extern "C" {

struct Rates {
  double lr, beta1, beta2, eps, correction1, correction2, ess;
};

// Mirrored in native.py.
struct Step {
  int64_t num_weights, num_parameters, num_threads;
  const int64_t* starts;       // of each parameter in the flat vector, and its end
  const Real* const* in_mean;  // gradients of each parameter, in its weights or its means
  const Real* const* in_spread;  // and in its standard deviations or variances
  int64_t num_priors;
  const int64_t* prior_starts;  // of each block of weights with a prior of its own, and the end
  const double* priors;         // three numbers of each
  Real *mean, *rho;
  Real* leaf;  // see LEAF
  Real* std;   // of the leaf, kept for the update; or null where it is computed again
  // First: the gradients if OPTIMIZER 3; momentum and h if OPTIMIZER 4.
  Real *mean_first, *mean_second, *rho_first, *rho_second;
  const Real* prior_mean;  // or null for zeros
  const uint8_t* mask;     // or null where nothing was pruned
  Real *sum_mean, *sum_log_std;  // over the samples before this one; read and written if SEVERAL
  uint32_t key0, key1, step, next;
  int64_t is_far;  // whether the vectors are too long to stay in a cache
  int64_t first;  // whether no sample came before
  int64_t fills;  // whether the leaf gets another sample
  double kl_factor;
  double part;  // of the KL's estimate that one sample bears: 1 / S
  double sign;  // -1 for the opposite of the key's noise
  Rates of_mean, of_rho;
  int64_t with_residual;  // whether to fill the last two
  double borders[kBorders];  // between groups of weights by signal-to-noise ratio |mean| / std
  double in_log_std[kBorders + 1];  // out: the sum of the loss's derivatives in log std, by group
  int64_t counts[kBorders + 1];     // out: the weights of each group
  // Out, if OPTIMIZER 3: checksums of leaf and mean and of mean and rho, by which edits are found.
  uint64_t leaf_sum, posterior_sum;
};
}

namespace {

#if OPTIMIZER == 4
// ivon_updated of formulas.py: mean and rho together.
struct Newton {
  explicit Newton(const Rates& rates)
      : lr(Real(rates.lr)),
        beta1(Real(rates.beta1)),
        rest1(Real(1.0 - rates.beta1)),
        part(Real(1.0 / rates.ess)),
        rate(Real(rates.ess * (1.0 - rates.beta2))),
        debias(Real(1.0 / rates.correction1)),
        unit_std(Real(1.0 / std::sqrt(rates.ess))) {}

  // Returns the new standard deviation.
  inline Real operator()(Real* mean, Real* momentum, Real* h, Real in_mean, Real in_log_std,
                         Real centred, Real prior_precision) const {
    const Real delta = prior_precision * part, excess = in_log_std * rate;
    *momentum = beta1 * *momentum + rest1 * (in_mean - delta * centred);
    *h += (*h + delta) * (excess + Real(0.5) * excess * excess);
    const Real root = inverse_root(*h + delta);
    *mean -= lr * (*momentum * debias + delta * centred) * (root * root);
    return unit_std * root;
  }

  Real lr, beta1, rest1, part, rate, debias, unit_std;
};
#endif

#if OPTIMIZER < 3
// An optimiser's constants, in the precision of the vectors.
struct Constants {
  explicit Constants(const Rates& rates)
      : lr(Real(rates.lr / rates.correction1)),
        beta1(Real(rates.beta1)),
        beta2(Real(rates.beta2)),
        rest1(Real(1.0 - rates.beta1)),
        rest2(Real(1.0 - rates.beta2)),
        eps(Real(rates.eps)),
        root(Real(1.0 / std::sqrt(rates.correction2))) {}

  Real lr, beta1, beta2, rest1, rest2, eps, root;
};

// A block of numbers that the optimiser updates, with their moments, if it has any.
struct Variable {
  Variable(Real* values, Real* firsts, Real* seconds, int64_t base)
      : value(values + base),
        first(firsts ? firsts + base : nullptr),
        second(seconds ? seconds + base : nullptr) {}

  Real *value, *first, *second;
};

// The optimiser, on mean and rho together.
struct Optimizer {
  Optimizer(const Rates& mean_rates, const Rates& rho_rates)
      : of_mean(mean_rates), of_rho(rho_rates) {}

  // Update number j of each by its gradient.
  inline void operator()(const Variable& mean, const Variable& rho, int64_t j, Real in_mean,
                         Real in_rho) const {
#if OPTIMIZER == 2
    const Real mean_first = mean.first[j] + of_mean.rest1 * (in_mean - mean.first[j]);
    const Real rho_first = rho.first[j] + of_rho.rest1 * (in_rho - rho.first[j]);
    const Real mean_second =
        of_mean.beta2 * mean.second[j] + of_mean.rest2 * in_mean * in_mean;
    const Real rho_second = of_rho.beta2 * rho.second[j] + of_rho.rest2 * in_rho * in_rho;
    // One division for both, and one of the roots by arithmetic: a CPU has one unit for divisions
    // and roots, and multiplies meanwhile. In float it needs an eps of 1e-12 or more.
    constexpr Real kMost = std::numeric_limits<Real>::max();
    const bool moves_mean = mean_second <= kMost, moves_rho = rho_second <= kMost;
    const Real mean_root =
        root_by_arithmetic(moves_mean ? mean_second : kMost) * of_mean.root + of_mean.eps;
    const Real rho_root = std::sqrt(moves_rho ? rho_second : kMost) * of_rho.root + of_rho.eps;
    const Real inverse = Real(1) / (mean_root * rho_root);
    // A square that overflows stops its number, as an infinite denominator does: its first moment is
    // finite and times 0. That of a gradient that is NaN or infinite gives NaN.
    const Real mean_scale = moves_mean ? rho_root * inverse : Real(0);
    const Real rho_scale = moves_rho ? mean_root * inverse : Real(0);
    const Real new_mean = mean.value[j] - of_mean.lr * mean_first * mean_scale;
    const Real new_rho = rho.value[j] - of_rho.lr * rho_first * rho_scale;
    mean.second[j] = mean_second;
    rho.second[j] = rho_second;
#elif OPTIMIZER == 1
    const Real mean_first = of_mean.beta1 * mean.first[j] + in_mean;
    const Real rho_first = of_rho.beta1 * rho.first[j] + in_rho;
    const Real new_mean = mean.value[j] - of_mean.lr * mean_first;
    const Real new_rho = rho.value[j] - of_rho.lr * rho_first;
#else
    const Real new_mean = mean.value[j] - of_mean.lr * in_mean;
    const Real new_rho = rho.value[j] - of_rho.lr * in_rho;
#endif
#if OPTIMIZER
    mean.first[j] = mean_first;
    rho.first[j] = rho_first;
#endif
    mean.value[j] = new_mean;
    rho.value[j] = new_rho;
  }

  Constants of_mean, of_rho;
};
#endif

// The group of each weight by its signal-to-noise ratio.
inline void find_groups(const Step* s, int64_t base, int64_t size, uint8_t* group) {
  for (int64_t j = 0; j < size; ++j) {
    const Real signal = std::fabs(s->mean[base + j]), std = softplus(s->rho[base + j]);
    group[j] = 0;
    for (int64_t k = 0; k < kBorders; ++k) group[j] += signal > Real(s->borders[k]) * std;
  }
}

#if OPTIMIZER == 3
inline uint32_t word_of(const Real* values, int32_t index) {
  uint32_t word;
  std::memcpy(&word, reinterpret_cast<const char*>(values) + sizeof word * index, sizeof word);
  return word;
}

// The checksum of a part of two vectors; those of the parts add up, in any order. The place of a
// number enters, so that an exchange of two counts, and the term is a square, because differences
// such as those of a change of all signs cancel in a linear sum.
inline uint64_t checksum(const Real* one, const Real* two, int64_t from, int64_t size) {
  constexpr int32_t kWords = sizeof(Real) / sizeof(uint32_t);
  const uint32_t first = static_cast<uint32_t>(kWords * from);
  const int32_t count = kWords * static_cast<int32_t>(size);
  uint32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int32_t j = 0; j < count; ++j) {
    uint32_t word = word_of(one + from, j) ^ rotated(word_of(two + from, j), 16);
    word += first + static_cast<uint32_t>(j);
    word ^= word >> 20;  // sign and exponent change low bits too
    sum += word * word;
  }
  return sum;
}
#endif

// The standard deviations, as the leaf was filled by them; 0 of pruned weights, unless LEAF is 0.
inline void read_std(const Step* s, int64_t base, int64_t size, Real* std) {
#if LEAF == 2
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) std[j] = root_by_arithmetic(s->leaf[base + j]);
#elif LEAF
  std::copy_n(s->leaf + base, size, std);
#else
  if (s->std) {
    std::copy_n(s->std + base, size, std);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) std[j] = softplus(s->rho[base + j]);
  }
#endif
}

// A function of the standard deviations, by the formula for those below 1/2 where all are, as in a
// trained network.
template <Real (*kOfSmall)(Real), Real (*kOfAny)(Real)>
inline void map_std(const Real* std, int64_t size, Real* out) {
  int32_t large = 0;
#pragma omp simd reduction(+ : large)
  for (int64_t j = 0; j < size; ++j) large += std[j] >= Real(0.5);
  if (large) {
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) out[j] = kOfAny(std[j]);
  } else {
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) out[j] = kOfSmall(std[j]);
  }
}

// What the network runs on next.
inline void fill_leaf(const Step* s, int64_t base, int64_t size, [[maybe_unused]] Real* noise) {
  const Real* rho = s->rho + base;
  Real* leaf = s->leaf + base;
#if LEAF
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) {
    const Real std = softplus(rho[j]);
    leaf[j] = LEAF == 2 ? std * std : std;
  }
#else
  const Real* mean = s->mean + base;
  normals(s->key0, s->key1, s->next, base / kBlock, noise);
#if SEVERAL
  const Real sign = Real(s->sign);
  for (int64_t j = 0; j < size; ++j) noise[j] *= sign;
#endif
  Real unkept[kBlock];
  Real* std = s->std ? s->std + base : unkept;
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) {
    std[j] = softplus(rho[j]);
    leaf[j] = mean[j] + std[j] * noise[j];
  }
#endif
  if (s->mask)
    for (int64_t j = 0; j < size; ++j) leaf[j] = s->mask[base + j] ? leaf[j] : Real(0);
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

#if OPTIMIZER == 3 && !LEAF
namespace {

// The sum of value - log(mantissa 2^exponent), with mantissas below 4.
inline double sum_of(const Real* value, const Real* mantissa, const int32_t* exponent,
                     int64_t size) {
  constexpr int64_t kFew = 32;  // whose product does not overflow
  double product = 1.0;
  int32_t twos = 0;
  Real sum = 0;
  for (int64_t from = 0; from < size; from += kFew) {
    const int64_t to = std::min(from + kFew, size);
    Real part = 1;
#pragma omp simd reduction(+ : sum, twos) reduction(* : part)
    for (int64_t j = from; j < to; ++j) {
      sum += value[j];
      twos += exponent[j];
      part *= mantissa[j];
    }
    product *= static_cast<double>(part);
  }
  return static_cast<double>(sum) - std::log(product) - twos * 0.6931471805599453;
}

}  // namespace

// Fill the leaf, and return the KL of its weights in nats: in closed form if EXACT, else estimated
// at these weights.
extern "C" double sample(Step* s) {
  const int64_t chunks = (s->num_weights + kChunk - 1) / kChunk;
  std::vector<double> parts(chunks);  // summed in order, whatever the number of threads
  uint64_t leaf_sum = 0, posterior_sum = 0;
#if !BLOCKS
  const Real numbers[3] = {Real(s->priors[0]), Real(s->priors[1]), Real(s->priors[2])};
#endif
#pragma omp parallel for schedule(static) num_threads(s->num_threads) \
    reduction(+ : leaf_sum, posterior_sum)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    Real noise[kBlock], std[kBlock], value[kBlock], mantissa[kBlock], centre[kBlock] = {};
    int32_t exponent[kBlock];
    const int64_t start = chunk * kChunk, stop = std::min(start + kChunk, s->num_weights);
#if BLOCKS
    Real numbers[3][kBlock];
    Numbers priors(s->prior_starts, s->num_priors, s->priors, start);
#endif
    for (int64_t base = start; base < stop; base += kBlock) {
      const int64_t size = std::min(kBlock, stop - base);
#if BLOCKS
      priors.copy(base, size, numbers);
#endif
      if (s->prior_mean) std::copy_n(s->prior_mean + base, size, centre);
      const Real *mean = s->mean + base, *rho = s->rho + base;
      Real* leaf = s->leaf + base;
      const Real sign = Real(s->sign);
      normals(s->key0, s->key1, s->next, base / kBlock, noise);
      // Several short loops, as in update_all.
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) {
        const LogSpread q = log_spread_of(rho[j]);
        const Factor factor = factor_of(q.number);
        std[j] = q.std;
        value[j] = -q.shift;
        mantissa[j] = factor.mantissa;
        exponent[j] = factor.exponent;
      }
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) leaf[j] = mean[j] + std[j] * noise[j] * sign;
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) {
#if EXACT
        const Cost cost = kl_of(mean[j] - centre[j], std[j], NUMBER(0));
        value[j] += cost.value;
#else
        const Cost cost = minus_log_prior(leaf[j] - centre[j], NUMBER(0), NUMBER(1), NUMBER(2));
        value[j] += cost.value - Real(0.5) * noise[j] * noise[j];
#endif
        mantissa[j] *= cost.number;
      }
      if (s->mask)
        for (int64_t j = 0; j < size; ++j)
          if (!s->mask[base + j]) {
            leaf[j] = value[j] = Real(0);
            mantissa[j] = Real(1);
            exponent[j] = 0;
          }
      parts[chunk] += sum_of(value, mantissa, exponent, size);
      leaf_sum += checksum(s->leaf, s->mean, base, size);
      posterior_sum += checksum(s->mean, s->rho, base, size);
    }
  }
  s->leaf_sum = leaf_sum;
  s->posterior_sum = posterior_sum;
  double total = 0.0;
  for (const double part : parts) total += part;
  for (int64_t block = 0; block < s->num_priors; ++block) {
    const int64_t from = s->prior_starts[block], to = s->prior_starts[block + 1];
    const int64_t count = s->mask ? std::count(s->mask + from, s->mask + to, 1) : to - from;
    total += constant_of(s->priors + 3 * block) * static_cast<double>(count);
  }
  return total;
}
#endif

// Random signs, -1 or 1: the first bits of the words that normals are made of.
extern "C" void draw_signs(uint32_t key0, uint32_t key1, uint32_t step, int64_t size,
                           int64_t threads, Real* out) {
#pragma omp parallel for schedule(static) num_threads(threads) if (size > 16 * kBlock)
  for (int64_t base = 0; base < size; base += kBlock) {
    uint32_t drawn[kBlock];
    words(key0, key1, step, base / kBlock, drawn, drawn + kHalf);
    const int64_t count = std::min(kBlock, size - base);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) out[base + j] = drawn[j] >> 31 ? Real(-1) : Real(1);
  }
}

// Standard normals for other uses than of a weight.
extern "C" void draw(uint32_t key0, uint32_t key1, uint32_t step, int64_t size, int64_t threads,
                     Real* out) {
#pragma omp parallel for schedule(static) num_threads(threads) if (size > 16 * kBlock)
  for (int64_t base = 0; base < size; base += kBlock) {
    Real noise[kBlock];
    normals(key0, key1, step, base / kBlock, noise);
    std::copy_n(noise, std::min(kBlock, size - base), out + base);
  }
}

#if SEVERAL
// Add to the sums what one weight sample says, and fill the leaf with the next.
extern "C" void accumulate(const Step* s) {
  [[maybe_unused]] const Real strength = Real(s->kl_factor) * Real(s->part);
#if !BLOCKS
  [[maybe_unused]] const Real numbers[3] = {Real(s->priors[0]), Real(s->priors[1]),
                                            Real(s->priors[2])};
#endif
#pragma omp parallel for schedule(static) num_threads(s->num_threads)
  for (int64_t start = 0; start < s->num_weights; start += kChunk) {
    Real noise[kBlock], gradient[kBlock], centre[kBlock] = {};
    Parts in_mean(s->starts, s->num_parameters, s->in_mean, start);
#if BLOCKS
    Real numbers[3][kBlock];
    Numbers priors(s->prior_starts, s->num_priors, s->priors, start);
#endif
    const int64_t stop = std::min(start + kChunk, s->num_weights);
    for (int64_t base = start; base < stop; base += kBlock) {
      const int64_t size = std::min(kBlock, stop - base);
      in_mean.copy(base, size, gradient);
#if BLOCKS
      priors.copy(base, size, numbers);
#endif
      if (s->prior_mean) std::copy_n(s->prior_mean + base, size, centre);
      const Real *mean = s->mean + base, *leaf = s->leaf + base;
      Real *sum_mean = s->sum_mean + base, *sum_log_std = s->sum_log_std + base;
      if (s->first) {
        std::fill_n(sum_mean, size, Real(0));
        std::fill_n(sum_log_std, size, Real(0));
      }
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) {
        const Real deviation = leaf[j] - mean[j];
        Real total = gradient[j];
#if !EXACT
        const Real weight = mean[j] - centre[j] + deviation;
        total += strength * SCORE(weight, NUMBER(0), NUMBER(1), NUMBER(2));
#endif
        sum_mean[j] += total;
        sum_log_std[j] += total * deviation;
      }
      if (s->mask)
        for (int64_t j = 0; j < size; ++j)
          if (!s->mask[base + j]) sum_mean[j] = sum_log_std[j] = Real(0);
      if (s->fills) fill_leaf(s, base, size, noise);
    }
  }
}
#endif

namespace {

// Fetch a block into the cache ahead of its use, if the vectors are too long to be there: a CPU
// fetches by itself within a page of memory only. Done for few vectors at a time, so that the loops
// in between do not wait. A macro, because GCC drops calls of functions that only fetch; by
// integers, because the address may be past the end, or null.
#define FETCH(from)                                                                      \
  for (uintptr_t at = reinterpret_cast<uintptr_t>(from), j = 0; s->is_far && j < kBlock; \
       j += 64 / sizeof(Real))                                                           \
  __builtin_prefetch(reinterpret_cast<const void*>(at + sizeof(Real) * j), 0, 2)

// `kResidual` is whether to sum the loss's derivatives in log std, which few steps ask for.
template <bool kResidual>
void update_all(Step* s) {
  const Real kl_factor = Real(s->kl_factor);
  [[maybe_unused]] const Real part = Real(s->part);
#if !BLOCKS
  [[maybe_unused]] const Real numbers[3] = {Real(s->priors[0]), Real(s->priors[1]),
                                            Real(s->priors[2])};
#endif
  double sums[kBorders + 1] = {};
  int64_t counts[kBorders + 1] = {};
  uint64_t leaf_sum = 0, posterior_sum = 0;
#pragma omp parallel for schedule(static) num_threads(s->num_threads) \
    reduction(+ : sums, counts, leaf_sum, posterior_sum)
  for (int64_t start = 0; start < s->num_weights; start += kChunk) {
#if OPTIMIZER == 4
    const Newton optimize(s->of_mean);
#elif OPTIMIZER < 3
    const Optimizer optimize(s->of_mean, s->of_rho);
#endif
    Real grad_mean[kBlock];
    [[maybe_unused]] Real noise[kBlock] = {}, grad_spread[kBlock];
    Real centre[kBlock] = {}, strength[kBlock];
    [[maybe_unused]] Real log_std[kBlock];
    [[maybe_unused]] uint8_t group[kBlock];
    std::fill(strength, strength + kBlock, kl_factor);
    Parts in_mean(s->starts, s->num_parameters, s->in_mean, start);
#if BLOCKS
    Real numbers[3][kBlock];
    Numbers priors(s->prior_starts, s->num_priors, s->priors, start);
#endif
#if LEAF
    Parts in_spread(s->starts, s->num_parameters, s->in_spread, start);
#endif
    const int64_t stop = std::min(start + kChunk, s->num_weights);
    for (int64_t base = start; base < stop; base += kBlock) {
      const int64_t size = std::min(kBlock, stop - base);
      in_mean.copy(base, size, grad_mean);
#if BLOCKS
      priors.copy(base, size, numbers);
#endif
#if LEAF
      in_spread.copy(base, size, grad_spread);
#endif
#if LEAF && !EXACT
      normals(s->key0, s->key1, s->step, base / kBlock, noise);
#endif
      if (s->prior_mean) std::copy_n(s->prior_mean + base, size, centre);
      if (s->mask)
        for (int64_t j = 0; j < size; ++j) {
          const bool keep = s->mask[base + j];
          strength[j] = keep ? kl_factor : Real(0);
          grad_mean[j] = keep ? grad_mean[j] : Real(0);
          // As in centred_on of formulas.py.
          if (s->prior_mean && !keep) centre[j] = s->mean[base + j];
        }
#if OPTIMIZER == 3
      const Real *mean = s->mean + base, *rho = s->rho + base;
#else
      Real *mean = s->mean + base, *rho = s->rho + base;
#endif
      [[maybe_unused]] const Real* leaf = s->leaf + base;
#if SEVERAL
      const Real *sum_mean = s->sum_mean + base, *sum_log_std = s->sum_log_std + base;
#endif
#if OPTIMIZER < 3
      const Variable mean_block(s->mean, s->mean_first, s->mean_second, base);
      const Variable rho_block(s->rho, s->rho_first, s->rho_second, base);
#else
      Real *mean_first = s->mean_first + base, *rho_first = s->rho_first + base;
#endif
      if constexpr (kResidual) find_groups(s, base, size, group);
      const int64_t then = base + size < s->num_weights ? kBlock : 0;  // to the next block
      FETCH(mean + then);
      FETCH(rho + then);
      // Several short loops: the chain of one long turn would be waited for.
      Real std[kBlock];
      [[maybe_unused]] Real ratio[kBlock];
      read_std(s, base, size, std);
#if OPTIMIZER != 4
      map_std<softplus_ratio_of_small, softplus_ratio>(std, size, ratio);
#endif
      FETCH(s->leaf + base + then);
      FETCH(in_mean.next());
#if PRIOR || !EXACT
      Real kl_mean[kBlock], kl_log_std[kBlock];
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) {
        const Real centred = mean[j] - centre[j];
#if EXACT
        const Real positive = std::max(std[j], std::numeric_limits<Real>::min());
        const Real bound = Real(50) * positive;
        const Real z = std::min(std::max(centred, -bound), bound) / positive;
        kl_mean[j] = NUMBER(0) * error_function(z * Real(0.7071067811865476));
        kl_log_std[j] =
            NUMBER(0) * std[j] * Real(0.7978845608028654) * exp_negative(Real(-0.5) * z * z);
#else
#if LEAF
        const Real deviation = std[j] * noise[j];
#else
        const Real deviation = leaf[j] - mean[j];
#endif
        const Real weight = centred + deviation;
        const Real score = SCORE(weight, NUMBER(0), NUMBER(1), NUMBER(2));
#if SEVERAL
        kl_mean[j] = score * part;
#else
        kl_mean[j] = score;
#endif
        kl_log_std[j] = kl_mean[j] * deviation;
#endif
      }
#endif
#if LEAF
      FETCH(in_spread.next());
#endif
#if OPTIMIZER
      FETCH(s->mean_first + base + then);
      FETCH(s->rho_first + base + then);
#endif
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) {
#if PRIOR || !EXACT
        const Real of_mean = kl_mean[j], of_log_std = kl_log_std[j];
#else
        const Real of_mean = (mean[j] - centre[j]) * NUMBER(0);
        const Real of_log_std = std[j] * std[j] * NUMBER(0);
#endif
#if !LEAF
        const Real of_nll = grad_mean[j] * (leaf[j] - mean[j]);
#else
        const Real of_nll = grad_spread[j] * std[j] * (LEAF == 2 ? Real(2) * std[j] : Real(1));
#endif
        Real total_mean = grad_mean[j] + of_mean * strength[j];
        Real in_log_std = of_nll + (of_log_std - Real(1)) * strength[j];
#if SEVERAL
        total_mean += sum_mean[j];
        in_log_std += sum_log_std[j];
#endif
#if OPTIMIZER == 3
        mean_first[j] = total_mean;
        rho_first[j] = in_log_std * ratio[j];
#elif OPTIMIZER == 4
        std[j] = optimize(mean + j, mean_first + j, rho_first + j, total_mean, in_log_std,
                          mean[j] - centre[j], NUMBER(0));
#else
        optimize(mean_block, rho_block, j, total_mean, in_log_std * ratio[j]);
#endif
        if constexpr (kResidual) log_std[j] = in_log_std;
      }
#if OPTIMIZER == 4
      map_std<inverse_softplus_of_small, inverse_softplus>(std, size, rho);
#endif
      if constexpr (kResidual)
        for (int64_t j = 0; j < size; ++j)
          if (!s->mask || s->mask[base + j]) {
            sums[group[j]] += log_std[j];
            ++counts[group[j]];
          }
#if OPTIMIZER == 3
      leaf_sum += checksum(s->leaf, s->mean, base, size);
      posterior_sum += checksum(s->mean, s->rho, base, size);
#else
#if OPTIMIZER == 2
      FETCH(s->mean_second + base + then);
      FETCH(s->rho_second + base + then);
#endif
      fill_leaf(s, base, size, noise);
#endif
    }
  }
  std::copy_n(sums, kBorders + 1, s->in_log_std);
  std::copy_n(counts, kBorders + 1, s->counts);
  s->leaf_sum = leaf_sum;
  s->posterior_sum = posterior_sum;
}

}  // namespace

extern "C" void update(Step* s) {
  if (s->with_residual)
    update_all<true>(s);
  else
    update_all<false>(s);
}

#if OPTIMIZER == 4
// IVON by the loss's gradients in mean and rho, of all weights, in a loop of one's own. The first
// pointers of in_mean and in_spread are those of the two vectors.
extern "C" void ivon_update(const Step* s) {
#if !BLOCKS
  const Real numbers[1] = {Real(s->priors[0])};
#endif
#pragma omp parallel for schedule(static) num_threads(s->num_threads)
  for (int64_t start = 0; start < s->num_weights; start += kChunk) {
    const Newton optimize(s->of_mean);
    Real std[kBlock], ratio[kBlock], centre[kBlock] = {};
#if BLOCKS
    Real numbers[3][kBlock];
    Numbers priors(s->prior_starts, s->num_priors, s->priors, start);
#endif
    const int64_t stop = std::min(start + kChunk, s->num_weights);
    for (int64_t base = start; base < stop; base += kBlock) {
      const int64_t size = std::min(kBlock, stop - base);
#if BLOCKS
      priors.copy(base, size, numbers);
#endif
      const Real *in_mean = s->in_mean[0] + base, *in_rho = s->in_spread[0] + base;
      Real *mean = s->mean + base, *rho = s->rho + base;
      Real *momentum = s->mean_first + base, *h = s->rho_first + base;
      // As in centred_on of formulas.py.
      if (s->prior_mean)
        for (int64_t j = 0; j < size; ++j)
          centre[j] = s->mask && !s->mask[base + j] ? mean[j] : s->prior_mean[base + j];
      const int64_t then = base + size < s->num_weights ? kBlock : 0;  // to the next block
      FETCH(rho + then);
      FETCH(in_rho + then);
#pragma omp simd
      for (int64_t j = 0; j < size; ++j) std[j] = softplus(rho[j]);
      map_std<softplus_ratio_of_small, softplus_ratio>(std, size, ratio);
      FETCH(mean + then);
      FETCH(in_mean + then);
      FETCH(momentum + then);
      FETCH(h + then);
#pragma omp simd
      for (int64_t j = 0; j < size; ++j)
        std[j] = optimize(mean + j, momentum + j, h + j, in_mean[j], in_rho[j] / ratio[j],
                          mean[j] - centre[j], NUMBER(0));
      map_std<inverse_softplus_of_small, inverse_softplus>(std, size, rho);
    }
  }
}
#endif
