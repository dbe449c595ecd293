// Several ranks that each hold a part of the vocabulary, and how they combine what they found.
//
// A rank works on whole tiles: those whose first entry is in its part. What a tile gives does not
// depend on who worked on it, and all ranks combine tiles in tile order: the bits are those of one
// rank. Only summaries of tiles are exchanged, never rows; whatever depends on exchanged numbers is
// the same everywhere, so that all ranks go through the same exchanges.
#pragma once

#include "../core/request.h"
#include "threads.h"

namespace specdec {

// Where the rows of a verify call lie on this rank: see csrc/cpu/held_rows.h.
struct HeldRows;

struct Ranks {
  int64_t rank = 0;
  int64_t count = 1;
  const int64_t* bounds =
      nullptr;  // [count + 1], where the ranks' parts of the target's rows begin
  // Rows like the target's and the draft's, of the last tile of this rank where it goes on in the
  // next rank's part; data == nullptr: it does not.
  RowBatch target_tail;
  RowBatch draft_tail;
  HeldRows* rows = nullptr;

  // all[r * bytes ...] becomes what rank r gives as `mine`. Both throw where that fails.
  void (*gather)(const Ranks& ranks, const void* mine, int64_t bytes, void* all) = nullptr;
  // Replaces each value by its sum over all ranks.
  void (*sum)(const Ranks& ranks, int64_t* values, int64_t n) = nullptr;
  void* context = nullptr;
};

namespace SPECDEC_CPU_ISA {

struct Range {
  int64_t begin, end;
  bool holds(int64_t i) const { return i >= begin && i < end; }
};

// The entries of a vocabulary that a rank was given. The last rank has the rest of a draft's
// vocabulary that is larger than the target's.
inline Range part_of(const Ranks& ranks, int64_t rank, int64_t vocab) {
  const int64_t begin = ranks.bounds[rank], end = ranks.bounds[rank + 1];
  return {begin < vocab ? begin : vocab, rank + 1 == ranks.count || end > vocab ? vocab : end};
}

// Which of the tiles of a row a rank works on.
inline Range tiles_of(const Ranks& ranks, int64_t rank, int64_t tiles) {
  const auto first = [&](int64_t r) {
    const int64_t tile = r == ranks.count ? tiles : num_tiles(ranks.bounds[r]);
    return tile < tiles ? tile : tiles;
  };
  return {first(rank), first(rank + 1)};
}

// Those that are worked on here.
inline Range held_tiles(const ThreadPool& pool, int64_t tiles) {
  return pool.ranks == nullptr ? Range{0, tiles} : tiles_of(*pool.ranks, pool.ranks->rank, tiles);
}

// Gives all ranks the values of all tiles, [rows, tiles], of which each has filled in its own.
// `rows`: the numbers of the n rows that matter.
template <typename T>
inline void share_tiles(const ThreadPool& pool, T* values, int64_t tiles, const int64_t* rows,
                        int64_t n) {
  if (pool.ranks == nullptr || n == 0) return;
  const Ranks& ranks = *pool.ranks;
  int64_t widest = 0;
  for (int64_t r = 0; r < ranks.count; ++r) {
    const Range range = tiles_of(ranks, r, tiles);
    if (range.end - range.begin > widest) widest = range.end - range.begin;
  }
  Buffer<T> mine(n * widest), all(ranks.count * n * widest);
  const Range held = held_tiles(pool, tiles);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t t = held.begin; t < held.end; ++t) {
      mine[j * widest + t - held.begin] = values[rows[j] * tiles + t];
    }
  }
  ranks.gather(ranks, mine.data(), n * widest * sizeof(T), all.data());
  for (int64_t r = 0; r < ranks.count; ++r) {
    const Range range = tiles_of(ranks, r, tiles);
    for (int64_t j = 0; j < n; ++j) {
      const T* theirs = all.data() + (r * n + j) * widest;
      for (int64_t t = range.begin; t < range.end; ++t) {
        values[rows[j] * tiles + t] = theirs[t - range.begin];
      }
    }
  }
}

// Gives all ranks values that at most one of them has; the others give 0.
inline void share_sums(const ThreadPool& pool, int64_t* values, int64_t n) {
  if (pool.ranks != nullptr && n > 0) pool.ranks->sum(*pool.ranks, values, n);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
