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

// What a block knows of a draw beside the task.
template <Elements kElements>
struct PartDraw {
  DrawWeights<kElements, false> weights;
  double log_z;  // of the target's law
};

// Whether there are registers for the next tile, and for its steps apart, while one is worked on.
template <Elements kElements>
constexpr bool kHasRegisters = bytes_of(element_of(kElements)) == 2;

// Writes out[t * kWarps + w], the integer weight of part w of tile t, for the tiles of a share;
// and, by one thread, what the block knows of the draw from here on. What needs no logits is
// computed while the first ones are on their way. Nothing aliases, so that the task is read once.
// Collective over the block.
template <Elements kElements>
__device__ __attribute__((noinline)) void sum_parts(const DrawTask& __restrict__ task,
                                                    bool residual, const Share share,
                                                    uint64_t* __restrict__ out,
                                                    PartDraw<kElements>* __restrict__ draw) {
  constexpr bool kAhead = kHasRegisters<kElements>;
  const bool has_draft = residual && task.draft.data != nullptr;
  constexpr int32_t kLines = 2;  // a thread, of each row, into L2: 8 tiles of 16-bit entries
  prefetch_tiles(task.target, share, threadIdx.x, kThreads, kLines);
  if (has_draft) prefetch_tiles(task.draft, share, threadIdx.x, kThreads, kLines);
  RawTiles raw;
  const auto load = [&](int64_t tile) {
    if (tile >= share.last) return;
    load_tile<Layout::kStriped, kElements>(task.target, tile, &raw.target);
    if (has_draft) load_tile<Layout::kStriped, kElements>(task.draft, tile, &raw.draft);
  };
  if (kAhead) load(share.first);
  const DrawWeights<kElements, false> weights(task, residual);
  if (threadIdx.x == 0) *draw = {weights, log(task.target_law.z)};
  for (int64_t tile = share.first; tile < share.last; ++tile) {
    float w[kPerThread];
    if (!kAhead) load(tile);
    weights.template weigh<Layout::kStriped, kAhead>(tile, raw, w, [&] {
      if (kAhead) load(tile + 1);
    });
    const uint64_t sum = warp_sum(weights.template sum<kAhead>(w));
    if (threadIdx.x % kWarp == 0) out[tile * kWarps + threadIdx.x / kWarp] = sum;
  }
}

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

// The lowest entry of a part whose inclusive prefix sum exceeds the threshold. True in the one
// thread that has it. Collective over the part's warp.
template <Elements kElements>
__device__ __forceinline__ bool find_in_part(const PartDraw<kElements>& draw, const DrawnPart& part,
                                             Drawn* drawn) {
  const DrawWeights<kElements, false> weights = draw.weights;
  const Row& row = weights.task().target;
  const int64_t tile = part.index / kWarps;
  RawTiles raw;
  float w[kPerThread];
  weights.template load<Layout::kBlocked>(tile, &raw);
  weights.template weigh<Layout::kBlocked, kHasRegisters<kElements>>(tile, raw, w, [] {});
  const uint64_t sum = weights.template sum<kHasRegisters<kElements>>(w);
  uint64_t total = 0;
  const uint64_t before = warp_exclusive_sum(sum, &total);
  const bool mine = before <= part.threshold && part.threshold < before + sum;
  const bool nobody = __ballot_sync(kAllLanes, mine) == 0;
  if (!mine && !(nobody && threadIdx.x % kWarp == 0)) return false;
  uint64_t prefix[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) prefix[j] = fixed_weight(w[j], weights.unit);
  prefix[0] += before;
#pragma unroll
  for (int j = 1; j < kPerThread; ++j) prefix[j] += prefix[j - 1];
  int passed = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) passed += prefix[j] <= part.threshold;
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

// A request's draw, by `splits` blocks. Each sums its `share` of tiles into part_sums [tiles,
// kWarps]; the last one to arrive at `counter` (0 before the launch, and after it) searches. True
// in the one thread that then has what is drawn, and log(z) of the target's law. The caller has
// seen to needs_draw(task); `task` is shared and known to all threads.
template <Elements kElements>
__device__ __forceinline__ bool draw_by_parts(const DrawTask& task, uint64_t* part_sums,
                                              uint32_t* counter, Share share, const Divisor& splits,
                                              Drawn* drawn, double* log_z) {
  __shared__ SharedArray<PartDraw<kElements>, 1> draw;
  const int64_t tiles = num_tiles(task.target.vocab);
  bool residual = task.residual;
  uint64_t total = 0;
  DrawnPart part{0, 0};
#pragma unroll 1
  for (bool again = false;; again = true) {
    sum_parts<kElements>(task, residual, share, part_sums, draw.data());
    if (again) {
      __syncthreads();
    } else if (!is_last_block(counter, splits)) {
      return false;
    }
    constexpr int kHeld = 10;
    const auto sum_of = [&](int64_t k) { return part_sums[k]; };
    part = find_part<kHeld>(sum_of, tiles * kWarps, task.u, &total);
    if (total > 0 || !residual) break;
    residual = false;  // empty, by rounding or because p = q: what is left is the target's own law
    share = {0, tiles};
    __syncthreads();  // all have read the sums
  }
  *log_z = draw[0].log_z;
  const bool is_its_warp = part.index % kWarps == static_cast<int>(threadIdx.x) / kWarp;
  return is_its_warp && find_in_part<kElements>(draw[0], part, drawn);
}

}  // namespace cuda
}  // namespace specdec
