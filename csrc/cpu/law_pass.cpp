// Laws of logits rows: the first pass of every operator.
//
// Grid: (row, tile) units over threads for the passes over the vocabulary, rows over threads for
// the selection of cutoffs (cutoff.cpp). Reads 2 or 4 bytes per vocabulary entry (16- or 32-bit
// logits) for a plain temperature or top-k; top-p and min-p read again, from cache. Writes O(tiles)
// per row. Ranks and entropies come from the same pass, while a tile is in L1. Numerics: fp32
// exponentials against the tile's own maximum, or an entry near it,
// combined in tile order in float64; masses for top-p in 2^-40 fixed point.
#include "law_pass.h"

#include "cutoff.h"
#include "ranks.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// What one pass leaves behind for each tile.
struct TileSummary : TileSweep {
  double extra = 0.0;  // rank, or sum of weight * log(weight)
};

bool needs_group_max(const LawTask& task) {
  return !task.row.linear && uses_group_max(task.filters);
}

// A plain law needs no second look at the row: its sum is taken in the first pass.
bool is_plain(const LawTask& task) {
  return !task.row.linear && !is_greedy(task.filters) && !has_filter(task.filters);
}

// At low temperatures the first group is rarely near the maximum; at huge ones no float is low
// enough to stand for -inf.
constexpr double kMinSweepTemperature = 0.5;
constexpr double kMaxSweepTemperature = 1e30;

bool may_sweep(const LawTask& task) {
  const double temperature = task.filters.temperature;
  return is_plain(task) && temperature >= kMinSweepTemperature &&
         temperature <= kMaxSweepTemperature;
}

// ---- one sweep ---

// Number of entries above a logit. Counts within a tile stay far below 2^24: exact in fp32.
template <typename Entries>
double tile_rank(const Entries& entries, int64_t groups, float logit) {
  const VecF bar = splat(logit), one = splat(1.0f);
  return accumulate_pairs(groups, [&](int64_t i) {
    const VecPair v = entries(i);
    return VecPair{keep_where((VecI)(v.first > bar), one), keep_where((VecI)(v.second > bar), one)};
  });
}

// Sum of weight * log(weight).
template <typename Entries>
double tile_entropy(const Entries& entries, int64_t groups, const ExpWeight& weight, double scale) {
  const VecF slope = splat(static_cast<float>(scale));
  const auto term = [&](VecF x) {  // masked again: 0 * -inf is NaN
    return weight(x) * keep_where((VecI)(x >= weight.threshold), (x - weight.reference) * slope);
  };
  return accumulate_pairs(groups, [&](int64_t i) {
    const VecPair v = entries(i);
    return VecPair{term(v.first), term(v.second)};
  });
}

// What the rule wants from a tile beside its law, from L1.
template <typename Entries>
double tile_extra(const LawTask& task, const Entries& entries, int64_t groups,
                  const TileSummary& s) {
  if (task.want.kind == Extra::kRank) return tile_rank(entries, groups, task.want.logit);
  if (task.want.kind != Extra::kEntropy || !is_plain(task) || !(s.sum > 0.0)) return 0.0;
  const double scale = 1.0 / task.filters.temperature;
  const float threshold = support_threshold(-INFINITY, s.reference, scale);
  return tile_entropy(entries, groups, ExpWeight(s.reference, scale, threshold), scale);
}

template <typename Entries>
TileSummary scan_entries(const LawTask& task, const Entries& entries, int64_t groups,
                         float* group_max) {
  TileSummary s;
  const double scale = 1.0 / task.filters.temperature;
  if (may_sweep(task) && sweep_tile(entries, groups, scale, nullptr, &s)) return s;
  s.sum = 0.0;
  s.valid = tile_max(entries, groups, &s.max, group_max);
  s.reference = s.max;
  if (is_plain(task) && s.valid && s.max > -INFINITY) {
    const float threshold = support_threshold(-INFINITY, s.max, scale);
    s.sum = tile_weight_sum(entries, groups, ExpWeight(s.max, scale, threshold));
  }
  return s;
}

TileSummary scan_logits(const LawTask& task, int64_t tile, float* group_max) {
  return with_entries(task.row, tile, [&](const auto& entries, int64_t groups) {
    TileSummary s = scan_entries(task, entries, groups, group_max);
    if (task.want.kind != Extra::kNone) s.extra = tile_extra(task, entries, groups, s);
    return s;
  });
}

TileSummary scan_probabilities(const LawTask& task, int64_t tile) {
  return with_entries(task.row, tile, [&](const auto& entries, int64_t groups) {
    VecI valid = (VecI)(VecF{} == VecF{});
    TileSummary s;
    s.max = s.reference = 0.0f;
    s.sum = accumulate_pairs(groups, [&](int64_t i) {
      const VecPair v = entries(i);
      valid &= (VecI)(v.first >= 0.0f) & (VecI)(v.first <= FLT_MAX);
      valid &= (VecI)(v.second >= 0.0f) & (VecI)(v.second <= FLT_MAX);
      return v;
    });
    s.valid = all_lanes(valid);
    return s;
  });
}

// The law of a list of tokens, by the sums of scan_probabilities: what is not listed adds 0 there.
RowLaw listed_law(const Row& row) {
  RowLaw law;
  law.linear = law.valid = true;
  const float* probs = static_cast<const float*>(row.data);
  for (int32_t k = 0; k < row.listed;) {
    const int64_t begin = row.tokens[k] / kTile * kTile;
    float sums[kAccumulators][kLanes] = {};
    for (; k < row.listed && row.tokens[k] < begin + kTile; ++k) {
      if (!is_allowed(row, row.tokens[k])) continue;
      const int64_t place = (row.tokens[k] - begin) % (kAccumulators * kLanes);
      law.valid &= probs[k] >= 0.0f && probs[k] <= FLT_MAX;
      sums[place / kLanes][place % kLanes] += probs[k];
    }
    law.z += sum_lanes((load<VecF>(sums[0]) + load<VecF>(sums[1])) +
                       (load<VecF>(sums[2]) + load<VecF>(sums[3])));
  }
  law.valid &= law.z > 0.0;
  return law;
}

// The first entry of a tile that equals its maximum (bounded as the search in draw.cpp is).
int64_t find_first(const Row& row, int64_t tile, float value) {
  float buffer[kTile];
  const int64_t groups = tile_groups(row.vocab, tile);
  const float* x = view_tile(row, tile, groups, buffer);
  int64_t i = 0;
  while (tile * kTile + i < row.vocab - 1 && i < kTile - 1 && x[i] != value) ++i;
  return tile * kTile + i;
}

// Combines the tiles of one row, in tile order. The arg max is found where its tile is worked on.
void combine_tiles(LawTask* task, const TileSummary* tiles, Range held) {
  RowLaw& law = task->law;
  const int64_t n = num_tiles(task->row.vocab);
  bool valid = true;
  float max = -INFINITY;
  for (int64_t t = 0; t < n; ++t) {
    valid &= tiles[t].valid;
    max = tiles[t].max > max ? tiles[t].max : max;
  }
  law = RowLaw{};
  law.linear = task->row.linear;
  law.max = max;
  if (law.linear) {
    for (int64_t t = 0; t < n; ++t) law.z += tiles[t].sum;
    law.valid = valid && law.z > 0.0;
    return;
  }
  law.valid = valid && max > -INFINITY;
  if (!law.valid) return;
  for (int64_t t = 0; t < n && task->want.kind == Extra::kRank; ++t) task->extra += tiles[t].extra;
  law.point_mass = is_greedy(task->filters);
  if (law.point_mass || task->want_argmax) {
    int64_t t = 0;
    while (tiles[t].max != max) ++t;
    if (held.holds(t)) law.argmax = find_first(task->row, t, max);
  }
  if (law.point_mass) {
    law.cutoff = max;
    law.scale = INFINITY;
    law.z = 1.0;
    return;
  }
  law.scale = 1.0 / task->filters.temperature;
  if (!is_plain(*task)) return;
  double entropy = 0.0;
  for (int64_t t = 0; t < n; ++t) {
    if (!(tiles[t].sum > 0.0)) continue;
    const double shift = law.scale * (static_cast<double>(tiles[t].reference) - max);
    law.z += tiles[t].sum * exp(shift);
    entropy += exp(shift) * (tiles[t].extra + shift * tiles[t].sum);
  }
  if (task->want.kind == Extra::kEntropy) task->extra = log(law.z) - entropy / law.z;
}

double filtered_tile_sum(const LawTask& task, int64_t tile) {
  return with_entries(task.row, tile, [&](const auto& entries, int64_t groups) {
    return tile_weight_sum(entries, groups, ExpWeight(task.law));
  });
}

double filtered_tile_entropy(const LawTask& task, int64_t tile) {
  return with_entries(task.row, tile, [&](const auto& entries, int64_t groups) {
    return tile_entropy(entries, groups, ExpWeight(task.law), task.law.scale);
  });
}

// Tells all ranks the arg maxima that one of them has found.
void share_arg_maxima(const ThreadPool& pool, LawTask* const* tasks, int64_t n) {
  if (pool.ranks == nullptr) return;
  Buffer<int64_t> wanted(n), found(n);
  int64_t count = 0;
  for (int64_t r = 0; r < n; ++r) {
    const LawTask& task = *tasks[r];
    if (!task.law.valid || !(task.law.point_mass || task.want_argmax)) continue;
    found[count] = task.law.argmax + 1;  // 0: another rank has it
    wanted[count++] = r;
  }
  share_sums(pool, found.data(), count);
  for (int64_t j = 0; j < count; ++j) tasks[wanted[j]]->law.argmax = found[j] - 1;
}

void compute_filtered(const ThreadPool& pool, LawTask* const* tasks, int64_t n, int64_t tiles,
                      TileSummary* summaries, const float* group_max) {
  Buffer<bool> pending(n);
  Buffer<bool> wants_entropy(n);
  Buffer<CutoffTask> cutoffs(n);
  Buffer<int64_t> filtered(n);
  int64_t count = 0;
  for (int64_t r = 0; r < n; ++r) {
    LawTask& task = *tasks[r];
    if (!task.law.valid || task.law.linear || task.law.point_mass || is_plain(task)) continue;
    cutoffs[count] = {&task.row, &task.filters, group_max + r * num_groups(kTile) * tiles,
                      &task.law, false};
    filtered[count++] = r;
  }
  find_cutoffs(pool, cutoffs.data(), count);
  for (int64_t j = 0; j < count; ++j) {
    pending[filtered[j]] = !cutoffs[j].found_z;
    wants_entropy[filtered[j]] = tasks[filtered[j]]->want.kind == Extra::kEntropy;
  }
  const Range held = held_tiles(pool, tiles);
  parallel_for(pool, n * tiles, kTilesPerThread, [&](int64_t unit) {
    const LawTask& task = *tasks[unit / tiles];
    const int64_t tile = unit % tiles;
    if (tile >= num_tiles(task.row.vocab) || !held.holds(tile)) return;
    if (pending[unit / tiles]) summaries[unit].sum = filtered_tile_sum(task, tile);
    if (wants_entropy[unit / tiles]) summaries[unit].extra = filtered_tile_entropy(task, tile);
  });
  int64_t summed = 0;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t r = filtered[j];
    if (pending[r] || wants_entropy[r]) filtered[summed++] = r;
  }
  share_tiles(pool, summaries, tiles, filtered.data(), summed);
  for (int64_t r = 0; r < n; ++r) {
    LawTask& task = *tasks[r];
    double entropy = 0.0;
    for (int64_t t = 0; t < num_tiles(task.row.vocab); ++t) {
      if (pending[r]) task.law.z += summaries[r * tiles + t].sum;
      if (wants_entropy[r]) entropy += summaries[r * tiles + t].extra;
    }
    if (wants_entropy[r]) task.extra = log(task.law.z) - entropy / task.law.z;
  }
}

}  // namespace

void compute_laws(const ThreadPool& pool, LawTask* tasks, int64_t n) {
  // Absent rows and lists get no units: they would leave the threads unevenly loaded.
  Buffer<LawTask*> present(n);
  Buffer<int64_t> numbers(n);
  int64_t rows = 0;
  int64_t tiles = 1;
  bool any_filter = false;
  bool any_group_max = false;
  bool any_list = false;
  for (int64_t i = 0; i < n; ++i) {
    tasks[i].law = RowLaw{};
    tasks[i].extra = 0.0;
    if (tasks[i].row.data == nullptr) continue;
    if (tasks[i].row.listed > 0) {
      any_list = true;
      continue;
    }
    numbers[rows] = rows;
    present[rows++] = &tasks[i];
    const int64_t row_tiles = num_tiles(tasks[i].row.vocab);
    tiles = row_tiles > tiles ? row_tiles : tiles;
    any_filter |= has_filter(tasks[i].filters);
    any_group_max |= needs_group_max(tasks[i]);
  }
  parallel_for(pool, any_list ? n : 0, kListsPerThread, [&](int64_t i) {
    if (tasks[i].row.listed > 0) tasks[i].law = listed_law(tasks[i].row);
  });
  const int64_t groups_per_row = num_groups(kTile) * tiles;
  Buffer<TileSummary> summaries(rows * tiles);
  Buffer<float> group_max(any_group_max ? rows * groups_per_row : 0);
  const Range held = held_tiles(pool, tiles);
  parallel_for(pool, rows * tiles, kTilesPerThread, [&](int64_t unit) {
    const int64_t r = unit / tiles;
    const int64_t tile = unit % tiles;
    const LawTask& task = *present[r];
    if (tile >= num_tiles(task.row.vocab) || !held.holds(tile)) return;
    float* maxima = needs_group_max(task)
                        ? group_max.data() + r * groups_per_row + tile * num_groups(kTile)
                        : nullptr;
    summaries[unit] =
        task.row.linear ? scan_probabilities(task, tile) : scan_logits(task, tile, maxima);
  });
  share_tiles(pool, summaries.data(), tiles, numbers.data(), rows);
  for (int64_t r = 0; r < rows; ++r) {
    combine_tiles(present[r], summaries.data() + r * tiles, held);
  }
  share_arg_maxima(pool, present.data(), rows);
  if (any_filter) {
    compute_filtered(pool, present.data(), rows, tiles, summaries.data(), group_max.data());
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
