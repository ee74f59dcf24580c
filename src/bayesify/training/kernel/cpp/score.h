// -d log p(w) / dw at a weight less the prior's mean; see step.cpp for the macros.

#pragma once

#include "elementary.h"

// Expressions where they can be: of a function the compiler makes other roundings.
#if PRIOR == 0
#define SCORE(weight, prior) ((weight) * (prior)[0])
#elif PRIOR == 1
#define SCORE(weight, prior) \
  ((weight) > 0 ? (prior)[0] : ((weight) < 0 ? -(prior)[0] : Real(0)))
#else
#define SCORE(weight, prior) mixture_score(weight, prior)

namespace {

inline Real mixture_score(Real weight, const Real* prior) {
  // The odds of the narrow component; weighed by what it adds, so that nothing cancels.
  const Real odds = weight * weight * Real(0.5) * (prior[0] - prior[1]) - prior[2];
  const Real e = exp_negative(-std::fabs(odds));
  const Real narrow = (odds > 0 ? Real(1) : e) / (Real(1) + e);
  return weight * (prior[0] + (prior[1] - prior[0]) * narrow);
}

}  // namespace

#endif
