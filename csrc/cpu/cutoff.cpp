// Cutoffs without sorting.
//
// Grid: one thread a row. Traffic, from cache after the law pass: a small top-k reads only the
// groups that can hold a kept logit; a larger one three times the row (radix levels); top-p the row
// twice. Numerics: counts, and masses in 2^-40 fixed point, are exact: cutoffs do not depend on any
// order.
#include "cutoff.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

constexpr int64_t kMaxCandidates = 2048;
constexpr int64_t kMaxCandidateTopK = 512;

// The logits that a selection runs over, visited in chunks of up to kTile floats: a whole row, or
// an array padded to whole groups.
struct LogitSource {
  const Row* row;
  const float* values;
  int64_t size;

  int64_t num_chunks() const { return num_tiles(size); }
  int64_t chunk_size(int64_t chunk) const {
    const int64_t left = size - chunk * kTile;
    return left < kTile ? left : kTile;
  }
  const float* chunk(int64_t index, float* buffer) const {
    if (values != nullptr) return values + index * kTile;
    return view_tile(*row, index, tile_groups(size, index), buffer);
  }
};

// A histogram kept in four copies by turns, because equal neighbours would wait for each other's
// store.
struct Histogram {
  static constexpr int kTurns = 4;
  uint64_t turns[kTurns][kRadixBins];

  void clear() { memset(turns, 0, sizeof turns); }
  void add(int64_t i, int64_t bin, uint64_t weight) { turns[i % kTurns][bin] += weight; }
  // Sums the copies into the first and returns it.
  const uint64_t* totals() {
    for (int turn = 1; turn < kTurns; ++turn) {
      for (int bin = 0; bin < kRadixBins; ++bin) turns[0][bin] += turns[turn][bin];
    }
    return turns[0];
  }
};

// One level of a radix selection: prepare(chunk, n), then weight_of(i) of every matching key.
template <typename Prepare, typename WeightOf>
void select_level(const LogitSource& source, RadixSelection* selection, int level,
                  const Prepare& prepare, const WeightOf& weight_of) {
  Histogram histogram;
  histogram.clear();
  float buffer[kTile];
  for (int64_t c = 0; c < source.num_chunks(); ++c) {
    const float* x = source.chunk(c, buffer);
    const int64_t n = source.chunk_size(c);
    prepare(x, n);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = order_key(x[i]);
      if (radix_matches(*selection, key, level)) {
        histogram.add(i, radix_digit(key, level), weight_of(i));
      }
    }
  }
  radix_descend(selection, histogram.totals(), level);
}

float kth_largest(const LogitSource& source, int64_t k) {
  RadixSelection selection;
  selection.bound = static_cast<uint64_t>(k);
  for (int level = 0; level < kRadixLevels; ++level) {
    select_level(
        source, &selection, level, [](const float*, int64_t) {},
        [](int64_t) { return uint64_t{1}; });
  }
  return key_value(selection.prefix);
}

// The lowest logit for which the mass strictly above it, `above` included, is < bound.
float lowest_within_mass(const LogitSource& source, const ExpWeight& weight, uint64_t above,
                         uint64_t bound) {
  uint64_t fixed[kTile];
  const auto prepare = [&](const float* x, int64_t n) {
    tile_fixed(num_groups(n), kLawUnit, fixed,
               [&](int64_t i) { return weight(load<VecF>(x + i)); });
  };
  RadixSelection selection;
  selection.above = above;
  selection.bound = bound;
  for (int level = 0; level < kRadixLevels; ++level) {
    select_level(source, &selection, level, prepare, [&](int64_t i) { return fixed[i]; });
  }
  return key_value(selection.prefix);
}

// ---- top-k
// ----------------------------------------------------------------------------------------

// Collects the logits >= floor, from the groups that hold any, padded to whole groups; -1 if they
// do not fit.
int64_t collect_candidates(const Row& row, const float* group_max, float floor, float* out) {
  int64_t count = 0;
  for (int64_t g = 0; g < num_groups(row.vocab); ++g) {
    if (group_max[g] < floor) continue;
    const int64_t end = (g + 1) * kGroup < row.vocab ? (g + 1) * kGroup : row.vocab;
    for (int64_t i = g * kGroup; i < end; ++i) {
      const float value = row_value(row, i);
      if (value < floor) continue;
      if (count == kMaxCandidates) return -1;
      out[count++] = value;
    }
  }
  for (int64_t i = count; i < num_groups(count) * kGroup; ++i) out[i] = -INFINITY;
  return count;
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

void bin_tile(const LogWeightBin& bin_of, const float* x, int64_t n, int32_t* bins) {
  for (int64_t i = 0; i < num_groups(n) * kGroup; i += kLanes) {
    store(bins + i, bin_of(load<VecF>(x + i)));
  }
}

// Mass by bin over the kept logits of a source.
void fill_mass_bins(const LogitSource& source, const ExpWeight& weight, const LogWeightBin& bin_of,
                    Histogram* histogram) {
  float buffer[kTile];
  uint64_t fixed[kTile];
  int32_t bins[kTile];
  histogram->clear();
  for (int64_t c = 0; c < source.num_chunks(); ++c) {
    const float* x = source.chunk(c, buffer);
    const int64_t n = source.chunk_size(c);
    tile_fixed(num_groups(n), kLawUnit, fixed,
               [&](int64_t i) { return weight(load<VecF>(x + i)); });
    bin_tile(bin_of, x, n, bins);
    for (int64_t i = 0; i < n; ++i) histogram->add(i, bins[i], fixed[i]);
  }
}

// Collects the kept logits of one bin; -1 if they do not fit.
int64_t collect_bin(const LogitSource& source, const LogWeightBin& bin_of, int32_t bin,
                    float cutoff, float* out) {
  float buffer[kTile];
  int64_t count = 0;
  for (int64_t c = 0; c < source.num_chunks(); ++c) {
    const float* x = source.chunk(c, buffer);
    const int64_t n = source.chunk_size(c);
    for (int64_t i = 0; i < n; i += kLanes) {
      const VecI here = (VecI)(bin_of(load<VecF>(x + i)) == bin);
      if (all_lanes(~here)) continue;
      for (int64_t j = i; j < i + kLanes && j < n; ++j) {
        if (!here[j - i] || x[j] < cutoff) continue;
        if (count == kMaxCandidates) return -1;
        out[count++] = x[j];
      }
    }
  }
  for (int64_t i = count; i < num_groups(count) * kGroup; ++i) out[i] = -INFINITY;
  return count;
}

// The lowest logit for which the mass strictly above it is < top_p of the total: first its bin,
// then a radix selection among the few logits of that bin.
float top_p_cutoff(const LogitSource& source, const RowLaw& law, double top_p) {
  const ExpWeight weight(law);
  const LogWeightBin bin_of(law);
  Histogram histogram;
  fill_mass_bins(source, weight, bin_of, &histogram);
  const uint64_t* masses = histogram.totals();
  uint64_t total = 0;
  for (int bin = 0; bin < kRadixBins; ++bin) total += masses[bin];
  const uint64_t bound = top_p_bound(top_p, total);
  uint64_t above = 0;
  int bin = 0;
  while (bin < kRadixBins - 1 && (masses[bin] == 0 || above + masses[bin] < bound)) {
    above += masses[bin++];
  }
  float candidates[kMaxCandidates];
  const int64_t count = collect_bin(source, bin_of, bin, law.cutoff, candidates);
  if (count < 0) return lowest_within_mass(source, weight, 0, bound);
  return lowest_within_mass({nullptr, candidates, count}, weight, above, bound);
}

void raise(float* cutoff, float value) { *cutoff = value > *cutoff ? value : *cutoff; }

// In the order of DESIGN section 3. `source` holds all that top-k may keep.
void set_cutoff(const LogitSource& source, const Filters& filters, RowLaw* law) {
  if (has_top_k(filters)) law->cutoff = kth_largest(source, filters.top_k);
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
  const int64_t groups = num_groups(row.vocab);
  if (uses_group_max(filters) && groups >= filters.top_k) {
    // At least top_k groups reach the top_k-th largest maximum, so at least as many logits do.
    const float floor = kth_largest({nullptr, group_max, groups}, filters.top_k);
    float candidates[kMaxCandidates];
    const int64_t count = collect_candidates(row, group_max, floor, candidates);
    if (count >= 0) {
      set_cutoff({nullptr, candidates, count}, filters, law);
      law->z = tile_weight_sum(candidates, num_groups(count), ExpWeight(*law));
      return true;
    }
  }
  set_cutoff({&row, nullptr, row.vocab}, filters, law);
  return false;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
