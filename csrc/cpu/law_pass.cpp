// Laws of logits rows: the first pass of every operator.
//
// Grid: (row, tile) units over threads for the passes over the vocabulary, rows over threads for
// the selection of cutoffs (cutoff.cpp). Reads 2 or 4 bytes per vocabulary entry (16- or 32-bit
// logits) for a plain temperature or top-k; top-p and min-p read again, from cache. Writes O(tiles)
// per row. Numerics: fp32 exponentials against the tile's own maximum, combined in tile order in
// float64; masses for top-p in 2^-40 fixed point.
#include "law_pass.h"

#include "cutoff.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// What one pass leaves behind for each tile.
struct TileSummary {
  float max;
  bool fine;
  double sum;
};

bool needs_group_max(const LawTask& task) {
  return !task.row.linear && uses_group_max(task.filters);
}

// A plain law needs no second look: its sum is taken in the first pass, against the tile's maximum.
bool is_plain(const LawTask& task) {
  return !task.row.linear && !is_greedy(task.filters) && !has_filter(task.filters);
}

TileSummary scan_logits(const LawTask& task, int64_t tile, float* group_max) {
  float buffer[kTile];
  const int64_t groups = tile_groups(task.row.vocab, tile);
  const float* x = view_tile(task.row, tile, groups, buffer);
  TileSummary s{-INFINITY, true, 0.0};
  s.fine = tile_max(x, groups, &s.max, group_max);
  if (is_plain(task) && s.fine && s.max > -INFINITY) {
    const double scale = 1.0 / task.filters.temperature;
    s.sum = tile_weight_sum(x, groups,
                            ExpWeight(s.max, scale, support_threshold(-INFINITY, s.max, scale)));
  }
  return s;
}

TileSummary scan_probabilities(const LawTask& task, int64_t tile) {
  float buffer[kTile];
  const int64_t groups = tile_groups(task.row.vocab, tile);
  const float* x = view_tile(task.row, tile, groups, buffer);
  VecI fine = (VecI)(VecF{} == VecF{});
  TileSummary s{0.0f, true, 0.0};
  s.sum = accumulate(groups, [&](int64_t i) {
    const VecF v = load<VecF>(x + i);
    fine &= (VecI)(v >= 0.0f) & (VecI)(v <= FLT_MAX);
    return v;
  });
  s.fine = all_lanes(fine);
  return s;
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

// Combines the tiles of one row, in tile order.
void combine_tiles(LawTask* task, const TileSummary* tiles) {
  RowLaw& law = task->law;
  const int64_t n = num_tiles(task->row.vocab);
  bool fine = true;
  float max = -INFINITY;
  for (int64_t t = 0; t < n; ++t) {
    fine &= tiles[t].fine;
    max = tiles[t].max > max ? tiles[t].max : max;
  }
  law = RowLaw{};
  law.linear = task->row.linear;
  law.max = max;
  if (law.linear) {
    for (int64_t t = 0; t < n; ++t) law.z += tiles[t].sum;
    law.valid = fine && law.z > 0.0;
    return;
  }
  law.valid = fine && max > -INFINITY;
  if (!law.valid) return;
  law.point_mass = is_greedy(task->filters);
  if (law.point_mass || task->want_argmax) {
    int64_t t = 0;
    while (tiles[t].max != max) ++t;
    law.argmax = find_first(task->row, t, max);
  }
  if (law.point_mass) {
    law.cutoff = max;
    law.scale = INFINITY;
    law.z = 1.0;
    return;
  }
  law.scale = 1.0 / task->filters.temperature;
  if (!is_plain(*task)) return;
  for (int64_t t = 0; t < n; ++t) {
    if (tiles[t].sum > 0.0) {
      law.z += tiles[t].sum * exp(law.scale * (static_cast<double>(tiles[t].max) - max));
    }
  }
}

double filtered_tile_sum(const LawTask& task, int64_t tile) {
  float buffer[kTile];
  const int64_t groups = tile_groups(task.row.vocab, tile);
  const float* x = view_tile(task.row, tile, groups, buffer);
  return tile_weight_sum(x, groups, ExpWeight(task.law));
}

void compute_filtered(const ThreadPool& pool, LawTask* const* tasks, int64_t n, int64_t tiles,
                      TileSummary* summaries, const float* group_max) {
  Buffer<bool> pending(n);
  parallel_for(pool, n, 1, [&](int64_t r) {
    LawTask& task = *tasks[r];
    if (!task.law.valid || task.law.linear || task.law.point_mass || is_plain(task)) return;
    pending[r] = !apply_filters(task.row, task.filters, group_max + r * num_groups(kTile) * tiles,
                                &task.law);
  });
  parallel_for(pool, n * tiles, kTilesPerThread, [&](int64_t unit) {
    const LawTask& task = *tasks[unit / tiles];
    const int64_t tile = unit % tiles;
    if (pending[unit / tiles] && tile < num_tiles(task.row.vocab)) {
      summaries[unit].sum = filtered_tile_sum(task, tile);
    }
  });
  for (int64_t r = 0; r < n; ++r) {
    if (!pending[r]) continue;
    for (int64_t t = 0; t < num_tiles(tasks[r]->row.vocab); ++t) {
      tasks[r]->law.z += summaries[r * tiles + t].sum;
    }
  }
}

}  // namespace

void compute_laws(const ThreadPool& pool, LawTask* tasks, int64_t n) {
  // Absent rows get no units: they would leave the threads unevenly loaded.
  Buffer<LawTask*> present(n);
  int64_t rows = 0;
  int64_t tiles = 1;
  bool any_filter = false;
  bool any_group_max = false;
  for (int64_t i = 0; i < n; ++i) {
    tasks[i].law = RowLaw{};
    if (tasks[i].row.data == nullptr) continue;
    present[rows++] = &tasks[i];
    const int64_t row_tiles = num_tiles(tasks[i].row.vocab);
    tiles = row_tiles > tiles ? row_tiles : tiles;
    any_filter |= has_filter(tasks[i].filters);
    any_group_max |= needs_group_max(tasks[i]);
  }
  const int64_t groups_per_row = num_groups(kTile) * tiles;
  Buffer<TileSummary> summaries(rows * tiles);
  Buffer<float> group_max(any_group_max ? rows * groups_per_row : 0);
  parallel_for(pool, rows * tiles, kTilesPerThread, [&](int64_t unit) {
    const int64_t r = unit / tiles;
    const int64_t tile = unit % tiles;
    const LawTask& task = *present[r];
    if (tile >= num_tiles(task.row.vocab)) return;
    float* maxima = needs_group_max(task)
                        ? group_max.data() + r * groups_per_row + tile * num_groups(kTile)
                        : nullptr;
    summaries[unit] =
        task.row.linear ? scan_probabilities(task, tile) : scan_logits(task, tile, maxima);
  });
  for (int64_t r = 0; r < rows; ++r) combine_tiles(present[r], summaries.data() + r * tiles);
  if (any_filter) {
    compute_filtered(pool, present.data(), rows, tiles, summaries.data(), group_max.data());
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
