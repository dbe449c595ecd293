// Laws of rows: what a warp finds in its part of a tile, and how tiles make the law of a row.
//
// scan.cuh goes over the vocabulary with it. Numerics: fp32 exponentials against the warp's own
// maximum, summed in fp32 within the warp and combined in float64 in the order of warps and tiles;
// filters in cutoff.cuh.
#pragma once

#include "tile.cuh"

namespace specdec {
namespace cuda {

// What one look at a tile leaves behind.
struct TileSummary {
  float max;
  int32_t argmax;  // lowest index within the tile, where asked for
  uint32_t valid;  // no NaN, no +inf, no negative probability
  double sum;      // of weights against the tile's own maximum, where asked for
  double extra;    // rank, or sum of weight * log2(weight)
};

// The part of a warp in it.
struct WarpSummary {
  float max;
  int32_t argmax;
  uint32_t valid;
  float sum;
  float extra;
};

constexpr double kLn2 = 0.6931471805599453;

// Every filter looks for its cutoff among the entries of the groups with the largest maxima.
__device__ __forceinline__ bool wants_group_max(const Row& row, const Filters& filters) {
  return !row.linear && !is_greedy(filters) && has_filter(filters);
}

// The sum over the whole row: z of a plain law, and what a top-p alone is a share of.
__device__ __forceinline__ bool wants_sum(const Row& row, const Filters& filters) {
  if (row.linear) return true;
  return !is_greedy(filters) &&
         (!has_filter(filters) || (has_top_p(filters) && !has_top_k(filters)));
}

// ---- one tile ---

// What to look for in a row; one word, because registers are short.
enum Look : uint32_t {
  kLinear = 1,  // at probabilities
  kSum = 2,
  kArgmax = 4,
  kRank = 8,
  kEntropy = 16,
};

struct ScanTask {
  uint32_t looks = 0;
  float logit = 0.0f;
  float scale = 0.0f;  // log2_scale

  ScanTask() = default;
  __device__ __forceinline__ ScanTask(const Row& row, const Filters& filters, bool want_argmax,
                                      const ExtraTask& extra)
      : logit(extra.logit), scale(log2_scale(1.0 / filters.temperature)) {
    if (row.linear) looks |= kLinear;
    if (wants_sum(row, filters)) looks |= kSum;
    if (want_argmax || is_greedy(filters)) looks |= kArgmax;
    if (extra.kind == Extra::kRank) looks |= kRank;
    // With filters the entropy is that of what they keep (cutoff.cuh).
    if (extra.kind == Extra::kEntropy && !has_filter(filters)) looks |= kEntropy;
  }
  __device__ __forceinline__ bool looks_for(Look look) const { return (looks & look) != 0; }
};

// Maxima of the groups of a warp's vector: 16 lanes hold a group.
__device__ __forceinline__ void write_group_max(float max, int step, float* group_max) {
#pragma unroll
  for (int lanes = kGroup / kVector / 2; lanes > 0; lanes /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, lanes));
  }
  if (threadIdx.x % (kGroup / kVector) == 0) {
    group_max[static_cast<uint32_t>(vector_offset<Layout::kStriped>(step)) / kGroup] = max;
  }
}

__device__ __forceinline__ void scan_probabilities(const float* x, WarpSummary* s) {
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  bool valid = true;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    valid = valid && x[j] >= 0.0f && x[j] <= FLT_MAX;
    sums[j % 4] += x[j];
  }
  s->sum = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  s->valid = __all_sync(kAllLanes, valid);
}

// Sum of weights 2^(scale * (x - max)), max the warp's, before exact_sum. A NaN or +inf makes it
// NaN.
__device__ __forceinline__ float sum_weights(float scale, const float* x, float max) {
  const FusedWeight fused(max, scale);
  float sums[4];
  if (fused.is_near()) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const float weight = fused(x[j]);
      sums[j % 4] = j < 4 ? weight : sums[j % 4] + weight;
    }
  } else {
    const float reference = max > -INFINITY ? max : 0.0f;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const float weight = exp2_weight((x[j] - reference) * scale);
      sums[j % 4] = j < 4 ? weight : sums[j % 4] + weight;
    }
  }
  return warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Takes away what all weights have too much. A quotient, so that one entry's weight comes out as 1.
__device__ __forceinline__ float exact_sum(float scale, float max, float sum) {
  const FusedWeight fused(max, scale);
  return fused.is_near() ? sum / fused.surplus() : sum;
}

// Sums of weights and of weight * log2(weight).
__device__ __forceinline__ void sum_entropy(const ScanTask& task, const float* x, WarpSummary* s) {
  const float reference = s->max > -INFINITY ? s->max : 0.0f;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float entropies[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const float log2_weight = (x[j] - reference) * task.scale;
    const float weight = exp2_weight(log2_weight);
    sums[j % 4] += weight;
    entropies[j % 4] += weight == 0.0f ? 0.0f : weight * log2_weight;
  }
  s->extra = warp_sum((entropies[0] + entropies[1]) + (entropies[2] + entropies[3]));
  s->sum = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

__device__ __forceinline__ bool is_valid_sum(float max, float sum) {
  return max <= FLT_MAX && sum <= FLT_MAX;
}

__device__ __forceinline__ bool all_valid(const float* x) {
  bool valid = true;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) valid = valid && x[j] <= FLT_MAX;
  return __all_sync(kAllLanes, valid);
}

// The lowest index in the tile of an entry equal to `value`, which one of the warp's is.
__device__ __forceinline__ int32_t find_first(const float* x, float value) {
  int32_t first = static_cast<int32_t>(kTile);
#pragma unroll
  for (int j = kPerThread - 1; j >= 0; --j) {
    if (x[j] == value) first = vector_offset<Layout::kStriped>(j / kVector) + j % kVector;
  }
  return warp_min(first);
}

__device__ __forceinline__ float count_above(const float* x, float logit) {
  int32_t count = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) count += x[j] > logit;
  return static_cast<float>(warp_sum(count));
}

// `step_max`: of each of the thread's vectors.
__device__ __forceinline__ WarpSummary scan_warp(const ScanTask& task, const float* x,
                                                 const float* step_max, float* group_max) {
  WarpSummary s{0.0f, 0, 1, 0.0f, 0.0f};
  if (task.looks_for(kLinear)) {
    scan_probabilities(x, &s);
    return s;
  }
  float max = -INFINITY;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    max = fmaxf(max, step_max[step]);
    if (group_max != nullptr) write_group_max(step_max[step], step, group_max);
  }
  s.max = warp_max_by_key(max);
  if (task.looks_for(kSum)) {
    if (task.looks_for(kEntropy)) {
      sum_entropy(task, x, &s);
    } else {
      s.sum = sum_weights(task.scale, x, s.max);
    }
    s.valid = is_valid_sum(s.max, s.sum);
  } else {
    s.valid = all_valid(x);
  }
  if (task.looks_for(kArgmax)) s.argmax = find_first(x, s.max);
  if (task.looks_for(kRank)) s.extra = count_above(x, task.logit);
  return s;
}

// The summary of a tile of which each of kWarps neighbouring lanes holds a warp's part; in all of
// them. Collective over a full warp, whose lanes may hold parts of tiles of several rows.
__device__ __forceinline__ TileSummary combine_warps(const ScanTask& task,
                                                     const WarpSummary& mine) {
  const auto add = [](double a, double b) { return a + b; };
  const bool linear = task.looks_for(kLinear);
  const bool entropy = task.looks_for(kEntropy);
  TileSummary s;
  s.max = reduce_neighbours<kWarps>(mine.max, [](float a, float b) { return fmaxf(a, b); });
  s.valid = reduce_neighbours<kWarps>(mine.valid, [](uint32_t a, uint32_t b) { return a & b; });
  s.argmax = reduce_neighbours<kWarps>(mine.max == s.max ? mine.argmax : INT32_MAX,
                                       [](int32_t a, int32_t b) { return a < b ? a : b; });
  double sum = 0.0, extra = task.looks_for(kRank) ? mine.extra : 0.0;
  if (linear || mine.sum > 0.0f) {
    const float shift = linear ? 0.0f : (mine.max - s.max) * task.scale;
    const double weight = exp2_weight(shift);
    const float exact = linear || entropy ? mine.sum : exact_sum(task.scale, mine.max, mine.sum);
    sum = weight * exact;
    if (entropy) extra = weight * (mine.extra + static_cast<double>(shift) * exact);
  }
  s.sum = reduce_neighbours<kWarps>(sum, add);
  s.extra = reduce_neighbours<kWarps>(extra, add);
  return s;
}

// Tiles of which a block holds all warps' parts at once, a thread a part.
constexpr int kWaiting = kThreads / kWarps;

// A warp's part of a tile, and where the tile's summary goes.
struct PartOfTile {
  const ScanTask& scan;
  WarpSummary part;
  TileSummary* out;
};

// Combines part_of(k, warp) of `count` tiles, at most kWaiting but one at least. Collective over
// the block, which does not meet.
template <typename PartOf>
__device__ __forceinline__ void write_summaries(int32_t count, const PartOf& part_of) {
  const int32_t k = static_cast<int32_t>(threadIdx.x) / kWarps;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) % kWarps;
  const PartOfTile mine = part_of(k < count ? k : 0, warp);
  const TileSummary s = combine_warps(mine.scan, mine.part);
  if (k < count && warp == 0) *mine.out = s;
}

__device__ __forceinline__ void find_step_max(const float* x, float* step_max) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    step_max[s] = x[s * kVector];
#pragma unroll
    for (int j = 1; j < kVector; ++j) step_max[s] = fmaxf(step_max[s], x[s * kVector + j]);
  }
}

// ---- a row ---

// Neighbouring lanes that find a row's law: a warp may find those of two rows at once, by the same
// instructions.
constexpr int kLawLanes = kWarp / 2;

// take(tile) for each tile of this lane, in their order. Some at a time, because each of them takes
// its time to come.
template <typename Take>
__device__ __forceinline__ void for_tiles_of_lane(const TileSummary* tiles, int64_t n,
                                                  const Take& take) {
  constexpr int kAtOnce = 3;
#pragma unroll 1
  for (int64_t t = threadIdx.x % kLawLanes; t < n; t += kAtOnce * kLawLanes) {
    TileSummary found[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      found[k] = tiles[t + k * kLawLanes < n ? t + k * kLawLanes : t];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (t + k * kLawLanes < n) take(found[k]);
    }
  }
}

template <typename T, typename Op>
__device__ __forceinline__ T reduce_law(T value, Op op) {
  return reduce_neighbours<kLawLanes>(value, op);
}

__device__ __forceinline__ double sum_law(double value) {
  return reduce_law(value, [](double a, double b) { return a + b; });
}

// Sums of a row's tiles against the row's maximum: z, and sum of weight * log2(weight).
struct RowSums {
  double z;
  double entropy;
};

// By the lanes of a law: combined in a tree that depends on the number of tiles alone. Where
// `entropy` says so nobody asks for that.
__device__ __forceinline__ RowSums sum_row(const TileSummary* tiles, int64_t n, const RowLaw& law,
                                           bool entropy) {
  RowSums sums{0.0, 0.0};
  const float scale = log2_scale(law.scale);
  for_tiles_of_lane(tiles, n, [&](const TileSummary& tile) {
    if (!(tile.sum > 0.0)) return;
    // In float32, as the weights that the tiles sum up: what a tile far below the maximum loses by
    // rounding is little of the whole.
    const float shift = law.linear ? 0.0f : (tile.max - law.max) * scale;
    const double weight = exp2_weight(shift);
    sums.z += weight * tile.sum;
    if (entropy) sums.entropy += weight * (tile.extra + shift * tile.sum);
  });
  return {sum_law(sums.z), __any_sync(kAllLanes, entropy) ? sum_law(sums.entropy) : 0.0};
}

// The lowest arg max of a row of n tiles, one at least.
__device__ __forceinline__ int64_t first_maximum(const TileSummary* tiles, int64_t n, float max) {
  int64_t first = n - 1;
#pragma unroll 1
  for (int64_t t = threadIdx.x % kLawLanes; t < first; t += kLawLanes) {
    if (tiles[t].max == max) first = t;
  }
  first = reduce_law(first, [](int64_t a, int64_t b) { return a < b ? a : b; });
  return first * kTile + tiles[first].argmax;
}

__device__ __forceinline__ double count_in_row(const TileSummary* tiles, int64_t n) {
  double count = 0.0;
  for_tiles_of_lane(tiles, n, [&](const TileSummary& tile) { count += tile.extra; });
  return sum_law(count);
}

// The law of a row as far as it is known without a filter: all of it for plain, greedy and absent
// rows and for probabilities. Collective over a full warp, whose halves may have a row each: the
// result is in every lane of a half. `extra_value`: where the rank or entropy goes.
__device__ inline RowLaw combine_tiles(const Row& row, const Filters& filters, bool want_argmax,
                                       const ExtraTask& extra, const TileSummary* tiles,
                                       double* extra_value) {
  const int64_t n = row.data != nullptr ? num_tiles(row.vocab) : 0;
  uint32_t valid = 1;
  float max = -INFINITY;
  for_tiles_of_lane(tiles, n, [&](const TileSummary& tile) {
    valid &= tile.valid;
    max = fmaxf(max, tile.max);
  });
  RowLaw law;
  *extra_value = 0.0;
  max = reduce_law(max, [](float a, float b) { return fmaxf(a, b); });
  valid = reduce_law(valid, [](uint32_t a, uint32_t b) { return a & b; });
  if (n > 0) {
    law.linear = row.linear;
    law.max = max;
    law.valid = valid != 0 && max > -INFINITY;
    law.point_mass = law.valid && !row.linear && is_greedy(filters);
  }
  const bool is_ranked = law.valid && extra.kind == Extra::kRank;
  if (__any_sync(kAllLanes, is_ranked)) {
    const double rank = count_in_row(tiles, n);
    if (is_ranked) *extra_value = rank;
  }
  const bool has_argmax = law.valid && !row.linear && (want_argmax || law.point_mass);
  if (__any_sync(kAllLanes, has_argmax)) {
    const int64_t argmax = first_maximum(tiles, has_argmax ? n : 1, max);
    if (has_argmax) law.argmax = argmax;
  }
  if (law.point_mass) {
    law.cutoff = law.max;
    law.scale = INFINITY;
    law.z = 1.0;
  } else if (law.valid && !row.linear) {
    law.scale = 1.0 / filters.temperature;
  }
  const bool has_sum = law.valid && !law.point_mass && wants_sum(row, filters);
  if (__any_sync(kAllLanes, has_sum)) {
    const bool entropy = has_sum && extra.kind == Extra::kEntropy;
    const RowSums sums = sum_row(tiles, has_sum ? n : 0, law, entropy);
    if (has_sum) law.z = sums.z;
    if (has_sum) law.valid = sums.z > 0.0;
    if (entropy) *extra_value = log(law.z) - kLn2 * sums.entropy / law.z;
  }
  return law;
}

}  // namespace cuda
}  // namespace specdec
