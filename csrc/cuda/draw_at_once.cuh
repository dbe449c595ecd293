// The draw of a chain's last token by the block that has decided, where it comes from the target's
// law, or from what that law is without the token that was rejected: no row is read again.
//
// Without a filter, what the scan left of each tile says how probable the tile is: a tile is drawn
// by those sums, then an entry by the weights of its tile. Reads 32 bytes a tile, and 2 or 4 bytes
// an entry of the drawn tile, and of the tile with the rejected token. With a filter, the maxima of
// groups say where kept entries are, and those groups are read: 4 bytes a group, and as a rule one
// group for each kept entry. Numerics: integers all the way (core/fixed_point.h), 2^-40 of the
// row's largest weight, or within a tile of the tile's; as the sums of tiles are those of float32,
// entries' probabilities are theirs up to some 1e-7. Included by verify.cu alone.
#pragma once

#include "chain_nodes.cuh"
#include "cutoff.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// The weights of a law's tiles, in integers.
struct TileMasses {
  const TileSummary* tiles;
  RowLaw law;
  int64_t own;  // a tile that has another sum; -1: none
  double sum;   // that one

  __device__ __forceinline__ uint64_t operator()(int64_t t) const {
    const float weight = ExpWeight(law).log2_weight(tiles[t].max);
    const double found = t == own ? sum : tiles[t].sum;
    // Rounding must not carry a row's sum over 2^64.
    const double bounded = found < static_cast<double>(kTile) ? found : static_cast<double>(kTile);
    return bounded > 0.0 ? static_cast<uint64_t>(exp2_weight(weight) * bounded * kLawUnit) : 0;
  }
};

// A thread's entries of a tile, as integers, and their place among those of the block.
struct TileWeightsOfThread {
  uint64_t weights[kPerThread];
  uint64_t before;
  uint64_t sum;
  uint64_t total;
};

// Weighs the entries of a tile against its largest one, `excluded` left out. Collective over the
// block.
__device__ __forceinline__ TileWeightsOfThread weigh_tile(const Row& row, const RowLaw& law,
                                                          int64_t tile, float max,
                                                          int64_t excluded) {
  TileWeightsOfThread found;
  RawTile raw;
  float x[kPerThread];
  load_tile<Layout::kBlocked>(row, tile, &raw);
  widen_tile<Layout::kBlocked>(row, tile, raw, x);
  exclude<Layout::kBlocked>(row, tile, excluded, x);
  const ExpWeight weight(max, law.scale);
  found.sum = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    found.weights[j] = fixed_weight(exp2_weight(weight.log2_weight(x[j])));  // there is no cutoff
    found.sum += found.weights[j];
  }
  found.before = block_exclusive_sum(found.sum, &found.total);
  return found;
}

// Part `threshold` of `sum`, of another sum.
__device__ __forceinline__ uint64_t scaled(uint64_t threshold, uint64_t sum, uint64_t total) {
  const double part = static_cast<double>(threshold) / static_cast<double>(sum);
  const uint64_t place = static_cast<uint64_t>(part * static_cast<double>(total));
  return place < total ? place : total - 1;
}

// The first of a thread's entries whose inclusive prefix sum passes the threshold; there is one.
template <int kEntries>
__device__ __forceinline__ int64_t passing_entry(int64_t first, const uint64_t (&weights)[kEntries],
                                                 uint64_t prefix, uint64_t threshold) {
#pragma unroll
  for (int j = 0; j < kEntries; ++j) {
    prefix += weights[j];
    first += prefix <= threshold;
  }
  return first;
}

// The token that a draw leaves out, -1 if there is none.
__device__ __forceinline__ int64_t excluded_of(const DrawTask& task) {
  return task.residual && task.excluded < task.target.vocab ? task.excluded : -1;
}

// Both functions below set the token of a request that needs a draw. Collective over the block; all
// threads see the request, and the token when they meet again.

// Of a row without a filter.
__device__ __forceinline__ void draw_by_tiles(const Scratch& s, Request* r) {
  constexpr int kTilesHeld = 2;
  DrawTask& task = r->draw;
  const Row& row = task.target;
  const TileSummary* tiles = s.summaries + (r->b * s.rows + r->accepted) * s.tiles;
  const int64_t n = num_tiles(row.vocab);
  int64_t excluded = excluded_of(task);
  TileMasses masses{tiles, task.target_law, -1, 0.0};
  DrawnPart place{excluded < 0 ? -1 : excluded / kTile, 0};
  for (bool finds = excluded < 0;; finds = true) {
    if (finds) {
      uint64_t total = 0;
      place = find_part<kTilesHeld>(masses, n, task.u, &total);
      if (total == 0 && excluded >= 0) {
        excluded = masses.own = -1;  // nothing is left, by rounding: the target's own law
        continue;
      }
    }
    const auto found =
        weigh_tile(row, task.target_law, place.index, tiles[place.index].max, excluded);
    if (!finds) {
      masses.own = place.index;
      masses.sum = static_cast<double>(found.total) / kLawUnit;
      continue;
    }
    const uint64_t threshold = scaled(place.threshold, masses(place.index), found.total);
    if (found.before > threshold || threshold - found.before >= found.sum) return;
    const int64_t first = place.index * kTile + static_cast<int64_t>(threadIdx.x) * kPerThread;
    task.token = passing_entry(first, found.weights, found.before, threshold);
    return;
  }
}

// A lane's entries of one of two groups that a warp reads side by side, weighed; a group that is
// not there has none.
__device__ __forceinline__ void weigh_vector(const Row& row, const ExpWeight& weight, bool is_there,
                                             int64_t first, int64_t excluded, uint64_t* weights) {
  float x[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) x[j] = -INFINITY;
  if (is_there) {
    RawVector raw;
    load_vector_at(row, first, &raw);
    widen_vector(row.element, raw, x);
    if (row.allowed != nullptr) hide_in_vector(row, first, x);
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    weights[j] = first + j == excluded ? 0 : fixed_weight(weight(x[j]));
  }
}

// Groups whose maxima a warp looks at together, a bit each.
struct GroupBits {
  static constexpr int kWords = 4;
  static constexpr int kGroups = kWords * kWarp;
  unsigned words[kWords];

  // Those of groups [first, first + kGroups), before `last`, that keep an entry.
  __device__ __forceinline__ GroupBits(const float* group_max, int64_t first, int64_t last,
                                       float cutoff) {
    float top[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int64_t group = first + w * kWarp + threadIdx.x % kWarp;
      top[w] = group < last ? group_max[group] : -INFINITY;
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      words[w] = __ballot_sync(kAllLanes, top[w] >= cutoff && top[w] > -INFINITY);
    }
  }

  // Takes the lowest one; -1 if there is none.
  __device__ __forceinline__ int32_t take() {
    int32_t found = -1;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (found >= 0 || words[w] == 0) continue;
      found = w * kWarp + lowest_lane(words[w]);
      words[w] &= words[w] - 1;
    }
    return found;
  }
};

// Of a row with a filter, whose law is found: a warp takes some groups that follow each other, all
// of them to add them up, and once more to find the entry, if the draw falls there.
__device__ __forceinline__ void draw_by_groups(const Scratch& s, Request* r) {
  constexpr int kLanes = kGroup / kVector;  // that hold a group
  static_assert(2 * kLanes == kWarp, "a warp reads two groups");
  __shared__ uint64_t of_warp[kWarps];
  DrawTask& task = r->draw;
  const Row& row = task.target;
  const float* group_max = s.group_max + (r->b * s.rows + r->accepted) * s.groups;
  const ExpWeight weight(task.target_law);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % kWarp);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarp;
  const int64_t groups = num_groups(row.vocab);
  const Share share = share_of(groups, warp, kWarps);
  int64_t excluded = excluded_of(task);
  uint64_t threshold = 0;
  for (bool finds = false;;) {
    uint64_t mine = 0, before = 0;  // of the lane; of the groups that a search has passed
    for (int64_t base = share.first; base < share.last; base += GroupBits::kGroups) {
      GroupBits kept(group_max, base, share.last, task.target_law.cutoff);
      for (;;) {
        const int32_t one = kept.take(), other = kept.take();
        if (one < 0) break;
        const int32_t group = lane < kLanes ? one : other;
        const int64_t first = (base + group) * kGroup + lane % kLanes * kVector;
        uint64_t weights[kVector], sum = 0;
        weigh_vector(row, weight, group >= 0, first, excluded, weights);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum += weights[j];
        mine += sum;
        if (!finds) continue;
        uint64_t total = 0;
        const uint64_t prefix = before + warp_exclusive_sum(sum, &total);
        before += total;
        if (threshold >= before) continue;
        if (prefix > threshold || threshold - prefix >= sum) return;
        task.token = passing_entry(first, weights, prefix, threshold);
        return;
      }
    }
    if (finds) return;
    const uint64_t sum = warp_sum(mine);
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    uint64_t total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before = total;
      total += of_warp[w];
    }
    if (total == 0 && excluded >= 0) {
      excluded = -1;  // nothing is left, by rounding: the target's own law
      __syncthreads();
      continue;
    }
    threshold = draw_threshold(task.u, total);
    if (before > threshold || threshold - before >= sum) return;
    threshold -= before;
    finds = true;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
