// Final draws by inverse CDF in integers.
//
// Grid: (request, tile) units over threads. A draw from a law reads its row once for the tiles'
// sums and one tile again; a residual draw reads both rows twice (mass, then weights) and one tile
// again. Writes 8 bytes per tile. Numerics: weights in fp32, scaled in float64, summed as uint64.
#include "draw.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

struct TileBuffers {
  float target[kTile];
  float draft[kTile];
};

// Calls body(groups, weight_at) where weight_at(i) are the kLanes weights at offset i of the tile.
template <typename Body>
auto with_residual_tile(const DrawTask& task, int64_t tile, TileBuffers* buffers,
                        const Body& body) {
  const int64_t groups = tile_groups(task.target.vocab, tile);
  const float* p = view_tile(task.target, tile, groups, buffers->target, task.excluded);
  const ExpWeight target_weight(task.target_law);
  const VecF target_scale = splat(static_cast<float>(task.coefficients.target / task.target_law.z));
  if (task.draft.data == nullptr) {
    return body(groups, [&](int64_t i) { return target_scale * target_weight(load<VecF>(p + i)); });
  }
  const float* q = view_tile(task.draft, tile, groups, buffers->draft);
  const VecF draft_scale = splat(static_cast<float>(task.coefficients.draft / task.draft_law.z));
  return with_weight(task.draft_law, [&](auto draft_weight) {
    return body(groups, [&](int64_t i) {
      return positive_part(target_scale * target_weight(load<VecF>(p + i)) -
                           draft_scale * draft_weight(load<VecF>(q + i)));
    });
  });
}

template <typename Body>
auto with_law_tile(const DrawTask& task, int64_t tile, TileBuffers* buffers, const Body& body) {
  const int64_t groups = tile_groups(task.target.vocab, tile);
  const float* p = view_tile(task.target, tile, groups, buffers->target);
  const ExpWeight weight(task.target_law);
  return body(groups, [&](int64_t i) { return weight(load<VecF>(p + i)); });
}

// Fixed-point weights of one tile: `out` holds kTile values. The same function for the sums and for
// the search, so that they agree to the bit.
uint64_t fixed_tile(const DrawTask& task, double unit, int64_t tile, uint64_t* out) {
  TileBuffers buffers;
  if (!task.residual) {
    return with_law_tile(task, tile, &buffers, [&](int64_t groups, const auto& weight_at) {
      return tile_fixed(groups, LawUnit{}, out, weight_at);
    });
  }
  return with_residual_tile(task, tile, &buffers, [&](int64_t groups, const auto& weight_at) {
    return tile_fixed(groups, ResidualUnit{unit}, out, weight_at);
  });
}

// The lowest index whose inclusive prefix sum exceeds t, given the tiles' sums. The bounds matter
// only where another thread changes the logits meanwhile: no read may leave the row even then.
int64_t search(const DrawTask& task, double unit, const uint64_t* tile_sums, uint64_t t) {
  const int64_t last_tile = num_tiles(task.target.vocab) - 1;
  int64_t tile = 0;
  while (tile < last_tile && tile_sums[tile] <= t) t -= tile_sums[tile++];
  uint64_t fixed[kTile];
  fixed_tile(task, unit, tile, fixed);
  const int64_t first = tile * kTile;
  const int64_t left = task.target.vocab - first;
  const int64_t last = (left < kTile ? left : kTile) - 1;
  int64_t i = 0;
  while (i < last && fixed[i] <= t) t -= fixed[i++];
  return first + i;
}

int64_t max_tiles(const DrawTask* tasks, int64_t n) {
  int64_t tiles = 1;
  for (int64_t r = 0; r < n; ++r) {
    if (num_tiles(tasks[r].target.vocab) > tiles) tiles = num_tiles(tasks[r].target.vocab);
  }
  return tiles;
}

}  // namespace

void residual_masses(const ThreadPool& pool, const DrawTask* tasks, int64_t n, double* masses) {
  // Only tasks with a residual get units: others would leave the threads unevenly loaded.
  const int64_t tiles = max_tiles(tasks, n);
  Buffer<int64_t> wanted(n);
  int64_t count = 0;
  for (int64_t r = 0; r < n; ++r) {
    masses[r] = 0.0;
    if (needs_draw(tasks[r]) && tasks[r].residual) wanted[count++] = r;
  }
  Buffer<double> tile_masses(count * tiles);
  parallel_for(pool, count * tiles, kTilesPerThread, [&](int64_t unit) {
    const DrawTask& task = tasks[wanted[unit / tiles]];
    const int64_t tile = unit % tiles;
    if (tile >= num_tiles(task.target.vocab)) return;
    TileBuffers buffers;
    tile_masses[unit] = with_residual_tile(
        task, tile, &buffers,
        [](int64_t groups, const auto& weight_at) { return accumulate(groups, weight_at); });
  });
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t t = 0; t < tiles; ++t) masses[wanted[j]] += tile_masses[j * tiles + t];
  }
}

void draw_tokens(const ThreadPool& pool, DrawTask* tasks, int64_t n) {
  const int64_t tiles = max_tiles(tasks, n);
  Buffer<double> units(n);
  Buffer<bool> pending(n);
  Buffer<uint64_t> tile_sums(n * tiles);
  residual_masses(pool, tasks, n, units.data());
  bool any = false;
  for (int64_t r = 0; r < n; ++r) {
    DrawTask& task = tasks[r];
    if (task.active && task.target_law.point_mass) task.token = task.target_law.argmax;
    pending[r] = needs_draw(task);
    any |= pending[r];
    // No residual mass, by rounding or because p = q: the target's own law is what is left.
    if (task.residual && !(units[r] > 0.0)) task.residual = false;
    if (task.residual) units[r] = residual_unit(units[r]);
  }
  while (any) {
    parallel_for(pool, n * tiles, kTilesPerThread, [&](int64_t unit) {
      const int64_t r = unit / tiles;
      if (!pending[r] || unit % tiles >= num_tiles(tasks[r].target.vocab)) return;
      uint64_t fixed[kTile];
      tile_sums[unit] = fixed_tile(tasks[r], units[r], unit % tiles, fixed);
    });
    any = false;
    for (int64_t r = 0; r < n; ++r) {
      if (!pending[r]) continue;
      const uint64_t* sums = tile_sums.data() + r * tiles;
      uint64_t total = 0;
      for (int64_t t = 0; t < num_tiles(tasks[r].target.vocab); ++t) total += sums[t];
      if (total == 0 && tasks[r].residual) {
        tasks[r].residual = false;
        any = true;
        continue;
      }
      tasks[r].token = search(tasks[r], units[r], sums, draw_threshold(tasks[r].u, total));
      pending[r] = false;
    }
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
