// What the selection of a cutoff is made of: short lists of logits, and histograms over tiles of a
// row.
#pragma once

#include "ranks.h"
#include "tile.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

constexpr int64_t kMaxCandidates = 2048;
constexpr int64_t kMaxCandidateTopK = 512;

// ---- selection in a short list ---

// A few logits of a row, padded to whole groups with entries of weight 0.
struct Candidates {
  float values[kMaxCandidates];
  int64_t count = 0;

  bool add(float value) {
    if (count == kMaxCandidates) return false;
    values[count++] = value;
    return true;
  }
  void pad() {
    for (int64_t i = count; i < num_groups(count) * kGroup; ++i) values[i] = -INFINITY;
  }
};

// The largest key K for which at_least(K), the weight of all keys >= K, reaches the bound: a radix
// selection with one bit a level.
template <typename AtLeast>
inline uint32_t select_key(uint64_t bound, const AtLeast& at_least) {
  uint32_t key = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (at_least(key | bit) >= bound) key |= bit;
  }
  return key;
}

inline float kth_largest_of(const float* values, int64_t n, int64_t k) {
  return key_value(select_key(static_cast<uint64_t>(k), [&](uint32_t key) {
    uint32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += order_key(values[i]) >= key;
    return count;
  }));
}

// The lowest candidate for which the mass strictly above it, `above` included, is < bound.
inline float lowest_within_mass(const Candidates& candidates, const uint64_t* fixed, uint64_t above,
                                uint64_t bound) {
  // The top entry stays even where the bound is 0.
  const uint64_t left = bound > above ? bound - above : 1;
  return key_value(select_key(left, [&](uint32_t key) {
    uint64_t mass = 0;
    for (int64_t i = 0; i < candidates.count; ++i) {
      mass += order_key(candidates.values[i]) >= key ? fixed[i] : 0;
    }
    return mass;
  }));
}

// Writes the masses floor(weight * 2^40) of whole groups of logits.
inline void law_masses(const ExpWeight& weight, const float* x, int64_t groups, uint64_t* fixed) {
  for (int64_t i = 0; i < groups * kGroup; i += kLanes) {
    float lanes[kLanes];
    store(lanes, weight(load<VecF>(x + i)) * static_cast<float>(kLawUnit));
    for (int half = 0; half < 2; ++half) {
      const HalfF scaled = load<HalfF>(lanes + half * kLanes / 2);
      store(fixed + i + half * kLanes / 2, __builtin_convertvector(scaled, VecL));
    }
  }
}

inline uint64_t candidate_masses(const Candidates& candidates, const RowLaw& law, uint64_t* fixed) {
  law_masses(ExpWeight(law), candidates.values, num_groups(candidates.count), fixed);
  uint64_t total = 0;
  for (int64_t i = 0; i < candidates.count; ++i) total += fixed[i];
  return total;
}

// ---- tiles of a row ---

// Calls visit(x, n) on some tiles of a row, x padded to whole groups.
template <typename Visit>
inline void for_each_tile(const Row& row, Range tiles, const Visit& visit) {
  float buffer[kTile];
  for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
    const int64_t left = row.vocab - tile * kTile;
    visit(view_tile(row, tile, tile_groups(row.vocab, tile), buffer), left < kTile ? left : kTile);
  }
}

// A histogram kept in four copies by turns, because equal neighbours would wait for each other's
// store.
struct Histogram {
  static constexpr int kTurns = 4;
  uint64_t turns[kTurns][kRadixBins];

  void clear() { memset(turns, 0, sizeof turns); }
  void add(int64_t i, int64_t bin, uint64_t weight) { turns[i % kTurns][bin] += weight; }
  // Adds a padded tile: n is a multiple of kTurns.
  void add_tile(int64_t n, const int32_t* bins, const uint64_t* weights) {
    for (int64_t i = 0; i < n; i += kTurns) {
      for (int turn = 0; turn < kTurns; ++turn) turns[turn][bins[i + turn]] += weights[i + turn];
    }
  }
  // Sums the copies into the first and returns it.
  const uint64_t* totals() {
    for (int turn = 1; turn < kTurns; ++turn) {
      for (int bin = 0; bin < kRadixBins; ++bin) turns[0][bin] += turns[turn][bin];
    }
    return turns[0];
  }
};

// One level of a radix selection: the histogram of the matching keys' digits. prepare(x, n) sees
// each tile, then weight_of(i) gives the weight of its entries.
template <typename Prepare, typename WeightOf>
inline void fill_level(const Row& row, Range tiles, const RadixSelection& selection, int level,
                       const Prepare& prepare, const WeightOf& weight_of, Histogram* histogram) {
  histogram->clear();
  for_each_tile(row, tiles, [&](const float* x, int64_t n) {
    prepare(x, n);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = order_key(x[i]);
      if (radix_matches(selection, key, level)) {
        histogram->add(i, radix_digit(key, level), weight_of(i));
      }
    }
  });
}

// By number, as top-k selects, or by mass, as top-p does.
inline void fill_level_by_count(const Row& row, Range tiles, const RadixSelection& selection,
                                int level, Histogram* histogram) {
  const auto prepare = [](const float*, int64_t) {};
  const auto one = [](int64_t) { return uint64_t{1}; };
  fill_level(row, tiles, selection, level, prepare, one, histogram);
}
inline void fill_level_by_mass(const Row& row, const ExpWeight& weight, Range tiles,
                               const RadixSelection& selection, int level, Histogram* histogram) {
  uint64_t fixed[kTile];
  const auto prepare = [&](const float* x, int64_t n) {
    law_masses(weight, x, num_groups(n), fixed);
  };
  const auto mass_of = [&](int64_t i) { return fixed[i]; };
  fill_level(row, tiles, selection, level, prepare, mass_of, histogram);
}

// ---- top-k ---

// Collects the logits >= floor from those of some groups that hold any; false if they do not fit.
inline bool collect_above(const Row& row, const float* group_max, float floor, Range groups,
                          Candidates* out) {
  for (int64_t g = groups.begin; g < groups.end; ++g) {
    if (group_max[g] < floor) continue;
    const Row here = held_tile(row, g * kGroup / kTile);
    const int64_t end = (g + 1) * kGroup < row.vocab ? (g + 1) * kGroup : row.vocab;
    for (int64_t i = g * kGroup; i < end; ++i) {
      const float value = row_value(here, i);
      if (value >= floor && !out->add(value)) return false;
    }
  }
  out->pad();
  return true;
}

// Whether a row's cutoffs may be looked for among few logits; sets the cutoff and z of a law whose
// candidates are known: all logits that a small top-k may keep, in their order.
void cut_candidates(const Candidates& candidates, const Filters& filters, RowLaw* law);

// ---- top-p ---

// Bins of equal width in log-weight, 51 to the octave: finer than the first digit of a key where
// the mass is. Weights below 2^-40 have no mass and share the last bin.
constexpr float kBinsPerOctave = 51.0f;

struct LogWeightBin {
  VecF reference, slope;
  explicit LogWeightBin(const RowLaw& law)
      : reference(splat(law.max)),
        slope(splat(static_cast<float>(law.scale * 1.4426950408889634 * kBinsPerOctave))) {}
  VecI operator()(VecF x) const {
    const VecF last = splat(static_cast<float>(kRadixBins - 1));
    return __builtin_convertvector(min_of((reference - x) * slope, last), VecI);
  }
};

inline void fill_mass_bins(const Row& row, Range tiles, const ExpWeight& weight,
                           const LogWeightBin& bin_of, Histogram* histogram) {
  uint64_t fixed[kTile];
  int32_t bins[kTile];
  histogram->clear();
  for_each_tile(row, tiles, [&](const float* x, int64_t n) {
    const int64_t padded = num_groups(n) * kGroup;
    law_masses(weight, x, num_groups(n), fixed);
    for (int64_t i = 0; i < padded; i += kLanes) store(bins + i, bin_of(load<VecF>(x + i)));
    histogram->add_tile(padded, bins, fixed);
  });
}

// The bin that holds the lowest kept logit, given the masses of all bins; what is above it goes to
// `above`.
inline int find_mass_bin(const uint64_t* masses, uint64_t bound, uint64_t* above) {
  int bin = 0;
  *above = 0;
  while (bin < kRadixBins - 1 && (masses[bin] == 0 || *above + masses[bin] < bound)) {
    *above += masses[bin++];
  }
  return bin;
}

inline uint64_t total_of(const uint64_t* masses) {
  uint64_t total = 0;
  for (int bin = 0; bin < kRadixBins; ++bin) total += masses[bin];
  return total;
}

// Collects the kept logits of one bin; false if they do not fit.
inline bool collect_bin(const Row& row, Range tiles, const LogWeightBin& bin_of, int32_t bin,
                        float cutoff, Candidates* out) {
  bool fits = true;
  for_each_tile(row, tiles, [&](const float* x, int64_t n) {
    for (int64_t g = 0; g < n; g += kGroup) {
      int32_t bins[kGroup];
      VecI elsewhere = (VecI)(VecF{} == VecF{});
      for (int i = 0; i < kGroup; i += kLanes) {
        const VecI here = bin_of(load<VecF>(x + g + i));
        elsewhere &= (VecI)(here != bin);
        store(bins + i, here);
      }
      if (all_lanes(elsewhere)) continue;
      for (int64_t i = 0; i < kGroup && g + i < n; ++i) {
        if (bins[i] == bin && x[g + i] >= cutoff) fits = fits && out->add(x[g + i]);
      }
    }
  });
  out->pad();
  return fits;
}

// The lowest logit of a bin's candidates within the bound, `above` being the mass above the bin.
float cut_bin(const Candidates& candidates, const RowLaw& law, uint64_t above, uint64_t bound);

// ---- both ---

inline void raise(float* cutoff, float value) { *cutoff = value > *cutoff ? value : *cutoff; }

inline void apply_min_p(const Filters& filters, RowLaw* law) {
  if (!has_min_p(filters)) return;
  raise(&law->cutoff, min_p_cutoff(law->max, filters.temperature, filters.min_p));
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
