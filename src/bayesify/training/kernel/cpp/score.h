// -d log p(w) / dw at a weight less the prior's mean; see step.cpp for the macros.

#pragma once

#include "elementary.h"

// Expressions where they can be: of a function the compiler makes other roundings.
#if PRIOR == 0
#define SCORE(weight, first, second, third) ((weight) * (first))
#elif PRIOR == 1
#define SCORE(weight, first, second, third) \
  ((weight) > 0 ? (first) : ((weight) < 0 ? -(first) : Real(0)))
#else
#define SCORE(weight, first, second, third) mixture_score(weight, first, second, third)

namespace {

inline Real mixture_score(Real weight, Real slab, Real spike, Real log_ratio) {
  // The odds of the narrow component; weighed by what it adds, so that nothing cancels.
  const Real odds = weight * weight * Real(0.5) * (slab - spike) - log_ratio;
  const Real e = exp_negative(-std::fabs(odds));
  const Real narrow = (odds > 0 ? Real(1) : e) / (Real(1) + e);
  return weight * (slab + (spike - slab) * narrow);
}

}  // namespace

#endif
