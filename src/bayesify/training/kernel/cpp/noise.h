// Standard normals by a counter-based generator: the numbers of threefry.py.

#pragma once

#include <algorithm>

#include "elementary.h"

namespace {

constexpr int64_t kBlock = 256;  // numbers of one block: cosines, then sines
constexpr int64_t kHalf = kBlock / 2;

inline uint32_t rotated(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

constexpr int kLanes = 32;  // of the generator; kHalf is a multiple

// Threefry-2x32 of 20 rounds (Salmon et al. 2011), of kLanes counters.
// Each round goes over all lanes, because the rounds of a lane wait for each other: a CPU
// does not look far enough ahead to fill that time with the lanes that follow.
inline void threefry(uint32_t k0, uint32_t k1, uint32_t* counter0, uint32_t* counter1) {
  const uint32_t keys[3] = {k0, k1, k0 ^ k1 ^ 0x1BD11BDAu};
  constexpr int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  uint32_t x0[kLanes], x1[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    x0[i] = counter0[i] + keys[0];
    x1[i] = counter1[i] + keys[1];
  }
#pragma GCC unroll 20
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      x0[i] += x1[i];
      x1[i] = rotated(x1[i], rotations[round % 8]) ^ x0[i];
    }
    if (round % 4 == 3) {
      const int turn = round / 4 + 1;
      for (int i = 0; i < kLanes; ++i) {
        x0[i] += keys[turn % 3];
        x1[i] += keys[(turn + 1) % 3] + static_cast<uint32_t>(turn);
      }
    }
  }
  std::copy_n(x0, kLanes, counter0);
  std::copy_n(x1, kLanes, counter1);
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

// The random words of one block, kHalf of each kind.
inline void words(uint32_t k0, uint32_t k1, uint32_t step, int64_t block, uint32_t* lengths,
                  uint32_t* turns) {
  const uint32_t first = static_cast<uint32_t>(block * kHalf);
  for (int64_t j = 0; j < kHalf; ++j) {
    lengths[j] = first + static_cast<uint32_t>(j);
    turns[j] = step;
  }
  for (int64_t j = 0; j < kHalf; j += kLanes) threefry(k0, k1, lengths + j, turns + j);
}

// One block of standard normals (Box and Muller 1958).
inline void normals(uint32_t k0, uint32_t k1, uint32_t step, int64_t block, Real* out) {
  uint32_t lengths[kHalf], turns[kHalf];
  words(k0, k1, step, block, lengths, turns);
  Real radius[kHalf];
#pragma omp simd
  for (int64_t j = 0; j < kHalf; ++j) {
    const Real u =
        static_cast<Real>(static_cast<int32_t>(lengths[j] >> 1)) * Real(4.656612873077393e-10) +
        Real(2.3283064365386963e-10);
    radius[j] = std::sqrt(Real(-2) * log_positive(u));
  }
#pragma omp simd
  for (int64_t j = 0; j < kHalf; ++j) {
    Real cosine, sine;
    cos_sin(static_cast<int32_t>(turns[j]), cosine, sine);
    out[j] = radius[j] * cosine;
    out[kHalf + j] = radius[j] * sine;
  }
}

}  // namespace
