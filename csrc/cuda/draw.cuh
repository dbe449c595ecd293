// Draws by inverse CDF in integers, from a law or from the residual of two laws.
//
// Grid: a block takes a few consecutive tiles of one request. Reads the target's row (and, in a
// residual, the draft's) once for integer sums, 2 or 4 bytes an entry, from L2 as a rule; then the
// last block to arrive reads one tile again. Writes 8 bytes a tile. The masses of residuals, which
// decide_block.cuh and team.cuh share out, take another read. Numerics: weights in fp32, those of
// draws by the same instructions wherever they are computed, those of masses by fewer
// (PairWeights); masses in fp32 within a warp, float64 from there on; draws in uint64, exact and
// free of order.
#pragma once

#include "../core/draw_task.h"
#include "shared.cuh"
#include "tile.cuh"

namespace specdec {
namespace cuda {

// In float32, as weights are: a division in float64 takes longer than a tile's exponentials.
__device__ __forceinline__ float quotient(double a, double b) {
  return static_cast<float>(a) / static_cast<float>(b);
}

// What all weights of a residual [t p - d q]+ have in common, t / z: they are what is left of the
// rows' own weights, [w - ratio v]+. Of equal laws the ratio is 1, and nothing is left.
__device__ __forceinline__ float outer_scale(const DrawTask& task) {
  return quotient(task.coefficients.target, task.target_law.z);
}

__device__ __forceinline__ float draft_ratio(const DrawTask& task) {
  const auto [t, d] = task.coefficients;
  const double lifted = task.draft_law.z * draft_lift(task.draft_law);
  return fminf(quotient(d * task.target_law.z, t * lifted), FLT_MAX);  // 0 * inf is NaN
}

// [w - ratio v]+
__device__ __forceinline__ float what_is_left(float w, float ratio, float v) {
  return fmaxf(fmaf(-ratio, v, w), 0.0f);
}

// A tile of the rows of a DrawTask, as it lies in memory.
struct RawTiles {
  RawTile target, draft;
};

// Weights of a thread's entries under the target's law or, in units of its outer scale, the
// residual. What they take is computed once, not in every tile. kTree: there may be lists of
// tokens, and a draft's law in the place of the target's.
template <Elements kElements, bool kTree>
class TileWeights {
 public:
  __device__ __forceinline__ TileWeights(const DrawTask& task, bool residual)
      : task_(&task),
        residual_(residual),
        has_draft_(residual && task.draft.data != nullptr),
        target_weight_(task.target_law),
        draft_weight_(task.draft_law),
        ratio_(has_draft_ ? draft_ratio(task) : 0.0f) {}

  __device__ __forceinline__ const DrawTask& task() const { return *task_; }
  __device__ __forceinline__ bool residual() const { return residual_; }

  template <Layout kLayout>
  __device__ __forceinline__ void load(int64_t tile, RawTiles* raw) const {
    load_rows<kLayout>(*task_, has_draft_, tile, raw);
  }

  template <Layout kLayout>
  __device__ __forceinline__ static void load_rows(const DrawTask& task, bool has_draft,
                                                   int64_t tile, RawTiles* raw) {
    constexpr bool kMapped = !are_plain(kElements);
    load_tile<kLayout, kElements, kMapped && kTree>(task.target, tile, &raw->target);
    if (has_draft) load_tile<kLayout, kElements, kMapped>(task.draft, tile, &raw->draft);
  }

  // The weights of a loaded tile. Calls then() when `raw` is not needed any more. kApart: each step
  // for all entries before the next one, for more registers.
  template <Layout kLayout, bool kApart = false, typename Then>
  __device__ __forceinline__ void weigh(int64_t tile, const RawTiles& raw, float* w,
                                        const Then& then) const {
    float q[kPerThread];
    widen_tile<kLayout, kElements>(task_->target, tile, raw.target, w);
    if (has_draft_) widen_tile<kLayout, kElements>(task_->draft, tile, raw.draft, q);
    then();
    if (residual_) {
      exclude<kLayout>(task_->target, tile, task_->excluded, w);
      if (kTree) exclude_all<kLayout>(task_->target, tile, task_->tried, w);
    }
    if (!kTree || !task_->target_law.linear) weigh_logits<kApart>(target_weight_, w);
    if (!has_draft_) return;
    if (kTree) exclude_all<kLayout>(task_->draft, tile, task_->no_draft, q);
    if (task_->draft_law.linear) {
      const float lift = draft_lift(task_->draft_law);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) q[j] *= lift;
    } else {
      weigh_logits<kApart>(draft_weight_, q);
    }
    if constexpr (kApart) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) w[j] = fmaf(-ratio_, q[j], w[j]);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) w[j] = fmaxf(w[j], 0.0f);
    } else {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) w[j] = what_is_left(w[j], ratio_, q[j]);
    }
  }

  // out[t - first] = sum over threads of sum(w), the weights of tile t of [first, last). 16-bit
  // entries are loaded a tile ahead. Collective over the block.
  template <bool kApart = false, typename T, typename SumOf>
  __device__ __forceinline__ void sum_tiles_to(int64_t first, int64_t last, T* out,
                                               const SumOf& sum) const {
    constexpr bool kAhead = are_plain(kElements) && bytes_of(element_of(kElements)) == 2;
    RawTiles raw;
    if (kAhead && first < last) load<Layout::kStriped>(first, &raw);
    sum_each_tile(first, last, out, [&](int64_t tile) {
      float w[kPerThread];
      if (!kAhead) load<Layout::kStriped>(tile, &raw);
      weigh<Layout::kStriped, kApart>(tile, raw, w, [&] {
        if (kAhead && tile + 1 < last) load<Layout::kStriped>(tile + 1, &raw);
      });
      return sum(w);
    });
  }

 private:
  template <bool kApart>
  __device__ __forceinline__ static void weigh_logits(const ExpWeight& weight, float* x) {
    if constexpr (kApart) {
      float log2_weights[kPerThread];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) log2_weights[j] = x[j] - weight.reference;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) log2_weights[j] *= weight.scale;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) log2_weights[j] = exp2_weight(log2_weights[j]);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        x[j] = x[j] < weight.threshold ? 0.0f : log2_weights[j];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) x[j] = weight(x[j]);
    }
  }

  const DrawTask* task_;
  bool residual_;
  bool has_draft_;
  ExpWeight target_weight_;
  ExpWeight draft_weight_;
  float ratio_;
};

// ---- masses ---

// The tiles of a plain row, without a look at each of them: for whoever has registers to spare.
template <Elements kElements>
class PlainTiles {
 public:
  __device__ __forceinline__ explicit PlainTiles(const Row& row)
      : row_(row), place_(static_cast<const char*>(row.data) + offset(0)) {
    const bool aligned = reinterpret_cast<uintptr_t>(row.data) % kLoad == 0;
    whole_ = aligned ? row.vocab / kTile : 0;
  }

  __device__ __forceinline__ void load(int64_t tile, RawTile* out) const {
    if (tile >= whole_) return load_tile<Layout::kStriped, kElements>(row_, tile, out);
    const char* place = place_ + tile * (kTile * kBytes);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < kVector * kBytes / kLoad; ++i) {
        load_words(place + (offset(s) - offset(0)) + i * kLoad, out->step[s].word + 4 * i);
      }
    }
  }

 private:
  static constexpr int kBytes = bytes_of(element_of(kElements));

  __device__ __forceinline__ static int32_t offset(int step) {
    return vector_offset<Layout::kStriped>(step) * kBytes;
  }

  const Row& row_;
  const char* place_;
  int64_t whole_;  // tiles that are loaded so
};

// Tiles from `first` on that lists of a residual may have tokens of, a bit each; the last bit is
// for all from there on.
constexpr int kListedTiles = 32;

__device__ __forceinline__ uint32_t tiles_with_listed(const DrawTask& task, int64_t first) {
  uint32_t tiles = 0;
  const auto mark = [&](int64_t token) {
    const int32_t tile = clamp_to(token / kTile - first, -1, kListedTiles - 1);
    if (tile >= 0) tiles |= 1u << tile;
  };
  if (task.excluded >= 0) mark(task.excluded);
#pragma unroll 1
  for (int64_t i = 0; i < task.tried.count; ++i) mark(task.tried.tokens[i]);
#pragma unroll 1
  for (int64_t i = 0; i < task.no_draft.count; ++i) mark(task.no_draft.tokens[i]);
  return tiles;
}

__device__ __forceinline__ float sum_of_weights(const float* w) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) sums[j % 4] += w[j];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The same of two rows of logits without cutoffs, by fewer instructions.
struct PairWeights {
  FusedWeight target, draft;
  float outer, ratio;

  __device__ __forceinline__ explicit PairWeights(const DrawTask& task)
      : target(task.target_law.max, log2_scale(task.target_law.scale)),
        draft(task.draft_law.max, log2_scale(task.draft_law.scale)),
        outer(outer_scale(task) / target.surplus()),
        ratio(quotient(task.coefficients.draft, task.draft_law.z) / draft.surplus() / outer) {}

  // Whether there is no cutoff, and no factor that rounding spoils. False for a NaN.
  __device__ __forceinline__ bool fit(const DrawTask& task) const {
    constexpr float kMost = 0x1p100f;
    return task.target_law.cutoff == -INFINITY && task.draft_law.cutoff == -INFINITY &&
           target.is_near() && draft.is_near() && ratio <= kMost && outer <= kMost &&
           outer >= 1.0f / kMost;
  }

  // Over a thread's entries, which are overwritten: each step for all of them before the next one.
  __device__ __forceinline__ float sum(float* x, float* y) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) x[j] = target(x[j]);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) y[j] = draft(y[j]);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) x[j] = fmaf(-ratio, y[j], x[j]);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) sums[j % 4] += fmaxf(x[j], 0.0f);
    return outer * ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
};

// residual_mass_tiles of some tiles of two rows of logits, if PairWeights fit. The next logits of
// plain rows are on their way while the rest is prepared, or a tile is worked on. kTree: there may
// be lists of tokens.
template <Elements kElements, bool kTree>
__device__ __forceinline__ bool pair_mass_tiles(const DrawTask& task, int64_t first, int64_t last,
                                                double* out) {
  constexpr Layout kLayout = Layout::kStriped;
  constexpr bool kPlain = are_plain(kElements);
  constexpr bool kAhead = kPlain && bytes_of(element_of(kElements)) == 2;
  const PlainTiles<kPlain ? kElements : Elements::kFloat32> target(task.target), draft(task.draft);
  RawTiles raw;
  const auto load = [&](int64_t tile) {
    if constexpr (kPlain) {
      target.load(tile, &raw.target);
      draft.load(tile, &raw.draft);
    } else {
      TileWeights<kElements, kTree>::template load_rows<kLayout>(task, true, tile, &raw);
    }
  };
  if (kAhead) load(first);
  const PairWeights weights(task);
  if (!weights.fit(task)) return false;
  const uint32_t listed = kTree ? tiles_with_listed(task, first) : 0;
  sum_tiles_together(first, last, out, [&](int64_t tile) {
    float x[kPerThread], y[kPerThread];
    if (!kAhead) load(tile);
    widen_tile<kLayout, kElements>(task.target, tile, raw.target, x);
    widen_tile<kLayout, kElements>(task.draft, tile, raw.draft, y);
    if (kAhead && tile + 1 < last) load(tile + 1);
    if (kTree && (listed >> clamp_to(tile - first, 0, kListedTiles - 1) & 1) != 0) {
      exclude<kLayout>(task.target, tile, task.excluded, x);
      exclude_all<kLayout>(task.target, tile, task.tried, x);
      exclude_all<kLayout>(task.draft, tile, task.no_draft, y);
    }
    return weights.sum(x, y);
  });
  return true;
}

// Writes out[t - first], the residual's mass in tile t of [first, last). Collective over the block.
// A call, so that a kernel has this code once. A chain's residual excludes no token here.
template <Elements kElements, bool kTree = false>
__device__ __attribute__((noinline)) void residual_mass_tiles(const DrawTask& task, int64_t first,
                                                              int64_t last, double* out) {
  if (first >= last) return;
  if (task.draft.data != nullptr && !task.target_law.linear && !task.draft_law.linear) {
    if (pair_mass_tiles<kElements, kTree>(task, first, last, out)) return;
  }
  const TileWeights<kElements, kTree> weights(task, true);
  const float outer = outer_scale(task);
  weights.sum_tiles_to(first, last, out, [&](const float* w) { return outer * sum_of_weights(w); });
}

// The sum of n tile values, by a full warp, in a tree that depends on n alone; in every lane.
__device__ __forceinline__ double sum_tiles(const double* values, int64_t n) {
  constexpr int kAtOnce = 4;  // loads under way
  double sum = 0.0;
#pragma unroll 1
  for (int64_t first = threadIdx.x % kWarp; first < n; first += kAtOnce * kWarp) {
    double value[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      value[k] = first + k * kWarp < n ? values[first + k * kWarp] : 0.0;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) sum += value[k];
  }
  return warp_sum(sum);
}

// Sets a token that takes no pass over the vocabulary. Whether there is one.
__device__ __forceinline__ bool knows_token(DrawTask* task) {
  if (!task->target_law.valid || needs_draw(*task)) return false;
  if (task->target_law.point_mass) task->token = task->target_law.argmax;
  return true;
}

// What a residual's weights are multiplied by: kResidualUnit / t, which the outer scale makes 1 / z
// of. In float32: in float64 many GPUs would take longer for this than for a tile.
__device__ __forceinline__ float residual_unit(const DrawTask& task) {
  return task.coefficients.target > 0.0 ? quotient(kResidualUnit, task.target_law.z) : 0.0f;
}

// What is drawn from: the law, or the residual, as integers.
template <Elements kElements, bool kTree>
struct DrawWeights : TileWeights<kElements, kTree> {
  float unit;

  __device__ __forceinline__ DrawWeights(const DrawTask& task, bool residual)
      : TileWeights<kElements, kTree>(task, residual),
        unit(residual ? residual_unit(task) : static_cast<float>(kLawUnit)) {}

  // kApart: as in `weigh`.
  template <bool kApart = false>
  __device__ __forceinline__ uint64_t sum(const float* w) const {
    if constexpr (kApart) {
      uint64_t fixed[kPerThread];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) fixed[j] = fixed_weight(w[j], unit);
#pragma unroll
      for (int j = 2; j < kPerThread; ++j) fixed[j % 2] += fixed[j];
      return fixed[0] + fixed[1];
    }
    uint64_t sum = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) sum += fixed_weight(w[j], unit);
    return sum;
  }
};

// Writes out[t - first], the integer weight of tile t of [first, last). Collective over the block.
template <Elements kElements, bool kTree>
__device__ __attribute__((noinline)) void fixed_sum_tiles(const DrawTask& task, bool residual,
                                                          int64_t first, int64_t last,
                                                          uint64_t* out) {
  const DrawWeights<kElements, kTree> weights(task, residual);
  weights.template sum_tiles_to<kTree>(
      first, last, out, [&](const float* w) { return weights.template sum<kTree>(w); });
}

// The place of a draw: a tile, or an entry, and the threshold left there.
struct Place {
  int64_t index;
  uint64_t threshold;
};

// The tile where the prefix sums pass the threshold; total 0 if there is nothing to draw. The bound
// matters only where somebody changes the logits meanwhile: no read may leave the row even then.
__device__ __forceinline__ Place find_tile(const uint64_t* tile_sums, int64_t tiles, double u,
                                           uint64_t* total) {
  __shared__ Place found;
  if (threadIdx.x == 0) found = {tiles - 1, 0};
  const int64_t each = (tiles + kThreads - 1) / kThreads;
  const int64_t first = threadIdx.x * each;
  const int64_t last = first + each < tiles ? first + each : tiles;
  uint64_t sum = 0;
#pragma unroll 1
  for (int64_t t = first; t < last; ++t) sum += tile_sums[t];
  uint64_t before = block_exclusive_sum(sum, total);
  const uint64_t threshold = draw_threshold(u, *total);
  if (before <= threshold && threshold < before + sum) {
    int64_t t = first;
#pragma unroll 1
    while (before + tile_sums[t] <= threshold) before += tile_sums[t++];
    found = {t, threshold - before};
  }
  __syncthreads();
  return found;
}

// The lowest entry of a tile whose inclusive prefix sum exceeds the threshold.
template <Elements kElements, bool kTree>
__device__ __attribute__((noinline)) int64_t find_entry(const DrawTask& task, bool residual,
                                                        const Place& place) {
  __shared__ int64_t found;
  const DrawWeights<kElements, kTree> weights(task, residual);
  const int64_t first = place.index * kTile;
  const int64_t last = task.target.vocab - 1;
  if (threadIdx.x == 0) found = last;
  RawTiles raw;
  float w[kPerThread];
  weights.template load<Layout::kBlocked>(place.index, &raw);
  weights.template weigh<Layout::kBlocked, kTree>(place.index, raw, w, [] {});
  const uint64_t sum = weights.template sum<kTree>(w);
  uint64_t total = 0;
  uint64_t prefix = block_exclusive_sum(sum, &total);
  if (prefix <= place.threshold && place.threshold < prefix + sum) {
    int64_t token = first + static_cast<int64_t>(threadIdx.x) * kPerThread;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      prefix += fixed_weight(w[j], weights.unit);
      token += prefix <= place.threshold;
    }
    found = token < last ? token : last;
  }
  __syncthreads();
  return found;
}

// A request's draw, by `splits` blocks. Each sums its `share` of tiles into tile_sums; the last one
// to arrive at `counter` (0 before the launch, and after it) searches. True in one thread, which
// then has the token. The caller has seen to needs_draw(task); `task` is shared and known to all
// threads. kResidual: it may be a residual.
template <Elements kElements, bool kTree = false, bool kResidual = true>
__device__ inline bool draw(const DrawTask& task, uint64_t* tile_sums, uint32_t* counter,
                            Share share, const Divisor& splits, int64_t* token) {
  const int64_t tiles = num_tiles(task.target.vocab);
  bool residual = kResidual && task.residual;
  fixed_sum_tiles<kElements, kTree>(task, residual, share.first, share.last,
                                    tile_sums + share.first);
  if (!is_last_block(counter, splits)) return false;
  uint64_t total = 0;
  Place place = find_tile(tile_sums, tiles, task.u, &total);
  if (total == 0 && residual) {
    residual = false;  // empty, by rounding or because p = q: what is left is the target's own law
    fixed_sum_tiles<kElements, kTree>(task, residual, 0, tiles, tile_sums);
    place = find_tile(tile_sums, tiles, task.u, &total);
  }
  const int64_t found = find_entry<kElements, kTree>(task, residual, place);
  if (threadIdx.x != 0) return false;
  *token = found;
  return true;
}

}  // namespace cuda
}  // namespace specdec
