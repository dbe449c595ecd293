// The draw of a chain's last token by the block that has decided: no row is read again.
//
// With filters, the few entries that a row keeps are listed (shortlist.cuh). Else what is drawn
// from is the target's law, or what that law is without the token that was rejected. Without a
// filter, what the scan left of each tile says how probable the tile is (that of the rejected token
// without this token): a tile is drawn by those sums, then an entry by the weights of its tile.
// Reads 32 bytes a tile, and 2 or 4 bytes an entry of the drawn tile. Where too many entries are
// kept for a list, the maxima of groups say where they are, and those groups are read: 4 bytes a
// group, and as a rule one group for each kept entry. Numerics: integers all the way
// (core/fixed_point.h), 2^-40 of the row's largest weight, or within a tile of the tile's; as the
// sums of tiles are those of float32, entries' probabilities are theirs up to some 1e-7. Included
// by verify.cu alone.
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
  ExpWeight weight;
  int64_t own;              // the tile that has lost an entry; -1: none
  const TileSummary* rest;  // what is left of it

  __device__ __forceinline__ const TileSummary& at(int64_t t) const {
    return t == own ? *rest : tiles[t];
  }
  __device__ __forceinline__ uint64_t operator()(int64_t t) const {
    const TileSummary& tile = at(t);
    const float shift = weight.log2_weight(tile.max);
    const double found = tile.sum;
    // Rounding must not carry a row's sum over 2^64.
    const double bounded = found < static_cast<double>(kTile) ? found : static_cast<double>(kTile);
    return bounded > 0.0 ? static_cast<uint64_t>(exp2_weight(shift) * bounded * kLawUnit) : 0;
  }
};

// A thread's entries of a tile, their weights as integers, and these' place among the block's.
struct TileWeightsOfThread {
  float logits[kPerThread];
  uint64_t weights[kPerThread];
  uint64_t before;
  uint64_t sum;
  uint64_t total;
};

// Weighs the entries of a tile, `raw` as load_tile loaded it, against its largest one, `excluded`
// left out. Collective over the block.
__device__ __forceinline__ TileWeightsOfThread weigh_tile(const Row& row, const RowLaw& law,
                                                          int64_t tile, const RawTile& raw,
                                                          float max, int64_t excluded) {
  TileWeightsOfThread found;
  float* x = found.logits;
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

// A part of a sum, below it.
__device__ __forceinline__ uint64_t part_of(uint64_t total, double part) {
  const uint64_t place = static_cast<uint64_t>(part * static_cast<double>(total));
  return place < total ? place : total - 1;
}

// The first of a thread's entries, which begin at `first`, whose inclusive prefix sum passes the
// threshold; there is one.
template <int kEntries>
__device__ __forceinline__ Drawn passing_entry(int64_t first, const float (&logits)[kEntries],
                                               const uint64_t (&weights)[kEntries], uint64_t prefix,
                                               uint64_t threshold) {
  int32_t passed = 0;
  float logit = logits[0];
#pragma unroll
  for (int j = 0; j < kEntries - 1; ++j) {
    prefix += weights[j];
    const bool passes = prefix <= threshold;
    passed += passes;
    logit = passes ? logits[j + 1] : logit;
  }
  return {first + passed, logit};
}

// ---- of a row without a filter ---

// Where a draw by u falls in a row of which the scan has left n tiles, and `rest` of the one with
// the `excluded` token. By a full warp.
__device__ __forceinline__ TilePlace find_place(const RowLaw& law, const TileSummary* tiles,
                                                int64_t n, const TileSummary* rest,
                                                int64_t excluded, double u) {
  constexpr int kTilesHeld = 2;
  const ExpWeight weight(law.max, law.scale);
  TileMasses masses{tiles, weight, excluded < 0 ? -1 : excluded / kTile, rest};
  uint64_t total = 0;
  DrawnPart place;
#pragma unroll 1
  for (;; excluded = masses.own = -1) {  // once more from the target's own law if nothing is left
    place = find_part<kTilesHeld>(masses, n, u, &total);
    if (total > 0 || excluded < 0) break;
  }
  const double mass = static_cast<double>(masses(place.index));
  return {place.index, excluded, static_cast<double>(place.threshold) / mass,
          masses.at(place.index).max};
}

// The places at nodes [base, base + count), a warp a node, if the last token is drawn by tiles. By
// all warps but the clerk's, if there are others; nobody meets.
template <Reads kReads>
__device__ __forceinline__ void find_places(const VerifyParams& p, const Scratch& s,
                                            const Request& r, int64_t base, int32_t count,
                                            ChainNodes* nodes) {
  constexpr int kFinders = kWarps > 1 ? kWarps - 1 : 1;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (warp >= kFinders || r.greedy || s.races || has_filter(r.target_filters)) return;
  for (int32_t k = warp; k < count; k += kFinders) {
    ChainNode& node = (*nodes)[k];
    if (!node.target.law.valid) continue;
    const int64_t i = base + k;
    const bool replaces = kReads == Reads::kTokens && node.known && node.usable && !node.ends;
    const TilePlace place =
        find_place(node.target.law, s.summaries + (r.b * s.rows + i) * s.tiles, s.tiles,
                   s.rests + r.b * p.gamma + i, replaces ? node.token : -1, r.draw.u);
    if (threadIdx.x % kWarp == 0) node.place = place;
  }
}

// Both functions below draw for a request that needs it. True in the one thread that then has what
// is drawn; in none where somebody changes the logits meanwhile. Collective over the block, whose
// threads see the request.

__device__ __forceinline__ bool draw_by_tiles(const Request& r, const TilePlace& place,
                                              Drawn* drawn) {
  const Row& row = r.draw.target;
  RawTile raw;
  load_tile<Layout::kBlocked>(row, place.tile, &raw);
  const auto found = weigh_tile(row, r.draw.target_law, place.tile, raw, place.max, place.excluded);
  const uint64_t threshold = part_of(found.total, place.part);
  if (found.before > threshold || threshold - found.before >= found.sum) return false;
  const int64_t first = place.tile * kTile + static_cast<int64_t>(threadIdx.x) * kPerThread;
  *drawn = passing_entry(first, found.logits, found.weights, found.before, threshold);
  return true;
}

// A lane's entries of one of two groups that a warp reads side by side, weighed; a group that is
// not there has none.
__device__ __forceinline__ void weigh_vector(const Row& row, const ExpWeight& weight, bool is_there,
                                             int64_t first, int64_t excluded, float* x,
                                             uint64_t* weights) {
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

// The token that a draw leaves out, -1 if there is none.
__device__ __forceinline__ int64_t excluded_of(const DrawTask& task) {
  return task.residual && task.excluded < task.target.vocab ? task.excluded : -1;
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
__device__ __forceinline__ bool draw_by_groups(const Scratch& s, const Request& r, Drawn* drawn) {
  constexpr int kLanes = kGroup / kVector;  // that hold a group
  static_assert(2 * kLanes == kWarp, "a warp reads two groups");
  __shared__ uint64_t of_warp[kWarps];
  const DrawTask& task = r.draw;
  const Row& row = task.target;
  const float* group_max = s.group_max + (r.b * s.rows + r.accepted) * s.groups;
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
        float logits[kVector];
        uint64_t weights[kVector], sum = 0;
        weigh_vector(row, weight, group >= 0, first, excluded, logits, weights);
#pragma unroll
        for (int j = 0; j < kVector; ++j) sum += weights[j];
        mine += sum;
        if (!finds) continue;
        uint64_t total = 0;
        const uint64_t prefix = before + warp_exclusive_sum(sum, &total);
        before += total;
        if (threshold >= before) continue;
        if (prefix > threshold || threshold - prefix >= sum) return false;
        *drawn = passing_entry(first, logits, weights, prefix, threshold);
        return true;
      }
    }
    if (finds) return false;
    const uint64_t sum = warp_sum(mine);
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    uint64_t total = 0;
#pragma unroll 1
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
    if (before > threshold || threshold - before >= sum) return false;
    threshold -= before;
    finds = true;
  }
}

// Draws a request's last token (by tiles at `place`), and writes it, where what earlier launches
// have left of its row is enough: wherever no draft's law is read, else where the row has a
// shortlist. Whether it is; collective over the block, whose threads have met since the decision.
template <bool kReadsDraftLaws>
__device__ __forceinline__ bool draw_at_once(const VerifyParams& p, const Scratch& s,
                                             const Request& r, const TilePlace& place) {
  if (!needs_draw(r.draw)) return false;
  const bool filters = has_filter(r.target_filters);
  ListedDraw draw =
      draw_if_listed(filters ? s.shortlists + r.b * s.rows + r.accepted : nullptr, r.draw);
  if (!draw.listed) {
    if constexpr (kReadsDraftLaws) return false;
    draw.is_mine =
        filters ? draw_by_groups(s, r, &draw.drawn) : draw_by_tiles(r, place, &draw.drawn);
    draw.log_z = log(r.draw.target_law.z);
  }
  if (draw.is_mine) {
    write_extra_token(p, r.b, r.accepted, draw.drawn.token,
                      law_log_probability(r.draw.target_law, draw.drawn.logit, draw.log_z));
  }
  return true;
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
