// The draw of a chain's last token by the block that has decided, where it comes from the target's
// law without filters, or from what that law is without the token that was rejected.
//
// What the scan left of each tile says how probable the tile is, so that no row is read again: the
// tile by those sums, then the entry by the weights of its tile. Reads 32 bytes a tile, and 2 or 4
// bytes an entry of the drawn tile, and of the tile with the rejected token. Numerics: integers all
// the way (core/fixed_point.h), 2^-40 of the row's largest weight for tiles, of the tile's for
// entries; as the sums of tiles are those of float32, entries' probabilities are theirs up to some
// 1e-7. Included by verify.cu alone.
#pragma once

#include "chain_nodes.cuh"

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

// Sets the token of a request that needs a draw. Collective over the block; all threads see the
// request, and the token when they meet again.
__device__ __forceinline__ void draw_at_once(const Scratch& s, Request* r) {
  constexpr int kTilesHeld = 2;
  DrawTask& task = r->draw;
  const Row& row = task.target;
  const TileSummary* tiles = s.summaries + (r->b * s.rows + r->accepted) * s.tiles;
  const int64_t n = num_tiles(row.vocab);
  int64_t excluded = task.residual && task.excluded < row.vocab ? task.excluded : -1;
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
    int64_t token = place.index * kTile + static_cast<int64_t>(threadIdx.x) * kPerThread;
    uint64_t prefix = found.before;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      prefix += found.weights[j];
      token += prefix <= threshold;
    }
    task.token = token;
    return;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
