// Final draws by inverse CDF in integers.
//
// Grid: (request, tile) units over threads. A draw from a law reads its row once for the tiles'
// sums and one tile again; a residual draw likewise both rows. Writes 8 bytes per tile. Numerics:
// weights in fp32, scaled in float64, summed as uint64.
#include "draw.h"

#include "ranks.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// Calls body(target entries, draft entries, groups), both in the same order.
template <typename Body>
auto with_two_entries(const DrawTask& task, int64_t tile, const Body& body) {
  const int64_t groups = tile_groups(task.target.vocab, tile);
  float target[kTile], draft[kTile];
  const Row target_row = held_tile(task.target, tile), draft_row = held_tile(task.draft, tile);
  if (is_whole_bfloat16(target_row, tile, groups, task.excluded, task.tried) &&
      is_whole_bfloat16(draft_row, tile, groups, -1, task.no_draft)) {
    return body(bfloat16_entries(target_row, tile, groups, target),
                bfloat16_entries(draft_row, tile, groups, draft), groups);
  }
  const float* p = view_tile(task.target, tile, groups, target, task.excluded, task.tried);
  const float* q = view_tile(task.draft, tile, groups, draft, -1, task.no_draft);
  return body(float_entries(task.target, tile, p, target),
              float_entries(task.draft, tile, q, draft), groups);
}

// What all weights of a task's residual [t p - d q]+ have in common, t / z: they are what is left
// of the rows' own weights, [w - ratio v]+. A compiler may fuse that, and equal laws still leave
// nothing: their ratio is 1, and w - v is rounded once. Of two products it would round one alone.
double outer_scale(const DrawTask& task) { return task.coefficients.target / task.target_law.z; }

float draft_ratio(const DrawTask& task) {
  const double outer = outer_scale(task);
  if (!(outer > 0.0)) return 0.0f;
  const double lifted = task.draft_law.z * draft_lift(task.draft_law);
  const double ratio = task.coefficients.draft / lifted / outer;
  return static_cast<float>(ratio < FLT_MAX ? ratio : FLT_MAX);  // 0 * inf is NaN
}

// Weights of entries of both rows in a residual, in units of its outer scale.
template <typename DraftWeight>
struct ResidualWeight {
  ExpWeight target;
  DraftWeight draft;
  VecF ratio;
  explicit ResidualWeight(const DrawTask& task)
      : target(task.target_law), draft(task.draft_law), ratio(splat(draft_ratio(task))) {}
  VecF operator()(VecF x, VecF y) const { return positive_part(target(x) - ratio * draft(y)); }
};

struct LiftedWeight {
  VecF lift;
  explicit LiftedWeight(const RowLaw& law) : lift(splat(draft_lift(law))) {}
  VecF operator()(VecF x) const { return positive_part(x * lift); }
};

// Calls body(weight functor) with the functor that fits the laws of both rows.
template <typename Body>
auto with_residual_weight(const DrawTask& task, const Body& body) {
  if (!task.draft_law.linear) return body(ResidualWeight<ExpWeight>(task));
  if (draft_lift(task.draft_law) == 1.0f) return body(ResidualWeight<LinearWeight>(task));
  return body(ResidualWeight<LiftedWeight>(task));
}

double tile_residual_mass(const DrawTask& task, int64_t tile) {
  return with_residual_weight(task, [&](const auto& weight) {
    return with_two_entries(task, tile, [&](const auto& p, const auto& q, int64_t groups) {
      return accumulate_pairs(groups, [&](int64_t i) {
        const VecPair x = p(i), y = q(i);
        return VecPair{weight(x.first, y.first), weight(x.second, y.second)};
      });
    });
  });
}

// In units of the residual's outer scale.
double tile_mass(const DrawTask& task, int64_t tile) {
  if (task.draft.data != nullptr && !is_bare(task.draft, tile)) {
    return tile_residual_mass(task, tile);
  }
  float buffer[kTile];
  const int64_t groups = tile_groups(task.target.vocab, tile);
  const float* p = view_tile(task.target, tile, groups, buffer, task.excluded, task.tried);
  const FloatEntries entries = float_entries(task.target, tile, p, buffer);
  return with_weight(task.target_law, [&](const auto& weight) {  // linear: a draft's, in its place
    return tile_weight_sum(entries, groups, weight);
  });
}

template <typename Weight>
void write_weights(const FloatEntries& entries, int64_t groups, const Weight& weight, float* out) {
  for (int64_t i = 0; i < groups * kGroup; i += 2 * kLanes) {
    const VecPair x = entries(i);
    store(out + i, weight(x.first));
    store(out + i + kLanes, weight(x.second));
  }
}

template <typename Weight>
void write_residual(const DrawTask& task, const FloatEntries& p, int64_t tile, int64_t groups,
                    const Weight& weight, float* out) {
  float buffer[kTile];
  const float* draft = view_tile(task.draft, tile, groups, buffer, -1, task.no_draft);
  const FloatEntries q = float_entries(task.draft, tile, draft, buffer);
  for (int64_t i = 0; i < groups * kGroup; i += 2 * kLanes) {
    const VecPair x = p(i), y = q(i);
    store(out + i, weight(x.first, y.first));
    store(out + i + kLanes, weight(x.second, y.second));
  }
}

// The weights of a tile as floats, a residual's in units of its outer scale. Sums and search both
// go through this one copy of the code, so that they see the same bits whatever the compiler
// contracts. Returns the number of groups.
__attribute__((noinline)) int64_t write_tile_weights(const DrawTask& task, int64_t tile,
                                                     float* out) {
  float buffer[kTile];
  const int64_t groups = tile_groups(task.target.vocab, tile);
  const int64_t excluded = task.residual ? task.excluded : -1;
  const TokenList hidden = task.residual ? task.tried : TokenList{};
  const float* x = view_tile(task.target, tile, groups, buffer, excluded, hidden);
  const FloatEntries p = float_entries(task.target, tile, x, buffer);
  if (!task.residual || task.draft.data == nullptr || is_bare(task.draft, tile)) {
    write_weights(p, groups, ExpWeight(task.target_law), out);
  } else {
    with_residual_weight(
        task, [&](const auto& weight) { write_residual(task, p, tile, groups, weight, out); });
  }
  return groups;
}

// What weights are multiplied by: kLawUnit of a law; of a residual kResidualUnit / t, which t / z
// makes 1 / z of.
double unit_of(const DrawTask& task) {
  if (!task.residual) return kLawUnit;
  return task.coefficients.target > 0.0 ? kResidualUnit / task.target_law.z : 0.0;
}

uint64_t fixed_sum(const DrawTask& task, double unit, const float* weights, int64_t groups) {
  return task.residual ? residual_fixed_sum(weights, groups, unit) : law_fixed_sum(weights, groups);
}

// The lowest index whose inclusive prefix sum exceeds t, given the tiles' sums; -1 where its tile
// is not `held` here. The bounds matter only where another thread changes the logits meanwhile: no
// read may leave the row even then.
int64_t search(const DrawTask& task, double unit, const uint64_t* tile_sums, uint64_t t,
               Range held) {
  const int64_t last_tile = num_tiles(task.target.vocab) - 1;
  int64_t tile = 0;
  while (tile < last_tile && tile_sums[tile] <= t) t -= tile_sums[tile++];
  if (!held.holds(tile)) return -1;
  float weights[kTile];
  const int64_t groups = write_tile_weights(task, tile, weights);
  int64_t i = 0;
  for (; i < (groups - 1) * kGroup; i += kGroup) {
    const uint64_t sum = fixed_sum(task, unit, weights + i, 1);
    if (sum > t) break;
    t -= sum;
  }
  const int64_t first = tile * kTile;
  const int64_t left = task.target.vocab - first;
  const int64_t last = (left < kTile ? left : kTile) - 1;
  for (; i < last; ++i) {
    const uint64_t fixed = fixed_weight(weights[i], unit);
    if (fixed > t) break;
    t -= fixed;
  }
  return first + i;
}

// Tells all ranks the tokens that one of them has found.
void share_tokens(const ThreadPool& pool, DrawTask* tasks, const int64_t* drawn, int64_t n) {
  if (pool.ranks == nullptr) return;
  Buffer<int64_t> tokens(n);
  for (int64_t j = 0; j < n; ++j) tokens[j] = tasks[drawn[j]].token + 1;
  share_sums(pool, tokens.data(), n);
  for (int64_t j = 0; j < n; ++j) tasks[drawn[j]].token = tokens[j] - 1;
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
  Buffer<int64_t> numbers(count);
  for (int64_t j = 0; j < count; ++j) numbers[j] = j;
  const Range held = held_tiles(pool, tiles);
  parallel_for(pool, count * tiles, kTilesPerThread, [&](int64_t unit) {
    const DrawTask& task = tasks[wanted[unit / tiles]];
    const int64_t tile = unit % tiles;
    if (tile >= num_tiles(task.target.vocab) || !held.holds(tile)) return;
    tile_masses[unit] = outer_scale(task) * tile_mass(task, tile);
  });
  share_tiles(pool, tile_masses.data(), tiles, numbers.data(), count);
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t t = 0; t < tiles; ++t) masses[wanted[j]] += tile_masses[j * tiles + t];
  }
}

void draw_tokens(const ThreadPool& pool, DrawTask* tasks, int64_t n) {
  const int64_t tiles = max_tiles(tasks, n);
  Buffer<double> units(n);
  Buffer<bool> pending(n);
  Buffer<uint64_t> tile_sums(n * tiles);
  Buffer<int64_t> drawn(n), places(n);
  int64_t num_drawn = 0;
  const Range held = held_tiles(pool, tiles);
  bool any = false;
  for (int64_t r = 0; r < n; ++r) {
    DrawTask& task = tasks[r];
    if (task.active && task.target_law.point_mass) task.token = task.target_law.argmax;
    pending[r] = needs_draw(task);
    any |= pending[r];
    units[r] = unit_of(task);
  }
  while (any) {
    parallel_for(pool, n * tiles, kTilesPerThread, [&](int64_t unit) {
      const int64_t r = unit / tiles;
      const int64_t tile = unit % tiles;
      if (!pending[r] || tile >= num_tiles(tasks[r].target.vocab) || !held.holds(tile)) return;
      float weights[kTile];
      const int64_t groups = write_tile_weights(tasks[r], tile, weights);
      tile_sums[unit] = fixed_sum(tasks[r], units[r], weights, groups);
    });
    int64_t num_pending = 0;
    for (int64_t r = 0; r < n; ++r) {
      if (pending[r]) places[num_pending++] = r;
    }
    share_tiles(pool, tile_sums.data(), tiles, places.data(), num_pending);
    any = false;
    for (int64_t r = 0; r < n; ++r) {
      if (!pending[r]) continue;
      const uint64_t* sums = tile_sums.data() + r * tiles;
      uint64_t total = 0;
      for (int64_t t = 0; t < num_tiles(tasks[r].target.vocab); ++t) total += sums[t];
      if (total == 0 && tasks[r].residual) {
        tasks[r].residual = false;
        units[r] = kLawUnit;
        any = true;
        continue;
      }
      const uint64_t threshold = draw_threshold(tasks[r].u, total);
      tasks[r].token = search(tasks[r], units[r], sums, threshold, held);
      drawn[num_drawn++] = r;
      pending[r] = false;
    }
  }
  share_tokens(pool, tasks, drawn.data(), num_drawn);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
