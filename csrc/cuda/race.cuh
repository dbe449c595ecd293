// Exponential races (core/race.h): the entry of a row with the least E / p(x).
//
// Grid: a block takes a few consecutive tiles of one row; the row's last block to arrive compares
// what they found. Reads 2 or 4 bytes per entry, from L2 as a rule; writes 16 bytes a block.
// Numerics: weights in fp32, those that draws use; of the noise, the upper half of its bits is
// drawn for every entry that has weight, by one counter for two tokens. It bounds an entry's time
// from below: only the few entries that may still win get all bits, logarithm and quotient, in
// float64. The winner is a minimum, so neither splits nor the order of threads can change it.
#pragma once

#include "../core/race.h"
#include "shared.cuh"
#include "tile.cuh"

namespace specdec {
namespace cuda {

// A row's law, valid and no point mass, and its race.
struct RaceTask : LawRow {
  Race race;
};

// ---- the first of many ---

// In every lane.
__device__ __forceinline__ Runner first_of_warp(Runner best) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const Runner other{__shfl_xor_sync(kAllLanes, best.time, lanes),
                       __shfl_xor_sync(kAllLanes, best.entry, lanes)};
    if (comes_before(other, best)) best = other;
  }
  return best;
}

// In every thread. The block meets before the next call, which overwrites of_warp.
__device__ __forceinline__ Runner first_of_block(Runner best) {
  __shared__ SharedArray<Runner, kWarps> of_warp;
  best = first_of_warp(best);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    if (comes_before(of_warp[w], best)) best = of_warp[w];
  }
  return best;
}

// ---- bounds ---

// Relative error 2^-22, for divisors from 2^-126 on.
__device__ __forceinline__ float quick_quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

// A time that an entry cannot beat, but for rounding: E >= u >= head * 2^-32. Without weight it
// never arrives.
__device__ __forceinline__ float least_time(uint32_t head, float weight) {
  return weight > 0.0f ? quick_quotient(static_cast<float>(head >> 8) * 0x1p-24f, weight)
                       : INFINITY;
}

// What a bound is compared with: far above the bounds' rounding errors.
__device__ __forceinline__ float limit_of(const Runner& best) {
  return static_cast<float>(best.time) * (1.0f + 0x1p-20f);
}

__device__ __forceinline__ uint32_t noise_head(const Race& race, int64_t token) {
  const PhiloxWords words =
      philox4x32_10(race.seed, race_counter(race, static_cast<uint32_t>(token >> 1)));
  return (token & 1) != 0 ? words.word[3] : words.word[1];
}

// Turns the weights of two neighbouring entries, the first of which is even, into bounds.
__device__ __forceinline__ void bound_pair(const RaceTask& task, int64_t entry, float* x) {
  uint32_t heads[2] = {0, 0};
  if (task.row.tokens != nullptr) {
    if (x[0] > 0.0f) heads[0] = noise_head(task.race, task.row.tokens[entry]);
    if (x[1] > 0.0f) heads[1] = noise_head(task.race, task.row.tokens[entry + 1]);
  } else if (x[0] > 0.0f || x[1] > 0.0f) {
    const PhiloxWords words =
        philox4x32_10(task.race.seed, race_counter(task.race, static_cast<uint32_t>(entry >> 1)));
    heads[0] = words.word[1];
    heads[1] = words.word[3];
  }
  x[0] = least_time(heads[0], x[0]);
  x[1] = least_time(heads[1], x[1]);
}

// ---- a row ---

__device__ __forceinline__ int64_t entry_at(int64_t tile, int j) {
  return tile * kTile + vector_offset<Layout::kStriped>(j / kVector) + j % kVector;
}

__device__ __forceinline__ Runner run(const RaceTask& task, const ExpWeight& weight,
                                      int64_t entry) {
  const double noise = race_noise(task.race, token_of_entry(task.row, entry));
  return {noise / static_cast<double>(weight(row_value(task.row, entry))), entry};
}

// Lets a tile's entries run. `best` is this thread's, `limit` the warp's.
__device__ __forceinline__ void race_tile(const RaceTask& task, int64_t tile, Runner* best,
                                          float* limit) {
  RawTile raw;
  float least[kPerThread];
  load_tile<Layout::kStriped>(task.row, tile, &raw);
  widen_tile<Layout::kStriped>(task.row, tile, raw, least);
  const ExpWeight weight(task.law);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) least[j] = weight(least[j]);
#pragma unroll
  for (int j = 0; j < kPerThread; j += 2) bound_pair(task, entry_at(tile, j), least + j);
  for (;;) {
    // The warp's entry with the least bound first: its time rules most of the others out.
    float lowest = INFINITY;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) lowest = fminf(lowest, least[j]);
    const float bound = warp_min(lowest);
    if (!(bound < INFINITY && bound <= *limit)) return;
    if (lowest == bound) {
      int at = 0;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) at = least[j] == lowest ? j : at;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) least[j] = j == at ? INFINITY : least[j];
      const Runner runner = run(task, weight, entry_at(tile, at));
      if (comes_before(runner, *best)) *best = runner;
    }
    *limit = warp_min(limit_of(*best));
  }
}

// The race of a row, by `splits` blocks with a place each in `found`. True in every thread of the
// last one to arrive at `counter` (0 before the launch, and after it), with *winner set. `task` is
// shared, and what it holds is known to all threads.
__device__ inline bool run_race(const RaceTask& task, Runner* found, uint32_t* counter,
                                int64_t split, const Divisor& splits, int64_t* winner) {
  const Share share = share_of(num_tiles(task.row.vocab), split, splits);
  Runner best;
  float limit = INFINITY;
#pragma unroll 1
  for (int64_t tile = share.first; tile < share.last; ++tile) race_tile(task, tile, &best, &limit);
  best = first_of_block(best);
  if (threadIdx.x == 0) found[split] = best;
  if (!is_last_block(counter, splits)) return false;
#pragma unroll 1
  for (int64_t s = threadIdx.x; s < splits; s += kThreads) {
    if (comes_before(found[s], best)) best = found[s];
  }
  *winner = first_of_block(best).entry;
  return true;
}

}  // namespace cuda
}  // namespace specdec
