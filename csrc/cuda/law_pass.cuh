// Laws of logits rows: the first pass of every operator, and what finishes it.
//
// DECLARATIONS FIRST: bodies follow.
#pragma once

#include "tile.cuh"

namespace specdec {
namespace cuda {

// What a rule wants from a row beside its law.
enum class Extra : int8_t {
  kNone,
  kRank,     // top_beta: how many logits are above `logit`
  kEntropy,  // typical: the entropy of the law in nats
};

struct ExtraTask {
  Extra kind = Extra::kNone;
  float logit = 0.0f;
};

// A row whose law is asked for; row.data == nullptr: none is.
struct LawTask {
  Row row;
  Filters filters;
  bool want_argmax = false;  // a greedy row finds its arg max anyway
  ExtraTask extra;
};

// What one look at a tile leaves behind: 32 bytes.
struct TileSummary {
  float max;
  int32_t argmax;  // lowest index within the tile, where asked for
  uint32_t fine;   // no NaN, no +inf (no negative probability)
  double sum;      // of weights against the tile's own maximum, where asked for
  double extra;
};

// Whether a row's cutoffs want the maxima of its groups of kGroup entries.
__device__ bool needs_group_max(const LawTask& task);

// Writes tiles[t] for t = split, split + splits, ... of a row; where needs_group_max, also
// group_max[num_groups(kTile) * t + g]. Collective over the block; nothing for an absent row.
// `tiles` and `group_max` are those of the row.
__device__ void scan_tiles(const LawTask& task, int64_t split, int64_t splits, TileSummary* tiles,
                           float* group_max);

// The law of a row that no filter touches (plain, greedy, probabilities, absent). Collective over a
// full warp, result in every lane. `extra`: null, or where the rank or entropy goes.
__device__ RowLaw combine_tiles(const LawTask& task, const TileSummary* tiles, double* extra);

// The law of any row. Collective over the block, result in every thread; at most once per launch
// and block or separated by barriers (it owns 32 KB of shared memory). In cutoff.cuh.
__device__ RowLaw finish_law(const LawTask& task, const TileSummary* tiles, const float* group_max,
                             double* extra);

}  // namespace cuda
}  // namespace specdec
