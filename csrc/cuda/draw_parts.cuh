// The draw of a chain's last token: as draw.cuh has it, by parts of tiles that a warp sums alone.
//
// Grid: a block takes a few consecutive tiles of one request. Reads the target's row (and, in a
// residual, the draft's) once for integer sums, 2 or 4 bytes an entry, from L2 as a rule; then one
// warp of the last block to arrive reads the part again that the draw falls into. Writes 8 bytes a
// part. Numerics: the weights of draw.cuh; sums in uint64, exact and free of order.
//
// Latency is what counts: one atomic between the first block and the last token, no barrier after
// it, and what needs no logits is computed while the first ones are on their way. For plain rows:
// what others take leaves no registers for that.
#pragma once

#include "draw.cuh"

namespace specdec {
namespace cuda {

// Entries that a warp takes of a tile. They follow each other in either layout (tile.cuh).
constexpr int kPart = kWarp * kPerThread;
static_assert(kTile == kPart * kWarps, "the warps share a tile out");

// The sum of the values of all lanes before this one; `total`: of all lanes.
__device__ __forceinline__ uint64_t warp_exclusive_sum(uint64_t value, uint64_t* total) {
  const unsigned lane = threadIdx.x % kWarp;
  uint64_t sum = value;
#pragma unroll
  for (unsigned lanes = 1; lanes < kWarp; lanes *= 2) {
    const uint64_t before = __shfl_up_sync(kAllLanes, sum, lanes);
    sum += lane >= lanes ? before : 0;
  }
  *total = __shfl_sync(kAllLanes, sum, kWarp - 1);
  return sum - value;
}

// Whether there are registers for the next tile, and for its steps apart, while one is worked on.
template <Elements kElements>
constexpr bool kHasRegisters = bytes_of(element_of(kElements)) == 2;

// The place of a draw: a part, and the threshold left there.
struct DrawnPart {
  int64_t index;
  uint64_t threshold;
};

// The part where the prefix sums of n parts, sum_of(k), pass the threshold; total 0 if there is
// nothing to draw. The last part where there is none, which is so only where somebody changes the
// logits meanwhile: no read may leave the row even then. kHeld: of a lane's parts, looked at side
// by side. Every warp for itself.
template <int kHeld, typename SumOf>
__device__ __forceinline__ DrawnPart find_part(const SumOf& sum_of, int64_t n, double u,
                                               uint64_t* total) {
  const int each = static_cast<int>((n + kWarp - 1) / kWarp);
  const int first = static_cast<int>(threadIdx.x % kWarp) * each;
  const int count = clamp_to(n - first, 0, each);
  uint64_t held[kHeld];
  const auto hold = [&](int base) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) held[k] = base + k < count ? sum_of(first + base + k) : 0;
  };
  uint64_t sum = 0;
#pragma unroll 1
  for (int base = 0; base < each; base += kHeld) {
    hold(base);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) sum += held[k];
  }
  const uint64_t before = warp_exclusive_sum(sum, total);
  const uint64_t threshold = draw_threshold(u, *total);
  const unsigned ballot = __ballot_sync(kAllLanes, before <= threshold && threshold < before + sum);
  if (ballot == 0) return {n - 1, 0};
  int passed = 0;
  uint64_t prefix = before, reached = before;
#pragma unroll 1
  for (int base = 0; base < count; base += kHeld) {
    if (each > kHeld) hold(base);  // else they are still there
#pragma unroll
    for (int k = 0; k < kHeld; ++k) held[k] = prefix += held[k];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const bool passes = base + k < count && held[k] <= threshold;
      passed += passes;
      reached = passes ? held[k] : reached;
    }
  }
  const int winner = __ffs(static_cast<int>(ballot)) - 1;
  return {__shfl_sync(kAllLanes, first + passed, winner),
          threshold - __shfl_sync(kAllLanes, reached, winner)};
}

// What has been drawn: the token and its logit.
struct Drawn {
  int64_t token;
  float logit;
};

// The lowest entry of a part whose inclusive prefix sum exceeds the threshold, by the weights `w`
// of the tile `raw`. True in the one thread that has it. Collective over the part's warp.
template <Elements kElements, bool kTree>
__device__ __forceinline__ bool find_in_part(const DrawWeights<kElements, kTree>& weights,
                                             const DrawnPart& part, const RawTiles& raw,
                                             const float* w, Drawn* drawn) {
  const Row& row = weights.task().target;
  const int64_t tile = part.index / kWarps;
  uint64_t prefix[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) prefix[j] = fixed_weight(w[j], weights.unit);
#pragma unroll
  for (int j = 1; j < kPerThread; ++j) prefix[j] += prefix[j - 1];
  const uint64_t sum = prefix[kPerThread - 1];
  uint64_t total = 0;
  const uint64_t before = warp_exclusive_sum(sum, &total);
  const bool mine = before <= part.threshold && part.threshold < before + sum;
  const bool nobody = __ballot_sync(kAllLanes, mine) == 0;
  if (!mine && !(nobody && threadIdx.x % kWarp == 0)) return false;
  const uint64_t threshold = part.threshold - before;
  int passed = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) passed += prefix[j] <= threshold;
  const int64_t token = tile * kTile + static_cast<int64_t>(threadIdx.x) * kPerThread + passed;
  drawn->token = mine && token < row.vocab ? token : row.vocab - 1;
  if constexpr (kHasRegisters<kElements>) {
    float logit[kPerThread];
    widen_tile(element_of(kElements), raw.target, logit);
    drawn->logit = logit[0];
#pragma unroll
    for (int j = 1; j < kPerThread; ++j) drawn->logit = j == passed ? logit[j] : drawn->logit;
  }
  if (nobody || !kHasRegisters<kElements>) drawn->logit = row_value(row, drawn->token);
  return true;
}

// `draw` by sums of parts, part_sums [tiles, kWarps]. The one thread gets log(z) of the target's
// law, too. kTree: TileWeights.
//
// The part that the draw falls into is weighed by the code that has weighed the share: a block
// waits for instructions that it executes for the first time.
template <Elements kElements, bool kTree = false>
__device__ __forceinline__ bool draw_by_parts(const DrawTask& task, uint64_t* part_sums,
                                              uint32_t* counter, Share share, const Divisor& splits,
                                              Drawn* drawn, double* log_z) {
  constexpr Layout kLayout = Layout::kBlocked;
  constexpr bool kAhead = kHasRegisters<kElements>;
  constexpr int32_t kLines = 2;  // a thread, of each row, into L2: 8 tiles of 16-bit entries
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarp;
  const int64_t tiles = num_tiles(task.target.vocab);
  bool residual = task.residual;
  for (bool again = false;; again = true) {
    const bool has_draft = residual && task.draft.data != nullptr;
    prefetch_tiles(task.target, share, threadIdx.x, kThreads, kLines);
    if (has_draft) prefetch_tiles(task.draft, share, threadIdx.x, kThreads, kLines);
    RawTiles raw;
    const auto load = [&](int64_t tile) {
      load_tile<kLayout, kElements>(task.target, tile, &raw.target);
      if (has_draft) load_tile<kLayout, kElements>(task.draft, tile, &raw.draft);
    };
    int32_t tile = static_cast<int32_t>(share.first), last = static_cast<int32_t>(share.last);
    if (kAhead && tile < last) load(tile);
    // What needs no logits is computed while the first ones are on their way.
    const DrawWeights<kElements, kTree> weights(task, residual);
    *log_z = log(task.target_law.z);
    DrawnPart part{0, 0};
    uint64_t total = 0;
    for (bool finds = false;; finds = true) {
#pragma unroll 1
      for (; tile < last; ++tile) {
        float w[kPerThread];
        if (!kAhead) load(tile);
        weights.template weigh<kLayout, kAhead>(tile, raw, w, [&] {
          if (kAhead && tile + 1 < last) load(tile + 1);
        });
        if (finds) return find_in_part<kElements, kTree>(weights, part, raw, w, drawn);
        const uint64_t sum = warp_sum(weights.template sum<kAhead>(w));
        if (threadIdx.x % kWarp == 0) part_sums[tile * kWarps + warp] = sum;
      }
      if (again) {
        __syncthreads();
      } else if (!is_last_block(counter, splits)) {
        return false;
      }
      constexpr int kHeld = 10;
      const auto sum_of = [&](int64_t k) { return part_sums[k]; };
      part = find_part<kHeld>(sum_of, tiles * kWarps, task.u, &total);
      if (total == 0 && residual) break;
      if (part.index % kWarps != warp) return false;
      tile = static_cast<int32_t>(part.index) / kWarps;
      last = tile + 1;
      if (kAhead) load(tile);
    }
    residual = false;  // empty, by rounding or because p = q: what is left is the target's own law
    share = {0, tiles};
    __syncthreads();  // all have read the sums
  }
}

// `draw` in the way that rows of these entries allow; `sums` has room for those of parts.
template <Elements kElements, bool kTree = false>
__device__ __forceinline__ bool draw_in_shares(const DrawTask& task, uint64_t* sums,
                                               uint32_t* counter, const Share& share,
                                               const Divisor& splits, Drawn* drawn, double* log_z) {
  if constexpr (are_plain(kElements)) {
    return draw_by_parts<kElements, kTree>(task, sums, counter, share, splits, drawn, log_z);
  } else {
    if (!draw<kElements, kTree>(task, sums, counter, share, splits, &drawn->token)) return false;
    drawn->logit = row_value(task.target, drawn->token);
    *log_z = log(task.target_law.z);
    return true;
  }
}

}  // namespace cuda
}  // namespace specdec
