// Cutoffs of rows that several ranks hold, by the steps of cutoff.cpp.
//
// Grid: rows over threads; all rows of a call go through each exchange together. Exchanged, a row:
// the k largest group maxima of each rank and the few logits above the k-th of all (a small top-k);
// 96 numbers of each histogram (a larger one: three histograms; top-p: one, and the few logits of
// one of its bins). Numerics: exact, as there.
#include "cutoff.h"
#include "selection.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

Range held_tiles_of(const ThreadPool& pool, const Row& row) {
  return held_tiles(pool, num_tiles(row.vocab));
}

Range groups_of(const Ranks& ranks, int64_t rank, const Row& row) {
  const Range tiles = tiles_of(ranks, rank, num_tiles(row.vocab));
  const int64_t last = num_groups(row.vocab);
  const auto first = [&](int64_t tile) {
    return tile * (kTile / kGroup) < last ? tile * (kTile / kGroup) : last;
  };
  return {first(tiles.begin), first(tiles.end)};
}

// ---- few logits ---

// A list that did not fit.
constexpr int64_t kTooMany = kMaxCandidates + 1;

// Joins each list with those of the other ranks, in the vocabulary's order. One that does not fit
// then, as it would not on one rank, comes back with kTooMany, and none of it is exchanged.
void share_candidates(const ThreadPool& pool, Candidates* lists, int64_t n) {
  if (n == 0) return;
  const Ranks& ranks = *pool.ranks;
  Buffer<int64_t> counts(n), all_counts(ranks.count * n), totals(n), lengths(ranks.count);
  for (int64_t j = 0; j < n; ++j) counts[j] = lists[j].count;
  ranks.gather(ranks, counts.data(), n * sizeof(int64_t), all_counts.data());
  for (int64_t k = 0; k < ranks.count * n; ++k) totals[k % n] += all_counts[k];
  int64_t longest = 0;
  for (int64_t r = 0; r < ranks.count; ++r) {
    for (int64_t j = 0; j < n; ++j) {
      if (totals[j] <= kMaxCandidates) lengths[r] += all_counts[r * n + j];
    }
    if (lengths[r] > longest) longest = lengths[r];
  }
  Buffer<float> mine(longest), all(ranks.count * longest);
  int64_t place = 0;
  for (int64_t j = 0; j < n; ++j) {
    if (totals[j] > kMaxCandidates) continue;
    memcpy(mine.data() + place, lists[j].values, counts[j] * sizeof(float));
    place += counts[j];
  }
  if (longest > 0) ranks.gather(ranks, mine.data(), longest * sizeof(float), all.data());
  for (int64_t j = 0; j < n; ++j) lists[j].count = totals[j] <= kMaxCandidates ? 0 : kTooMany;
  for (int64_t r = 0; r < ranks.count; ++r) {
    const float* theirs = all.data() + r * longest;
    for (int64_t j = 0; j < n; ++j) {
      if (lists[j].count == kTooMany) continue;
      const int64_t count = all_counts[r * n + j];
      memcpy(lists[j].values + lists[j].count, theirs, count * sizeof(float));
      lists[j].count += count;
      theirs += count;
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    if (lists[j].count != kTooMany) lists[j].pad();
  }
}

// Writes the k largest of n values, or all of them and then -inf.
void largest_of(const float* values, int64_t n, int64_t k, float* out) {
  const float least = n > k ? kth_largest_of(values, n, k) : -INFINITY;
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (n <= k || values[i] > least) out[count++] = values[i];
  }
  while (count < k) out[count++] = least;
}

// The k-th largest group maximum of each row, over all ranks; -inf where there are fewer.
void find_floors(const ThreadPool& pool, CutoffTask* const* tasks, int64_t n, float* floors) {
  const Ranks& ranks = *pool.ranks;
  int64_t width = 0;
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t r = 0; r < ranks.count; ++r) {
      const Range groups = groups_of(ranks, r, *tasks[j]->row);
      const int64_t size = groups.end - groups.begin;
      const int64_t needed = size < tasks[j]->filters->top_k ? size : tasks[j]->filters->top_k;
      if (needed > width) width = needed;
    }
  }
  Buffer<float> mine(n * width), all(ranks.count * n * width);
  parallel_for(pool, n, 1, [&](int64_t j) {
    const Range groups = groups_of(ranks, ranks.rank, *tasks[j]->row);
    largest_of(tasks[j]->group_max + groups.begin, groups.end - groups.begin, width,
               mine.data() + j * width);
  });
  ranks.gather(ranks, mine.data(), n * width * sizeof(float), all.data());
  Buffer<float> maxima(ranks.count * width);
  for (int64_t j = 0; j < n; ++j) {
    const int64_t k = tasks[j]->filters->top_k;
    for (int64_t r = 0; r < ranks.count; ++r) {
      memcpy(maxima.data() + r * width, all.data() + (r * n + j) * width, width * sizeof(float));
    }
    floors[j] = num_groups(tasks[j]->row->vocab) >= k
                    ? kth_largest_of(maxima.data(), ranks.count * width, k)
                    : -INFINITY;
  }
}

// All that a small top-k keeps, and the other filters among that.
void cut_among_few(const ThreadPool& pool, CutoffTask* const* tasks, int64_t n) {
  if (n == 0) return;
  Buffer<float> floors(n);
  Buffer<Candidates> found(n);
  find_floors(pool, tasks, n, floors.data());
  parallel_for(pool, n, 1, [&](int64_t j) {
    const Row& row = *tasks[j]->row;
    const Range groups = groups_of(*pool.ranks, pool.ranks->rank, row);
    found[j].count = 0;
    if (!collect_above(row, tasks[j]->group_max, floors[j], groups, &found[j])) {
      found[j].count = kTooMany;
    }
  });
  share_candidates(pool, found.data(), n);
  parallel_for(pool, n, 1, [&](int64_t j) {
    if (found[j].count == kTooMany) return;
    cut_candidates(found[j], *tasks[j]->filters, tasks[j]->law);
    tasks[j]->found_z = true;
  });
}

// ---- histograms ---

// A search in a sum of histograms over ranks goes by blocks of bins first: two short sums are
// exchanged instead of a long one.
constexpr int kBlock = 32;
constexpr int kBlocks = kRadixBins / kBlock;

// Replaces each rank's histograms, [n][kRadixBins], by ones in which search(j, histogram) finds the
// bin that it would find in their sum: the block that it is in has the sum's bins, of the others
// the first bin has all.
template <typename Search>
void share_histograms(const ThreadPool& pool, uint64_t* histograms, int64_t n,
                      const Search& search) {
  Buffer<int64_t> blocks(n * kBlocks), bins(n * kBlock), chosen(n);
  for (int64_t k = 0; k < n * kRadixBins; ++k) {
    blocks[k / kBlock] += static_cast<int64_t>(histograms[k]);
  }
  share_sums(pool, blocks.data(), n * kBlocks);
  for (int64_t j = 0; j < n; ++j) {
    uint64_t* histogram = histograms + j * kRadixBins;
    uint64_t coarse[kRadixBins] = {};
    for (int block = 0; block < kBlocks; ++block) {
      coarse[block * kBlock] = static_cast<uint64_t>(blocks[j * kBlocks + block]);
    }
    chosen[j] = search(j, coarse) / kBlock * kBlock;
    for (int i = 0; i < kBlock; ++i) {
      bins[j * kBlock + i] = static_cast<int64_t>(histogram[chosen[j] + i]);
    }
    memcpy(histogram, coarse, sizeof coarse);
  }
  share_sums(pool, bins.data(), n * kBlock);
  for (int64_t k = 0; k < n * kBlock; ++k) {
    histograms[k / kBlock * kRadixBins + chosen[k / kBlock] + k % kBlock] =
        static_cast<uint64_t>(bins[k]);
  }
}

// Radix selections over whole rows, by count or by mass.
void select_over_ranks(const ThreadPool& pool, CutoffTask* const* tasks, const uint64_t* bounds,
                       bool by_mass, int64_t n, float* found) {
  if (n == 0) return;
  Buffer<RadixSelection> selections(n);
  Buffer<uint64_t> histograms(n * kRadixBins);
  for (int64_t j = 0; j < n; ++j) selections[j] = {0, 0, bounds[j]};
  for (int level = 0; level < kRadixLevels; ++level) {
    parallel_for(pool, n, 1, [&](int64_t j) {
      const Row& row = *tasks[j]->row;
      const Range tiles = held_tiles_of(pool, row);
      Histogram histogram;
      if (by_mass) {
        fill_level_by_mass(row, ExpWeight(*tasks[j]->law), tiles, selections[j], level, &histogram);
      } else {
        fill_level_by_count(row, tiles, selections[j], level, &histogram);
      }
      memcpy(histograms.data() + j * kRadixBins, histogram.totals(), sizeof histogram.turns[0]);
    });
    share_histograms(pool, histograms.data(), n, [&](int64_t j, const uint64_t* histogram) {
      RadixSelection trial = selections[j];
      radix_descend(&trial, histogram, level);
      return static_cast<int>(radix_digit(trial.prefix, level));
    });
    for (int64_t j = 0; j < n; ++j) {
      radix_descend(&selections[j], histograms.data() + j * kRadixBins, level);
    }
  }
  for (int64_t j = 0; j < n; ++j) found[j] = key_value(selections[j].prefix);
}

void cut_top_k(const ThreadPool& pool, CutoffTask* const* tasks, int64_t n) {
  Buffer<uint64_t> bounds(n);
  Buffer<float> found(n);
  for (int64_t j = 0; j < n; ++j) bounds[j] = static_cast<uint64_t>(tasks[j]->filters->top_k);
  select_over_ranks(pool, tasks, bounds.data(), false, n, found.data());
  for (int64_t j = 0; j < n; ++j) tasks[j]->law->cutoff = found[j];
}

void cut_top_p(const ThreadPool& pool, CutoffTask* const* tasks, int64_t n) {
  if (n == 0) return;
  Buffer<uint64_t> histograms(n * kRadixBins), bounds(n), above(n);
  Buffer<Candidates> found(n);
  Buffer<float> cutoffs(n);
  parallel_for(pool, n, 1, [&](int64_t j) {
    const CutoffTask& task = *tasks[j];
    Histogram histogram;
    fill_mass_bins(*task.row, held_tiles_of(pool, *task.row), ExpWeight(*task.law),
                   LogWeightBin(*task.law), &histogram);
    memcpy(histograms.data() + j * kRadixBins, histogram.totals(), sizeof histogram.turns[0]);
  });
  const auto search = [&](int64_t j, const uint64_t* masses) {
    bounds[j] = top_p_bound(tasks[j]->filters->top_p, total_of(masses));
    return find_mass_bin(masses, bounds[j], &above[j]);
  };
  share_histograms(pool, histograms.data(), n, search);
  parallel_for(pool, n, 1, [&](int64_t j) {
    const CutoffTask& task = *tasks[j];
    const int bin = search(j, histograms.data() + j * kRadixBins);
    found[j].count = 0;
    if (!collect_bin(*task.row, held_tiles_of(pool, *task.row), LogWeightBin(*task.law), bin,
                     task.law->cutoff, &found[j])) {
      found[j].count = kTooMany;
    }
  });
  share_candidates(pool, found.data(), n);
  Buffer<CutoffTask*> many(n);
  Buffer<int64_t> places(n);
  Buffer<uint64_t> their_bounds(n);
  Buffer<float> theirs(n);
  int64_t count = 0;
  for (int64_t j = 0; j < n; ++j) {
    if (found[j].count != kTooMany) {
      cutoffs[j] = cut_bin(found[j], *tasks[j]->law, above[j], bounds[j]);
      continue;
    }
    many[count] = tasks[j];
    their_bounds[count] = bounds[j];
    places[count++] = j;
  }
  select_over_ranks(pool, many.data(), their_bounds.data(), true, count, theirs.data());
  for (int64_t k = 0; k < count; ++k) cutoffs[places[k]] = theirs[k];
  for (int64_t j = 0; j < n; ++j) raise(&tasks[j]->law->cutoff, cutoffs[j]);
}

// The tasks that `wanted` chooses.
template <typename Wanted>
int64_t choose(CutoffTask* tasks, int64_t n, const Wanted& wanted, CutoffTask** chosen) {
  int64_t count = 0;
  for (int64_t j = 0; j < n; ++j) {
    if (!tasks[j].found_z && wanted(*tasks[j].filters)) chosen[count++] = &tasks[j];
  }
  return count;
}

}  // namespace

void find_cutoffs_over_ranks(const ThreadPool& pool, CutoffTask* tasks, int64_t n) {
  Buffer<CutoffTask*> chosen(n);
  cut_among_few(pool, chosen.data(), choose(tasks, n, uses_group_max, chosen.data()));
  cut_top_k(pool, chosen.data(), choose(tasks, n, has_top_k, chosen.data()));
  cut_top_p(pool, chosen.data(), choose(tasks, n, has_top_p, chosen.data()));
  for (int64_t j = 0; j < n; ++j) {
    if (!tasks[j].found_z) apply_min_p(*tasks[j].filters, tasks[j].law);
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
