// Exponential races: the entry with the least E / p(x) of each row.
//
// Grid: (row, tile) units over threads. Reads a row once more, from cache after the law pass, 2 or
// 4 bytes per entry; writes 16 bytes a tile. Numerics: weights in fp32; of the noise all bits are
// drawn for every entry, but only the few entries that may still win get their logarithm and
// quotient, in float64.
#include "race.h"

#include "ranks.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// ---- Philox on vectors: a 32-bit word in each 64-bit lane ---

typedef uint64_t VecW __attribute__((vector_size(4 * kLanes)));
constexpr int kWords = kLanes / 2;

// The 64-bit products of the lanes' low halves.
inline VecW multiply_words(VecW a, VecW b) {
#if defined(__AVX512F__)
  return (VecW)_mm512_maskz_mul_epu32(0xFF, (__m512i)a, (__m512i)b);  // GCC warns of the plain one
#elif defined(__AVX2__)
  return (VecW)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// The more significant words of both pairs.
struct Heads {
  VecW even, odd;
};

inline Heads noise_heads(const Race& race, VecW pairs) {
  const PhiloxWords counter = race_counter(race, 0);
  VecW c0 = pairs, c1 = VecW{} + counter.word[1];
  VecW c2 = VecW{} + counter.word[2], c3 = VecW{} + counter.word[3];
  uint32_t key_low = static_cast<uint32_t>(race.seed);
  uint32_t key_high = static_cast<uint32_t>(race.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const VecW even = multiply_words(c0, VecW{} + 0xD2511F53u);
    const VecW odd = multiply_words(c2, VecW{} + 0xCD9E8D57u);
    c0 = (odd >> 32) ^ c1 ^ key_low;
    c1 = odd & 0xFFFFFFFFu;
    c2 = (even >> 32) ^ c3 ^ key_high;
    c3 = even & 0xFFFFFFFFu;
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return {c1, c3};
}

// heads[i] = upper 32 bits of the noise of token first + i; first is even.
inline void write_heads(const Race& race, int64_t first, int64_t n, uint32_t* heads) {
  VecW pairs = VecW{} + static_cast<uint64_t>(first / 2);
  for (int j = 0; j < kWords; ++j) pairs[j] += j;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Heads h = noise_heads(race, pairs);
    store(heads + i, h.even | h.odd << 32);
    pairs += kWords;
  }
}

// The same for any n tokens, a counter each, padded to whole groups.
inline void write_heads(const Race& race, const int32_t* tokens, int64_t n, uint32_t* heads) {
  for (int64_t i = 0; i < num_groups(n) * kGroup; i += kWords) {
    VecW token{};
    for (int j = 0; j < kWords && i + j < n; ++j) token[j] = static_cast<uint64_t>(tokens[i + j]);
    const Heads h = noise_heads(race, token >> 1);
    for (int j = 0; j < kWords; ++j) {
      heads[i + j] = static_cast<uint32_t>((token[j] & 1) != 0 ? h.odd[j] : h.even[j]);
    }
  }
}

// ---- races ---

// The smallest weight times `limit` that some entry's noise may still be under: E >= u >= head *
// 2^-32, and rounding stays below 2^-20.
inline VecI may_win(const uint32_t* heads, const float* weights, float limit) {
  const VecI upper = (VecI)(load<VecU>(heads) >> 8);
  const VecF noise = __builtin_convertvector(upper, VecF) * 0x1p-24f;
  return (VecI)(noise <= load<VecF>(weights) * limit);
}

inline float limit_of(const Runner& best) {
  return static_cast<float>(best.time) * (1.0f + 0x1p-20f);
}

// Lets the entries of one group run; entry i of the tile is entry first + i of the row.
inline void run_group(const RaceTask& task, int64_t first, const uint32_t* heads,
                      const float* weights, int64_t begin, Runner* best) {
  VecI any{};
  const float limit = limit_of(*best);
  for (int64_t i = begin; i < begin + kGroup; i += kLanes) {
    any |= may_win(heads + i, weights + i, limit);
  }
  if (all_lanes(~any)) return;
  for (int64_t i = begin; i < begin + kGroup; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    if (static_cast<float>(heads[i] >> 8) * 0x1p-24f > weights[i] * limit_of(*best)) continue;
    const double noise = race_noise(task.race, token_of_entry(task.row, first + i));
    const Runner runner{noise / static_cast<double>(weights[i]), first + i};
    if (comes_before(runner, *best)) *best = runner;
  }
}

Runner run_tile(const RaceTask& task, int64_t tile) {
  float buffer[kTile], weights[kTile];
  uint32_t heads[kTile];
  const int64_t first = tile * kTile;
  const int64_t groups = tile_groups(task.row.vocab, tile);
  const float* x = view_tile(task.row, tile, groups, buffer);
  const ExpWeight weight(task.law);
  for (int64_t i = 0; i < groups * kGroup; i += kLanes) {
    store(weights + i, weight(load<VecF>(x + i)));
  }
  if (task.row.tokens == nullptr) {
    write_heads(task.race, first, groups * kGroup, heads);
  } else {
    const int64_t left = task.row.vocab - first;
    write_heads(task.race, task.row.tokens + first, left < kTile ? left : kTile, heads);
  }
  Runner best;
  for (int64_t g = 0; g < groups; ++g) run_group(task, first, heads, weights, g * kGroup, &best);
  return best;
}

// From the winners of each rank's tiles to those of all.
void finish_over_ranks(const ThreadPool& pool, Runner* winners, int64_t n) {
  if (pool.ranks == nullptr || n == 0) return;
  const Ranks& ranks = *pool.ranks;
  Buffer<Runner> all(ranks.count * n);
  ranks.gather(ranks, winners, n * sizeof(Runner), all.data());
  for (int64_t k = 0; k < ranks.count * n; ++k) {
    if (comes_before(all[k], winners[k % n])) winners[k % n] = all[k];
  }
}

}  // namespace

void run_races(const ThreadPool& pool, RaceTask* tasks, int64_t n) {
  int64_t tiles = 1;
  for (int64_t r = 0; r < n; ++r) {
    if (num_tiles(tasks[r].row.vocab) > tiles) tiles = num_tiles(tasks[r].row.vocab);
  }
  Buffer<Runner> best(n * tiles), winners(n);
  const Range held = held_tiles(pool, tiles);
  parallel_for(pool, n * tiles, 1, [&](int64_t unit) {
    const RaceTask& task = tasks[unit / tiles];
    const int64_t tile = unit % tiles;
    if (task.active && tile < num_tiles(task.row.vocab) && held.holds(tile)) {
      best[unit] = run_tile(task, tile);
    }
  });
  int64_t count = 0;
  for (int64_t r = 0; r < n; ++r) {
    if (!tasks[r].active) continue;
    Runner winner;
    for (int64_t t = held.begin; t < held.end && t < num_tiles(tasks[r].row.vocab); ++t) {
      if (comes_before(best[r * tiles + t], winner)) winner = best[r * tiles + t];
    }
    winners[count++] = winner;
  }
  finish_over_ranks(pool, winners.data(), count);
  count = 0;
  for (int64_t r = 0; r < n; ++r) {
    if (tasks[r].active) tasks[r].winner = winners[count++].entry;
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
