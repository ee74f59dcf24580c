// Vectors that lie in parts; see step.cpp for the macros.

#pragma once

#include <algorithm>
#include <cstring>

#include "noise.h"

namespace {

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
    at_ = from + size;
  }

  // Where the numbers after the last ones are, unless a part ends there; null in a part that is.
  const Real* next() const {
    return parts_[part_] ? parts_[part_] + (at_ - starts_[part_]) : nullptr;
  }

 private:
  const int64_t* starts_;
  const Real* const* parts_;
  int64_t part_, at_ = 0;
};

#if BLOCKS
// The numbers of the prior of each weight.
class Numbers {
 public:
  Numbers(const int64_t* starts, int64_t count, const double* priors, int64_t at)
      : starts_(starts), priors_(priors) {
    block_ = std::upper_bound(starts, starts + count, at) - starts - 1;
  }

  // Those of the next weights, in order.
  void copy(int64_t from, int64_t size, Real (*out)[kBlock]) {
    for (int64_t at = from; at < from + size;) {
      while (starts_[block_ + 1] <= at) ++block_;
      const int64_t end = std::min(from + size, starts_[block_ + 1]);
      for (int64_t k = 0; k < 3; ++k)
        std::fill(out[k] + (at - from), out[k] + (end - from), Real(priors_[3 * block_ + k]));
      at = end;
    }
  }

 private:
  const int64_t* starts_;
  const double* priors_;
  int64_t block_;
};
#define NUMBER(k) numbers[k][j]
#else
#define NUMBER(k) numbers[k]
#endif

}  // namespace
