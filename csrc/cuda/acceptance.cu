// acceptance: sum_x min(p(x), q(x)) per row.
//
// Launches: scan_rows over the rows of both (scan.cuh); with filters a block a row for the
// cutoffs (cutoff.cuh); the overlap, a block for a few tiles of a pair of rows, the pair's last
// block adding them up. Reads 2 or 4 bytes per vocabulary entry of both rows, twice (the second
// time from L2 as a rule), and what a mask costs (tile.cuh); writes 4 bytes a row. A reduced draft
// vocabulary takes two launches more (token_map.cuh). Numerics: fp32 within a thread, float64 in
// tile order above.
#include "kernels.h"
#include "row_laws.cuh"
#include "shared.cuh"
#include "token_map.cuh"

namespace specdec {
namespace cuda {
namespace {

// Target rows, then draft rows.
struct Rows {
  AcceptanceParams p;

  __device__ RowTask operator()(int64_t r) const {
    if (r < p.rows) {
      return {target_row(p, r), filters_at(p.target_sampling, r, p.target.vocab), {}};
    }
    r -= p.rows;
    return {draft_row(p, r), filters_at(p.draft_sampling, r, p.draft.vocab), {}};
  }
};

struct Pair {
  LawRow target;
  LawRow draft;
  Row draft_by_token;
  bool defined;  // else the overlap is NaN
};

// What is known of an overlap without a look at the rows: NaN, or where one law is a point mass the
// other's probability there. Whether that is all.
__device__ bool known_overlap(const Pair& pair, double* overlap) {
  *overlap = NAN;
  if (!pair.defined) return true;
  const bool target_is_point = pair.target.law.point_mass;
  const LawRow& point = target_is_point ? pair.target : pair.draft;
  const LawRow& other = target_is_point ? pair.draft : pair.target;
  if (!point.law.point_mass) return false;
  const int64_t entry = entry_of_token(other.row, token_of_entry(point.row, point.law.argmax));
  *overlap = entry >= 0 ? law_probability(other.law, row_value(other.row, entry), entry) : 0.0;
  return true;
}

__device__ void load_pair(const Rows& rows, const LawScratch& s, int64_t r, Pair* shared) {
  const int64_t warp = threadIdx.x / kWarp;
  for (int64_t side = warp; side < 2; side += kWarps) {
    const int64_t at = r + side * rows.p.rows;
    const RowTask task = rows(at);
    RowLaw law = law_of(task, s, at);
    law.valid = law.valid && !task.filters.out_of_range;
    if (threadIdx.x % kWarp == 0) (side == 0 ? shared->target : shared->draft) = {task.row, law};
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    shared->draft_by_token = in_token_order(shared->draft.row);
    shared->defined = shared->target.law.valid && shared->draft.law.valid;
  }
  __syncthreads();
}

__device__ float thread_overlap(const Pair& pair, int64_t tile) {
  RawTile target_raw, draft_raw;
  load_tile<Layout::kStriped>(pair.target.row, tile, &target_raw);
  load_tile<Layout::kStriped, Elements::kAny, true>(pair.draft_by_token, tile, &draft_raw);
  float p[kPerThread], q[kPerThread];
  widen_tile<Layout::kStriped>(pair.target.row, tile, target_raw, p);
  widen_tile<Layout::kStriped>(pair.draft_by_token, tile, draft_raw, q);
  const ExpWeight target_weight(pair.target.law), draft_weight(pair.draft.law);
  const float target_scale = static_cast<float>(1.0 / pair.target.law.z);
  const float draft_scale = static_cast<float>(1.0 / pair.draft.law.z);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    sums[j % 4] += fminf(target_scale * target_weight(p[j]), draft_scale * draft_weight(q[j]));
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Grid: (row, split).
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    sum_overlaps(const Rows rows, const LawScratch s, double* tile_sums, Divisor splits) {
  begin_kernel();
  __shared__ SharedArray<Pair, 1> pair;
  const auto [r, split] = this_unit(splits);
  load_pair(rows, s, r, pair.data());
  const int64_t tiles = num_tiles(rows.p.target.vocab);
  double overlap = 0.0;
  if (known_overlap(pair[0], &overlap)) {
    if (split == 0 && threadIdx.x == 0) rows.p.acceptance[r] = static_cast<float>(overlap);
    return;
  }
  const Share share = share_of(tiles, split, splits);
  double* sums = tile_sums + r * tiles;
  sum_each_tile(share.first, share.last, sums + share.first,
                [&](int64_t tile) { return thread_overlap(pair[0], tile); });
  if (!is_last_block(s.counters + r, splits) || threadIdx.x >= kWarp) return;
  overlap = sum_tiles(sums, tiles);
  if (threadIdx.x == 0) {
    rows.p.acceptance[r] = static_cast<float>(overlap < 1.0 ? overlap : 1.0);
  }
}

}  // namespace

void acceptance(const AcceptanceParams& given, const Gpu& gpu) {
  if (given.rows == 0) return;
  AcceptanceParams p = given;
  Workspace workspace;
  const int64_t target_tiles = num_tiles(p.target.vocab);
  const int64_t draft_tiles = num_tiles(p.draft.vocab);
  const int64_t tiles = target_tiles > draft_tiles ? target_tiles : draft_tiles;
  const bool filters = has_filter_arrays(p.target_sampling) || has_filter_arrays(p.draft_sampling);
  const LawReservation reserved = reserve_laws(&workspace, 2 * p.rows, tiles, {filters});
  const auto tile_sums = workspace.reserve<double>(p.rows * target_tiles);
  const MapReservation map = reserve_map(&workspace, p.map);
  workspace.allocate(gpu);
  launch_map(gpu, workspace, map, &p.map);
  const LawScratch s = laws_at(workspace, reserved, 2 * p.rows, tiles, {filters});
  launch_laws(gpu, Rows{p}, s);
  const int64_t splits = splits_for(gpu, p.rows, target_tiles);
  launch(gpu, "sum_overlaps", sum_overlaps, p.rows * splits, Rows{p}, s, workspace.at(tile_sums),
         splits);
}

void load_acceptance(Loading& load) {
  load(sum_overlaps);
  load_laws<Rows>(load);
  load_map(load);
}

}  // namespace cuda
}  // namespace specdec
