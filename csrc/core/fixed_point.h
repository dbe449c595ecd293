// Draws by inverse CDF in integers. Sums of uint64 are associative: any tiling, thread count or
// order gives the same bits, and a draw always lands on positive weight.
#pragma once

#include <cmath>

#include "params.h"
#include "platform.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// Weights of an unnormalised law, each in [0, 1]. A row's sum stays below 2^64.
constexpr double kLawUnit = 0x1p40;
static_assert(kMaxVocab * kLawUnit < 0x1p64, "a sum that wraps around is a wrong token");

// Over the coefficient t, the unit of a residual [t p - d q]+, which sums to S <= t: its integers
// sum to 2^62 S / t. Nobody has to know S. Where it is small they have fewer bits, and such a
// residual is drawn from as seldom: S / t is about the probability that a draw comes to it.
constexpr double kResidualUnit = 0x1p62;

SPECDEC_HD uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
#endif
}

// The threshold t of a draw: its token is the lowest index whose inclusive prefix sum exceeds t.
SPECDEC_HD uint64_t draw_threshold(double u, uint64_t total) {
  constexpr uint64_t kLargest = (uint64_t{1} << 53) - 1;
  uint64_t u53 = 0;
  if (u > 0.0) {  // false for NaN
    u53 = u < 1.0 ? static_cast<uint64_t>(u * 0x1p53) : kLargest;
  }
  return multiply_high(u53 << 11, total);
}

// A uniform outside [0, 1), which the caller reports: clamped, NaN to 0.
SPECDEC_HD double clamp_uniform(double u, bool* out_of_range) {
  if (u >= 0.0 && u < 1.0) return u;
  *out_of_range = true;
  return u >= 1.0 ? 1.0 - 0x1p-53 : 0.0;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
