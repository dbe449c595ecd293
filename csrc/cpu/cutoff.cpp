// Cutoffs without sorting.
//
// Grid: one thread a row. Traffic, from cache after the law pass: a small top-k reads only the
// groups that can hold a kept logit; a larger one three times the row (radix levels); top-p
// the row twice. Numerics: counts, and masses in 2^-40 fixed point, are exact: cutoffs do not
// depend on any order.
#include "cutoff.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

constexpr int64_t kMaxCandidates = 2048;
constexpr int64_t kMaxCandidateTopK = 512;

// ---- selection in a short list
// --------------------------------------------------------------------

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
uint32_t select_key(uint64_t bound, const AtLeast& at_least) {
  uint32_t key = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (at_least(key | bit) >= bound) key |= bit;
  }
  return key;
}

float kth_largest_of(const float* values, int64_t n, int64_t k) {
  return key_value(select_key(static_cast<uint64_t>(k), [&](uint32_t key) {
    uint32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += order_key(values[i]) >= key;
    return count;
  }));
}

// The lowest candidate for which the mass strictly above it, `above` included, is < bound.
float lowest_within_mass(const Candidates& candidates, const uint64_t* fixed, uint64_t above,
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
void law_masses(const ExpWeight& weight, const float* x, int64_t groups, uint64_t* fixed) {
  for (int64_t i = 0; i < groups * kGroup; i += kLanes) {
    float lanes[kLanes];
    store(lanes, weight(load<VecF>(x + i)) * static_cast<float>(kLawUnit));
    for (int half = 0; half < 2; ++half) {
      const HalfF scaled = load<HalfF>(lanes + half * kLanes / 2);
      store(fixed + i + half * kLanes / 2, __builtin_convertvector(scaled, VecL));
    }
  }
}

uint64_t candidate_masses(const Candidates& candidates, const RowLaw& law, uint64_t* fixed) {
  law_masses(ExpWeight(law), candidates.values, num_groups(candidates.count), fixed);
  uint64_t total = 0;
  for (int64_t i = 0; i < candidates.count; ++i) total += fixed[i];
  return total;
}

// ---- selection in a row
// ---------------------------------------------------------------------------

// Calls visit(x, n) on the tiles of a row, x padded to whole groups.
template <typename Visit>
void for_each_tile(const Row& row, const Visit& visit) {
  float buffer[kTile];
  for (int64_t tile = 0; tile < num_tiles(row.vocab); ++tile) {
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

// A radix selection over a whole row: prepare(x, n) sees each tile, then weight_of(i) gives the
// weight of its entries.
template <typename Prepare, typename WeightOf>
float select_in_row(const Row& row, uint64_t bound, const Prepare& prepare,
                    const WeightOf& weight_of) {
  RadixSelection selection;
  selection.bound = bound;
  Histogram histogram;
  for (int level = 0; level < kRadixLevels; ++level) {
    histogram.clear();
    for_each_tile(row, [&](const float* x, int64_t n) {
      prepare(x, n);
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t key = order_key(x[i]);
        if (radix_matches(selection, key, level)) {
          histogram.add(i, radix_digit(key, level), weight_of(i));
        }
      }
    });
    radix_descend(&selection, histogram.totals(), level);
  }
  return key_value(selection.prefix);
}

float kth_largest_of(const Row& row, int64_t k) {
  return select_in_row(
      row, static_cast<uint64_t>(k), [](const float*, int64_t) {},
      [](int64_t) { return uint64_t{1}; });
}

float lowest_within_mass(const Row& row, const ExpWeight& weight, uint64_t bound) {
  uint64_t fixed[kTile];
  return select_in_row(
      row, bound, [&](const float* x, int64_t n) { law_masses(weight, x, num_groups(n), fixed); },
      [&](int64_t i) { return fixed[i]; });
}

// ---- top-k
// ----------------------------------------------------------------------------------------

// Collects the logits >= floor from the groups that hold any; false if they do not fit.
bool collect_above(const Row& row, const float* group_max, float floor, Candidates* out) {
  for (int64_t g = 0; g < num_groups(row.vocab); ++g) {
    if (group_max[g] < floor) continue;
    const int64_t end = (g + 1) * kGroup < row.vocab ? (g + 1) * kGroup : row.vocab;
    for (int64_t i = g * kGroup; i < end; ++i) {
      const float value = row_value(row, i);
      if (value >= floor && !out->add(value)) return false;
    }
  }
  out->pad();
  return true;
}

// All logits that a small top-k may keep. At least k groups reach the k-th largest group maximum,
// so at least k logits do.
bool collect_top_k(const Row& row, int64_t k, const float* group_max, Candidates* out) {
  const int64_t groups = num_groups(row.vocab);
  const float floor = groups >= k ? kth_largest_of(group_max, groups, k) : -INFINITY;
  return collect_above(row, group_max, floor, out);
}

// ---- top-p
// ----------------------------------------------------------------------------------------

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

void fill_mass_bins(const Row& row, const ExpWeight& weight, const LogWeightBin& bin_of,
                    Histogram* histogram) {
  uint64_t fixed[kTile];
  int32_t bins[kTile];
  histogram->clear();
  for_each_tile(row, [&](const float* x, int64_t n) {
    const int64_t padded = num_groups(n) * kGroup;
    law_masses(weight, x, num_groups(n), fixed);
    for (int64_t i = 0; i < padded; i += kLanes) store(bins + i, bin_of(load<VecF>(x + i)));
    histogram->add_tile(padded, bins, fixed);
  });
}

// Collects the kept logits of one bin; false if they do not fit.
bool collect_bin(const Row& row, const LogWeightBin& bin_of, int32_t bin, float cutoff,
                 Candidates* out) {
  bool fits = true;
  for_each_tile(row, [&](const float* x, int64_t n) {
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

// The lowest logit for which the mass strictly above it is < top_p of the total: first its bin,
// then a selection among the few logits of that bin.
float top_p_cutoff(const Row& row, const RowLaw& law, double top_p) {
  const ExpWeight weight(law);
  const LogWeightBin bin_of(law);
  Histogram histogram;
  fill_mass_bins(row, weight, bin_of, &histogram);
  const uint64_t* masses = histogram.totals();
  uint64_t total = 0;
  for (int bin = 0; bin < kRadixBins; ++bin) total += masses[bin];
  const uint64_t bound = top_p_bound(top_p, total);
  uint64_t above = 0;
  int bin = 0;
  while (bin < kRadixBins - 1 && (masses[bin] == 0 || above + masses[bin] < bound)) {
    above += masses[bin++];
  }
  Candidates candidates;
  if (!collect_bin(row, bin_of, bin, law.cutoff, &candidates)) {
    return lowest_within_mass(row, weight, bound);
  }
  uint64_t fixed[kMaxCandidates];
  candidate_masses(candidates, law, fixed);
  return lowest_within_mass(candidates, fixed, above, bound);
}

float top_p_cutoff(const Candidates& candidates, const RowLaw& law, double top_p) {
  uint64_t fixed[kMaxCandidates];
  const uint64_t total = candidate_masses(candidates, law, fixed);
  return lowest_within_mass(candidates, fixed, 0, top_p_bound(top_p, total));
}

// ---- both
// -----------------------------------------------------------------------------------------

void raise(float* cutoff, float value) { *cutoff = value > *cutoff ? value : *cutoff; }

// top-p, then min-p, over what top-k left: `source` is the row or the candidates.
template <typename Source>
void narrow(const Source& source, const Filters& filters, RowLaw* law) {
  if (has_top_p(filters)) raise(&law->cutoff, top_p_cutoff(source, *law, filters.top_p));
  if (has_min_p(filters)) {
    raise(&law->cutoff, min_p_cutoff(law->max, filters.temperature, filters.min_p));
  }
}

}  // namespace

bool uses_group_max(const Filters& filters) {
  return has_top_k(filters) && filters.top_k <= kMaxCandidateTopK;
}

bool apply_filters(const Row& row, const Filters& filters, const float* group_max, RowLaw* law) {
  Candidates candidates;
  if (uses_group_max(filters) && collect_top_k(row, filters.top_k, group_max, &candidates)) {
    law->cutoff = kth_largest_of(candidates.values, candidates.count, filters.top_k);
    narrow(candidates, filters, law);
    const FloatEntries entries{candidates.values, candidates.values};
    law->z = tile_weight_sum(entries, num_groups(candidates.count), ExpWeight(*law));
    return true;
  }
  if (has_top_k(filters)) law->cutoff = kth_largest_of(row, filters.top_k);
  narrow(row, filters, law);
  return false;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
