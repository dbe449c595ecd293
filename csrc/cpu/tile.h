// One tile of a row: 4,096 entries seen as floats, and the sums that rules need over it.
//
// Every float reduction over the vocabulary runs tile by tile, with the same accumulators in the
// same order, and tiles are combined in order: threads, batch and split never change a bit. A tile
// of floats is 16 KiB, so that a second look at it comes from L1.
#pragma once

#include <cfloat>
#include <cmath>

#include "../core/fixed_point.h"
#include "../core/rows.h"
#include "vec.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

constexpr int64_t kTilesPerThread = 4;  // below this, a thread is not worth waking
constexpr int kAccumulators = 4;
static_assert(kGroup % (kAccumulators * kLanes) == 0, "a group is a whole number of steps");

template <VecF (*Widen)(VecH)>
inline void widen_tile(const uint16_t* source, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, Widen(load<VecH>(source + i)));
  for (; i < n; ++i) {
    VecH one{};
    one[0] = source[i];
    out[i] = Widen(one)[0];
  }
}

// The entries [tile * kTile, ...) of a row as floats, padded to `groups` whole groups with entries
// of weight 0. `buffer` holds kTile floats; a full float32 tile is used where it lies. `excluded`
// (a token, or -1) gets weight 0 too.
inline const float* view_tile(const Row& row, int64_t tile, int64_t groups, float* buffer,
                              int64_t excluded = -1) {
  const int64_t begin = tile * kTile;
  int64_t n = row.vocab - begin;
  n = n < 0 ? 0 : n < groups * kGroup ? n : groups * kGroup;
  const bool patch = excluded >= begin && excluded < begin + n;
  const float* values = buffer;
  if (n > 0 && row.element == Element::kFloat32) {
    const float* source = static_cast<const float*>(row.data) + begin;
    if (n == groups * kGroup && !patch) return source;
    memcpy(buffer, source, n * sizeof(float));
  } else if (n > 0) {
    const uint16_t* source = static_cast<const uint16_t*>(row.data) + begin;
    if (row.element == Element::kBFloat16) {
      widen_tile<widen_bfloat16>(source, n, buffer);
    } else {
      widen_tile<widen_float16>(source, n, buffer);
    }
  }
  const float nothing = row.linear ? 0.0f : -INFINITY;
  for (int64_t i = n; i < groups * kGroup; ++i) buffer[i] = nothing;
  if (patch) buffer[excluded - begin] = nothing;
  return values;
}

// Runs step(accumulator, offset) over the groups of a tile, `kAccumulators` independent sums.
template <typename Step>
inline double accumulate(int64_t groups, const Step& step) {
  VecF sums[kAccumulators] = {};
  for (int64_t i = 0; i < groups * kGroup; i += kAccumulators * kLanes) {
    for (int a = 0; a < kAccumulators; ++a) sums[a] += step(i + a * kLanes);
  }
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Maximum of a tile and of each of its groups; false if an entry is NaN or +inf.
inline bool tile_max(const float* x, int64_t groups, float* max, float* group_max) {
  VecF tile = splat(-INFINITY);
  VecI fine = (VecI)(tile == tile);
  for (int64_t g = 0; g < groups; ++g) {
    VecF best[kAccumulators];
    for (int a = 0; a < kAccumulators; ++a) best[a] = splat(-INFINITY);
    for (int i = 0; i < kGroup; i += kAccumulators * kLanes) {
      for (int a = 0; a < kAccumulators; ++a) {
        const VecF v = load<VecF>(x + g * kGroup + i + a * kLanes);
        fine &= (VecI)(v <= FLT_MAX);
        best[a] = max_of(v, best[a]);
      }
    }
    const VecF group = max_of(max_of(best[0], best[1]), max_of(best[2], best[3]));
    if (group_max != nullptr) group_max[g] = max_lanes(group);
    tile = max_of(group, tile);
  }
  *max = max_lanes(tile);
  return all_lanes(fine);
}

// Weights exp(scale * (x - reference)) of entries >= threshold (see support_threshold), else 0.
struct ExpWeight {
  VecF reference, scale, threshold;
  ExpWeight(float reference_logit, double scale_value, float threshold_value)
      : reference(splat(reference_logit)),
        scale(splat(static_cast<float>(scale_value * 1.4426950408889634))),
        threshold(splat(threshold_value)) {}
  explicit ExpWeight(const RowLaw& law)
      : ExpWeight(law.max, law.scale, support_threshold(law.cutoff, law.max, law.scale)) {}
  VecF operator()(VecF x) const {
    return keep_where((VecI)(x >= threshold), exp2_unchecked((x - reference) * scale));
  }
};

// Weights of a row of probabilities: the entries themselves.
struct LinearWeight {
  explicit LinearWeight(const RowLaw&) {}
  VecF operator()(VecF x) const { return positive_part(x); }
};

// Calls body(weight functor) with the functor that fits the law.
template <typename Body>
inline auto with_weight(const RowLaw& law, const Body& body) {
  return law.linear ? body(LinearWeight(law)) : body(ExpWeight(law));
}

template <typename Weight>
inline double tile_weight_sum(const float* x, int64_t groups, const Weight& weight) {
  return accumulate(groups, [&](int64_t i) { return weight(load<VecF>(x + i)); });
}

// How weights become integers. For a law the unit is a power of two: the product is exact in fp32.
struct LawUnit {
  VecL operator()(HalfF w) const {
    return __builtin_convertvector(w * static_cast<float>(kLawUnit), VecL);
  }
};

struct ResidualUnit {
  double unit;
  VecL operator()(HalfF w) const {
    return __builtin_convertvector(__builtin_convertvector(w, VecD) * unit, VecL);
  }
};

// Writes floor(weight * unit) of a tile to `out` and returns the sum.
template <typename Unit, typename WeightAt>
inline uint64_t tile_fixed(int64_t groups, const Unit& unit, uint64_t* out,
                           const WeightAt& weight_at) {
  VecL total{};
  for (int64_t i = 0; i < groups * kGroup; i += kLanes) {
    float lanes[kLanes];
    store(lanes, weight_at(i));
    for (int half = 0; half < 2; ++half) {
      const VecL fixed = unit(load<HalfF>(lanes + half * kLanes / 2));
      store(out + i + half * kLanes / 2, fixed);
      total += fixed;
    }
  }
  uint64_t sum = 0;
  for (int i = 0; i < kLanes / 2; ++i) sum += static_cast<uint64_t>(total[i]);
  return sum;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
