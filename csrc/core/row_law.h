// A logits row and five scalars are a probability law (docs/design.md, "Laws from logits"):
//     p(x) = exp(scale * (l_x - max)) / z   if l_x >= cutoff, else 0.
// How a cutoff is found without sorting: radix selection over order-preserving keys, with counts
// for top-k and fixed-point masses for top-p.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "platform.h"

namespace specdec {

// Below this temperature a law is the point mass at its arg max.
constexpr double kGreedyTemperature = 1e-6;

// Sampling parameters of one row after cleaning: every field is usable as it stands.
struct Filters {
  double temperature = 1.0;
  int64_t top_k = 0;   // 0: off
  double top_p = 1.0;  // 1: off
  double min_p = 0.0;  // 0: off

  // What came was out of range and has been replaced by "no filter, T = 1".
  bool out_of_range = false;
};

struct RowLaw {
  bool valid = false;       // false: NaN, +inf, all -inf, or no such row
  bool point_mass = false;  // T = 0: all mass at argmax
  bool linear = false;      // the row holds probabilities, not logits: p(x) = value / z
  float max = 0.0f;
  float cutoff = -INFINITY;
  double scale = 1.0;
  double z = 0.0;
  int64_t argmax = -1;  // found only where it is asked for
};

namespace SPECDEC_CPU_ISA {

SPECDEC_HD bool is_greedy(const Filters& f) { return f.temperature < kGreedyTemperature; }
SPECDEC_HD bool has_top_k(const Filters& f) { return f.top_k > 0; }
SPECDEC_HD bool has_top_p(const Filters& f) { return f.top_p < 1.0; }
SPECDEC_HD bool has_min_p(const Filters& f) { return f.min_p > 0.0; }
SPECDEC_HD bool has_filter(const Filters& f) {
  return has_top_k(f) || has_top_p(f) || has_min_p(f);
}

SPECDEC_HD Filters clean_filters(double temperature, int64_t top_k, double top_p, double min_p,
                                 int64_t vocab) {
  Filters f;
  if (temperature >= 0.0 && temperature <= DBL_MAX) {
    f.temperature = temperature;
  } else {
    f.out_of_range = true;
  }
  f.top_k = top_k > 0 && top_k < vocab ? top_k : 0;
  if (top_p >= 0.0) {
    f.top_p = top_p < 1.0 ? top_p : 1.0;
  } else {
    f.out_of_range = true;
  }
  if (min_p <= 1.0) {
    f.min_p = min_p > 0.0 ? min_p : 0.0;
  } else {
    f.out_of_range = true;
  }
  return f;
}

// p(x) in float64 from one logit. Clamped: z is a rounded sum, and a q above 1 would reject a legal
// draft token.
SPECDEC_HD double law_probability(const RowLaw& law, float value, int64_t token) {
  if (law.point_mass) return token == law.argmax ? 1.0 : 0.0;
  double p = 0.0;
  if (law.linear) {
    p = value > 0.0f ? value / law.z : 0.0;
  } else if (value >= law.cutoff) {
    p = exp(law.scale * (static_cast<double>(value) - law.max)) / law.z;
  }
  return p < 1.0 ? p : 1.0;
}

// `log_z`: log(law.z), which whoever asks often has once.
SPECDEC_HD double law_log_probability(const RowLaw& law, float value, double log_z) {
  if (law.point_mass) return 0.0;
  return law.scale * (static_cast<double>(value) - law.max) - log_z;
}

SPECDEC_HD double law_log_probability(const RowLaw& law, float value) {
  if (law.point_mass) return 0.0;
  return law_log_probability(law, value, log(law.z));
}

// Smallest float that is >= x. Rounding a threshold to nearest could let in what lies below it.
SPECDEC_HD float round_up(double x) {
  const float rounded = static_cast<float>(x);
  return rounded < x ? nextafterf(rounded, INFINITY) : rounded;
}

// The threshold that vector passes compare with: at least the cutoff, finite (so that a logit of
// -inf has weight exactly 0), and where fp32 exp would leave the normal range the weight is 0 too.
// So it is, at temperatures beyond 1e36, where the difference from the reference would overflow.
SPECDEC_HD float support_threshold(float cutoff, float reference, double scale) {
  const double reach = 87.0 / scale < FLT_MAX ? 87.0 / scale : FLT_MAX;
  const double underflow = static_cast<double>(reference) - reach;
  double threshold =
      cutoff > -FLT_MAX ? static_cast<double>(cutoff) : -static_cast<double>(FLT_MAX);
  if (underflow > threshold) threshold = underflow;
  return round_up(threshold);
}

// The raw logit max + T log(min_p) as a float cutoff.
SPECDEC_HD float min_p_cutoff(float max, double temperature, double min_p) {
  return round_up(static_cast<double>(max) + temperature * log(min_p));
}

// ---- radix selection ---

constexpr int kRadixLevels = 3;
constexpr int kRadixBins = 1 << 11;

SPECDEC_HD int radix_shift(int level) { return level == 0 ? 21 : level == 1 ? 10 : 0; }

// Keys order as the floats do. Adding 0 folds -0 into +0: equal logits have equal keys.
SPECDEC_HD uint32_t order_key(float value) {
  const float folded = value + 0.0f;
  uint32_t bits;
  memcpy(&bits, &folded, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

SPECDEC_HD float key_value(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7FFFFFFFu : ~key;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Selection of the lowest key for which the weight strictly above it is < bound. Weights are counts
// (top-k: bound = k) or fixed-point masses (top-p: bound = top_p * total).
struct RadixSelection {
  uint32_t prefix = 0;  // high bits of the answer found so far
  uint64_t above = 0;   // weight of everything above that prefix
  uint64_t bound = 0;
};

SPECDEC_HD bool radix_matches(const RadixSelection& s, uint32_t key, int level) {
  return level == 0 || key >> radix_shift(level - 1) == s.prefix >> radix_shift(level - 1);
}

SPECDEC_HD uint32_t radix_digit(uint32_t key, int level) {
  return key >> radix_shift(level) & (level == 2 ? 0x3FFu : 0x7FFu);
}

// Goes into the bin that holds the answer, given the histogram of the matching keys' digits. The
// weights of all matching keys reach the bound, so the loop always breaks.
SPECDEC_HD void radix_descend(RadixSelection* s, const uint64_t* histogram, int level) {
  int bin = level == 2 ? 0x3FF : 0x7FF;
  for (; bin > 0; --bin) {
    const uint64_t weight = histogram[bin];
    if (weight > 0 && s->above + weight >= s->bound) break;
    s->above += weight;
  }
  s->prefix |= static_cast<uint32_t>(bin) << radix_shift(level);
}

// Mass that the kept set may have strictly above its lowest member (docs/design.md, "Laws from
// logits").
SPECDEC_HD uint64_t top_p_bound(double top_p, uint64_t total) {
  return static_cast<uint64_t>(top_p * static_cast<double>(total));
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
