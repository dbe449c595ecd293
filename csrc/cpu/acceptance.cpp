// acceptance: sum_x min(p(x), q(x)) per row.
//
// Grid: (row, tile) units over threads. Reads both rows for their laws and once more, together, for
// the sum. Writes 4 bytes a row. Numerics: fp32 tile sums combined in float64 in tile order.
#include "kernels.h"
#include "law_pass.h"
#include "token_map.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

double tile_overlap(const LawTask& target, const LawTask& draft, int64_t tile) {
  float target_buffer[kTile], draft_buffer[kTile];
  const int64_t groups = tile_groups(target.row.vocab, tile);
  const float* p = view_tile(target.row, tile, groups, target_buffer);
  const float* q = view_tile(in_token_order(draft.row), tile, groups, draft_buffer);
  const ExpWeight target_weight(target.law), draft_weight(draft.law);
  const VecF target_scale = splat(static_cast<float>(1.0 / target.law.z));
  const VecF draft_scale = splat(static_cast<float>(1.0 / draft.law.z));
  return accumulate(groups, [&](int64_t i) {
    return min_of(target_scale * target_weight(load<VecF>(p + i)),
                  draft_scale * draft_weight(load<VecF>(q + i)));
  });
}

// Where one of the laws is a point mass, the overlap is the other's probability there.
bool point_overlap(const LawTask& target, const LawTask& draft, double* overlap) {
  const LawTask& point = target.law.point_mass ? target : draft;
  const LawTask& other = target.law.point_mass ? draft : target;
  if (!point.law.point_mass) return false;
  const int64_t entry = entry_of_token(other.row, token_of_entry(point.row, point.law.argmax));
  *overlap = entry >= 0 ? law_probability(other.law, row_value(other.row, entry), entry) : 0.0;
  return true;
}

bool has_overlap(const LawTask& target, const LawTask& draft) {
  return target.law.valid && draft.law.valid && !target.filters.out_of_range &&
         !draft.filters.out_of_range;
}

}  // namespace

void acceptance(const AcceptanceParams& given, const ThreadPool& pool) {
  AcceptanceParams p = given;
  const MapStorage storage(&p.map);
  const int64_t tiles = num_tiles(p.target.vocab);
  Buffer<LawTask> tasks(2 * p.rows);
  LawTask* targets = tasks.data();
  LawTask* drafts = tasks.data() + p.rows;
  for (int64_t r = 0; r < p.rows; ++r) {
    targets[r] = LawTask(target_row(p, r), filters_at(p.target_sampling, r, p.target.vocab));
    drafts[r] = LawTask(draft_row(p, r), filters_at(p.draft_sampling, r, p.draft.vocab));
  }
  compute_laws(pool, tasks.data(), 2 * p.rows);
  Buffer<double> sums(p.rows * tiles);
  parallel_for(pool, p.rows * tiles, kTilesPerThread, [&](int64_t unit) {
    const LawTask& target = targets[unit / tiles];
    const LawTask& draft = drafts[unit / tiles];
    double ignored = 0.0;
    if (has_overlap(target, draft) && !point_overlap(target, draft, &ignored)) {
      sums[unit] = tile_overlap(target, draft, unit % tiles);
    }
  });
  for (int64_t r = 0; r < p.rows; ++r) {
    double overlap = NAN;
    if (has_overlap(targets[r], drafts[r]) && !point_overlap(targets[r], drafts[r], &overlap)) {
      overlap = 0.0;
      for (int64_t t = 0; t < tiles; ++t) overlap += sums[r * tiles + t];
      overlap = overlap < 1.0 ? overlap : 1.0;
    }
    p.acceptance[r] = static_cast<float>(overlap);
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
