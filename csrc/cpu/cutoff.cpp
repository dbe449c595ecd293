// Cutoffs without sorting.
//
// Grid: one thread a row. Traffic, from cache after the law pass: a small top-k reads only the
// groups that can hold a kept logit; a larger one three times the row (radix levels); top-p
// the row twice. Numerics: counts, and masses in 2^-40 fixed point, are exact: cutoffs do not
// depend on any order.
#include "cutoff.h"

#include "selection.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

Range all_tiles(const Row& row) { return {0, num_tiles(row.vocab)}; }

// A radix selection over a whole row: fill(selection, level, histogram) fills each level's.
template <typename Fill>
float select_in_row(uint64_t bound, const Fill& fill) {
  RadixSelection selection;
  selection.bound = bound;
  Histogram histogram;
  for (int level = 0; level < kRadixLevels; ++level) {
    fill(selection, level, &histogram);
    radix_descend(&selection, histogram.totals(), level);
  }
  return key_value(selection.prefix);
}

float kth_largest_in(const Row& row, int64_t k) {
  return select_in_row(static_cast<uint64_t>(k), [&](const auto& selection, int level, auto* out) {
    fill_level_by_count(row, all_tiles(row), selection, level, out);
  });
}

float lowest_in_row(const Row& row, const ExpWeight& weight, uint64_t bound) {
  return select_in_row(bound, [&](const auto& selection, int level, auto* out) {
    fill_level_by_mass(row, weight, all_tiles(row), selection, level, out);
  });
}

// All logits that a small top-k may keep. At least k groups reach the k-th largest group maximum,
// so at least k logits do.
bool collect_top_k(const Row& row, int64_t k, const float* group_max, Candidates* out) {
  const int64_t groups = num_groups(row.vocab);
  const float floor = groups >= k ? kth_largest_of(group_max, groups, k) : -INFINITY;
  return collect_above(row, group_max, floor, {0, groups}, out);
}

// The lowest logit for which the mass strictly above it is < top_p of the total: first its bin,
// then a selection among the few logits of that bin.
float top_p_cutoff(const Row& row, const RowLaw& law, double top_p) {
  const ExpWeight weight(law);
  const LogWeightBin bin_of(law);
  Histogram histogram;
  fill_mass_bins(row, all_tiles(row), weight, bin_of, &histogram);
  const uint64_t* masses = histogram.totals();
  const uint64_t bound = top_p_bound(top_p, total_of(masses));
  uint64_t above;
  const int bin = find_mass_bin(masses, bound, &above);
  Candidates candidates;
  if (!collect_bin(row, all_tiles(row), bin_of, bin, law.cutoff, &candidates)) {
    return lowest_in_row(row, weight, bound);
  }
  return cut_bin(candidates, law, above, bound);
}

float top_p_cutoff(const Candidates& candidates, const RowLaw& law, double top_p) {
  uint64_t fixed[kMaxCandidates];
  const uint64_t total = candidate_masses(candidates, law, fixed);
  return lowest_within_mass(candidates, fixed, 0, top_p_bound(top_p, total));
}

// Returns whether law->z is known, too.
bool apply_filters(const Row& row, const Filters& filters, const float* group_max, RowLaw* law) {
  Candidates candidates;
  if (uses_group_max(filters) && collect_top_k(row, filters.top_k, group_max, &candidates)) {
    cut_candidates(candidates, filters, law);
    return true;
  }
  if (has_top_k(filters)) law->cutoff = kth_largest_in(row, filters.top_k);
  if (has_top_p(filters)) raise(&law->cutoff, top_p_cutoff(row, *law, filters.top_p));
  apply_min_p(filters, law);
  return false;
}

}  // namespace

bool uses_group_max(const Filters& filters) {
  return has_top_k(filters) && filters.top_k <= kMaxCandidateTopK;
}

void cut_candidates(const Candidates& candidates, const Filters& filters, RowLaw* law) {
  law->cutoff = kth_largest_of(candidates.values, candidates.count, filters.top_k);
  if (has_top_p(filters)) raise(&law->cutoff, top_p_cutoff(candidates, *law, filters.top_p));
  apply_min_p(filters, law);
  const FloatEntries entries{candidates.values, candidates.values};
  law->z = tile_weight_sum(entries, num_groups(candidates.count), ExpWeight(*law));
}

float cut_bin(const Candidates& candidates, const RowLaw& law, uint64_t above, uint64_t bound) {
  uint64_t fixed[kMaxCandidates];
  candidate_masses(candidates, law, fixed);
  return lowest_within_mass(candidates, fixed, above, bound);
}

void find_cutoffs(const ThreadPool& pool, CutoffTask* tasks, int64_t n) {
  if (pool.ranks != nullptr) return find_cutoffs_over_ranks(pool, tasks, n);
  parallel_for(pool, n, 1, [&](int64_t r) {
    const CutoffTask& task = tasks[r];
    tasks[r].found_z = apply_filters(*task.row, *task.filters, task.group_max, task.law);
  });
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
