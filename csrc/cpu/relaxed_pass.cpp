// Ranks (top_beta) and entropies (typical), one more read of each row that is asked about.
//
// Grid: (row, tile) units over threads. Reads 2 or 4 bytes per entry. Numerics: counts are exact;
// entropies are fp32 tile sums combined in float64 in tile order.
#include "relaxed_pass.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// values[r] = sum over tiles of tile_value(r, x, groups, tile), where wanted(r).
template <typename Wanted, typename TileValue>
void sum_tiles(const ThreadPool& pool, const LawTask* tasks, int64_t n, double* values,
               const Wanted& wanted, const TileValue& tile_value) {
  int64_t tiles = 1;
  for (int64_t r = 0; r < n; ++r) {
    if (num_tiles(tasks[r].row.vocab) > tiles) tiles = num_tiles(tasks[r].row.vocab);
  }
  Buffer<double> sums(n * tiles);
  parallel_for(pool, n * tiles, kTilesPerThread, [&](int64_t unit) {
    const int64_t r = unit / tiles;
    const int64_t tile = unit % tiles;
    if (!wanted(r) || tile >= num_tiles(tasks[r].row.vocab)) return;
    float buffer[kTile];
    const int64_t groups = tile_groups(tasks[r].row.vocab, tile);
    sums[unit] = tile_value(r, view_tile(tasks[r].row, tile, groups, buffer), groups);
  });
  for (int64_t r = 0; r < n; ++r) {
    values[r] = 0.0;
    for (int64_t t = 0; t < tiles; ++t) values[r] += sums[r * tiles + t];
  }
}

}  // namespace

void count_greater(const ThreadPool& pool, const LawTask* tasks, const int64_t* tokens, int64_t n,
                   double* values) {
  sum_tiles(
      pool, tasks, n, values,
      [&](int64_t r) {
        return tasks[r].law.valid && tokens[r] >= 0 && tokens[r] < tasks[r].row.vocab;
      },
      [&](int64_t r, const float* x, int64_t groups) {
        const VecF logit = splat(row_value(tasks[r].row, tokens[r]));
        // Counts within a tile stay far below 2^24: exact in fp32.
        return accumulate(groups, [&](int64_t i) {
          return keep_where((VecI)(load<VecF>(x + i) > logit), splat(1.0f));
        });
      });
}

void entropies(const ThreadPool& pool, const LawTask* tasks, const bool* active, int64_t n,
               double* values) {
  sum_tiles(
      pool, tasks, n, values,
      [&](int64_t r) { return active[r] && tasks[r].law.valid && !tasks[r].law.point_mass; },
      [&](int64_t r, const float* x, int64_t groups) {
        const RowLaw& law = tasks[r].law;
        const ExpWeight weight(law);
        const VecF scale = splat(static_cast<float>(law.scale));
        return accumulate(groups, [&](int64_t i) {
          const VecF v = load<VecF>(x + i);
          // Masked again: 0 * -inf is NaN.
          return weight(v) *
                 keep_where((VecI)(v >= weight.threshold), (v - weight.reference) * scale);
        });
      });
  for (int64_t r = 0; r < n; ++r) {
    const RowLaw& law = tasks[r].law;
    if (active[r] && law.valid && !law.point_mass) values[r] = log(law.z) - values[r] / law.z;
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
