// One tile of a row: 4,096 entries seen as floats, and the sums that rules need over it.
//
// Every float reduction over the vocabulary runs tile by tile, with the same accumulators in the
// same order, and tiles are combined in order: threads, batch and split never change a bit. A tile
// of floats is 16 KiB, so that a second look at it comes from L1.
#pragma once

#include <cfloat>
#include <cmath>

#include "../core/fixed_point.h"
#include "../core/rows.h"
#include "vec.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

constexpr int64_t kTilesPerThread = 4;  // below this, a thread is not worth waking
constexpr int64_t kListsPerThread = 8;  // likewise
constexpr int kAccumulators = 4;
static_assert(kGroup % (kAccumulators * kLanes) == 0, "a group is a whole number of steps");

template <VecF (*Widen)(VecH)>
inline void widen_tile(const uint16_t* source, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, Widen(load<VecH>(source + i)));
  for (; i < n; ++i) {
    VecH one{};
    one[0] = source[i];
    out[i] = Widen(one)[0];
  }
}

// Entries under a mask whose bits are in their order, a word at a time. `begin` is that of a group.
template <typename T>
inline void copy_allowed(const Row& row, int64_t begin, int64_t n, T hidden, T* out) {
  static_assert(kGroup % 32 == 0, "a group begins with a word of the mask");
  const T* data = static_cast<const T*>(row.data) + begin;
  const int64_t masked = row.num_tokens - begin < n ? row.num_tokens - begin : n;
  int64_t i = 0;
  for (; i + 32 <= masked; i += 32) {
    const uint32_t word = row.allowed[(begin + i) >> 5];
    for (int j = 0; j < 32; ++j) out[i + j] = (word >> j & 1u) != 0 ? data[i + j] : hidden;
  }
  for (; i < n; ++i) out[i] = is_allowed(row, begin + i) ? data[i] : hidden;
}

template <typename T>
inline void copy_entries(const Row& row, int64_t begin, int64_t n, T hidden, T* out) {
  if (!row.by_token && row.tokens == nullptr) return copy_allowed(row, begin, n, hidden, out);
  const T* data = static_cast<const T*>(row.data);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = place_of_entry(row, begin + i);
    const T value = data[place < 0 ? 0 : place];  // no branch: that vectorises
    out[i] = place < 0 ? hidden : value;
  }
}

// Of a row that is a list of tokens.
inline void copy_listed(const Row& row, int64_t begin, int64_t n, float* out) {
  memset(out, 0, n * sizeof(float));
  const float* probs = static_cast<const float*>(row.data);
  for (int32_t k = first_listed(row, begin); k < row.listed && row.tokens[k] < begin + n; ++k) {
    if (is_allowed(row, row.tokens[k])) out[row.tokens[k] - begin] = probs[k];
  }
}

// Whether a row is a list that names no token of a tile: all weights there are 0.
inline bool is_bare(const Row& row, int64_t tile) {
  if (row.listed == 0) return false;
  const int32_t first = first_listed(row, tile * kTile);
  return first == row.listed || row.tokens[first] >= (tile + 1) * kTile;
}

// Bits of the entries that weigh nothing: 0, or -inf in the row's type.
inline uint16_t nothing_of_16_bits(const Row& row) {
  return row.linear ? 0 : row.element == Element::kBFloat16 ? 0xFF80 : 0xFC00;
}

// Whether the entries of a row are those that lie in memory, in that order.
inline bool is_verbatim(const Row& row) { return row.allowed == nullptr && !row.by_token; }

// The entries [begin, begin + n) of a row in its own type, where they lie; or copied to `copy`,
// where some are hidden or the order is another, so that all that follows sees a plain row.
inline const void* raw_entries(const Row& row, int64_t begin, int64_t n, float* copy) {
  if (is_verbatim(row)) {
    const int64_t bytes = row.element == Element::kFloat32 ? 4 : 2;
    return static_cast<const char*>(row.data) + begin * bytes;
  }
  if (row.listed > 0) {
    copy_listed(row, begin, n, copy);
  } else if (row.element == Element::kFloat32) {
    copy_entries(row, begin, n, nothing(row), copy);
  } else {
    copy_entries(row, begin, n, nothing_of_16_bits(row), reinterpret_cast<uint16_t*>(copy));
  }
  return copy;
}

// Whether any of these entries lies in [begin, end).
inline bool touches(int64_t excluded, const TokenList& hidden, int64_t begin, int64_t end) {
  bool any = excluded >= begin && excluded < end;
  for (int64_t k = 0; k < hidden.count; ++k) {
    any |= hidden.tokens[k] >= begin && hidden.tokens[k] < end;
  }
  return any;
}

// The row that one of its tiles is read from.
inline Row held_tile(Row row, int64_t tile) {
  if (row.held == nullptr) return row;
  row.data = tile == row.held->tail_tile ? row.held->tail : row.held->data;
  row.element = row.held->element;
  row.held = nullptr;
  return row;
}

// The entries [tile * kTile, ...) of a row as floats, padded to `groups` whole groups with entries
// of weight 0. `buffer` holds kTile floats; a full float32 tile is used where it lies. `excluded`
// (an entry, or -1) gets weight 0 too, and so do the entries in `hidden`.
inline const float* view_tile(const Row& whole, int64_t tile, int64_t groups, float* buffer,
                              int64_t excluded = -1, const TokenList& hidden = {}) {
  const Row row = held_tile(whole, tile);
  const int64_t begin = tile * kTile;
  int64_t n = row.vocab - begin;
  n = n < 0 ? 0 : n < groups * kGroup ? n : groups * kGroup;
  const bool patch = touches(excluded, hidden, begin, begin + n);
  if (n > 0 && row.element == Element::kFloat32) {
    const float* source = static_cast<const float*>(raw_entries(row, begin, n, buffer));
    if (source != buffer) {
      if (n == groups * kGroup && !patch) return source;
      memcpy(buffer, source, n * sizeof(float));
    }
  } else if (n > 0) {
    float copy[kTile];
    const uint16_t* source = static_cast<const uint16_t*>(raw_entries(row, begin, n, copy));
    if (row.element == Element::kBFloat16) {
      widen_tile<widen_bfloat16>(source, n, buffer);
    } else {
      widen_tile<widen_float16>(source, n, buffer);
    }
  }
  for (int64_t i = n; i < groups * kGroup; ++i) buffer[i] = nothing(row);
  if (patch) {
    if (excluded >= begin && excluded < begin + n) buffer[excluded - begin] = nothing(row);
    for (int64_t k = 0; k < hidden.count; ++k) {
      const int64_t i = hidden.tokens[k] - begin;
      if (i >= 0 && i < n) buffer[i] = nothing(row);
    }
  }
  return buffer;
}

// Two vectors of entries, as reductions take them.
struct VecPair {
  VecF first, second;
};

// Entries of a tile as they lie there. While one tile is worked on, the next one of the row
// (`ahead`) is on its way from memory.
struct FloatEntries {
  const float* data;
  const float* ahead;
  VecPair operator()(int64_t i) const {
    __builtin_prefetch(ahead + i);
    __builtin_prefetch(ahead + i + kLanes);
    return {load<VecF>(data + i), load<VecF>(data + i + kLanes)};
  }
};

// The even entries first, then the odd ones: that takes one operation a vector.
struct BFloat16Entries {
  const uint16_t* data;
  const uint16_t* ahead;
  VecPair operator()(int64_t i) const {
    __builtin_prefetch(ahead + i);
    const VecU both = load<VecU>(data + i);
    return {(VecF)(both << 16), (VecF)(both & 0xFFFF0000u)};
  }
};

inline FloatEntries float_entries(const Row& row, int64_t tile, const float* x,
                                  const float* buffer) {
  return {x, x == buffer || tile + 1 == num_tiles(row.vocab) ? x : x + kTile};
}

// Whether BFloat16Entries may read a tile without padding.
inline bool is_whole_bfloat16(const Row& row, int64_t tile, int64_t groups, int64_t excluded = -1,
                              const TokenList& hidden = {}) {
  const int64_t end = tile * kTile + groups * kGroup;
  return row.element == Element::kBFloat16 && end <= row.vocab &&
         !touches(excluded, hidden, tile * kTile, end);
}

// `copy` as for raw_entries.
inline BFloat16Entries bfloat16_entries(const Row& row, int64_t tile, int64_t groups, float* copy) {
  const uint16_t* x =
      static_cast<const uint16_t*>(raw_entries(row, tile * kTile, groups * kGroup, copy));
  const bool last = tile + 1 == num_tiles(row.vocab) || !is_verbatim(row);
  return {x, last ? x : x + kTile};
}

// Calls body(entries, groups) with a tile of a row, in the order that suits its type.
template <typename Body>
inline auto with_entries(const Row& whole, int64_t tile, const Body& body) {
  const Row row = held_tile(whole, tile);
  const int64_t groups = tile_groups(row.vocab, tile);
  float buffer[kTile];
  if (is_whole_bfloat16(row, tile, groups)) {
    return body(bfloat16_entries(row, tile, groups, buffer), groups);
  }
  const float* x = view_tile(row, tile, groups, buffer);
  return body(float_entries(row, tile, x, buffer), groups);
}

// Sums of pairs, in `kAccumulators` vectors.
struct PairSums {
  VecF sums[kAccumulators] = {};

  // Adds the pairs that step(offset) gives over whole groups: the entries [begin, end).
  template <typename Step>
  void add(int64_t begin, int64_t end, const Step& step) {
    for (int64_t i = begin; i < end; i += kAccumulators * kLanes) {
      for (int a = 0; a < kAccumulators; a += 2) {
        const VecPair pair = step(i + a * kLanes);
        sums[a] += pair.first;
        sums[a + 1] += pair.second;
      }
    }
  }
  double total() const { return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])); }
};

// Sums the pairs that step(offset) gives over the groups of a tile.
template <typename Step>
inline double accumulate_pairs(int64_t groups, const Step& step) {
  PairSums sums;
  sums.add(0, groups * kGroup, step);
  return sums.total();
}

template <typename Step>
inline double accumulate(int64_t groups, const Step& step) {
  return accumulate_pairs(groups, [&](int64_t i) { return VecPair{step(i), step(i + kLanes)}; });
}

// Maximum of a tile and of each of its groups; false if an entry is NaN or +inf.
template <typename Entries>
inline bool tile_max(const Entries& entries, int64_t groups, float* max, float* group_max) {
  VecF tile = splat(-INFINITY);
  VecI valid = (VecI)(tile == tile);
  for (int64_t g = 0; g < groups; ++g) {
    VecF best[kAccumulators];
    for (int a = 0; a < kAccumulators; ++a) best[a] = splat(-INFINITY);
    for (int i = 0; i < kGroup; i += kAccumulators * kLanes) {
      for (int a = 0; a < kAccumulators; a += 2) {
        const VecPair v = entries(g * kGroup + i + a * kLanes);
        valid &= (VecI)(v.first <= FLT_MAX) & (VecI)(v.second <= FLT_MAX);
        best[a] = max_of(v.first, best[a]);
        best[a + 1] = max_of(v.second, best[a + 1]);
      }
    }
    const VecF group = max_of(max_of(best[0], best[1]), max_of(best[2], best[3]));
    if (group_max != nullptr) group_max[g] = max_lanes(group);
    tile = max_of(group, tile);
  }
  *max = max_lanes(tile);
  return all_lanes(valid);
}

// Weights exp(scale * (x - reference)) of entries >= threshold (see support_threshold), else 0.
struct ExpWeight {
  VecF reference, scale, threshold;
  ExpWeight(float reference_logit, double scale_value, float threshold_value)
      : reference(splat(reference_logit)),
        scale(splat(static_cast<float>(scale_value * 1.4426950408889634))),
        threshold(splat(threshold_value)) {}
  explicit ExpWeight(const RowLaw& law)
      : ExpWeight(law.max, law.scale, support_threshold(law.cutoff, law.max, law.scale)) {}
  VecF operator()(VecF x) const {
    return keep_where((VecI)(x >= threshold), exp2_unchecked((x - reference) * scale));
  }
};

// Weights of a row of probabilities: the entries themselves.
struct LinearWeight {
  explicit LinearWeight(const RowLaw&) {}
  VecF operator()(VecF x) const { return positive_part(x); }
};

// Calls body(weight functor) with the functor that fits the law.
template <typename Body>
inline auto with_weight(const RowLaw& law, const Body& body) {
  return law.linear ? body(LinearWeight(law)) : body(ExpWeight(law));
}

template <typename Entries, typename Weight>
inline double tile_weight_sum(const Entries& entries, int64_t groups, const Weight& weight) {
  return accumulate_pairs(groups, [&](int64_t i) {
    const VecPair v = entries(i);
    return VecPair{weight(v.first), weight(v.second)};
  });
}

// ---- maximum and sum in one sweep ---

// A sum of exponentials need not wait for the tile's maximum where the reference, the maximum of
// the first group, turns out to be this close to it: weights stay below 2^16, and their rounding
// errors below 1e-6.
constexpr double kMaxLead = 16 * 0.6931471805599453;

// Weights of any logits: what fp32 exp cannot hold is 2^-125.5, which vanishes in a sum that has
// the reference's own 1, and NaN or +inf, which cost a comparison elsewhere, become NaN.
struct SweepWeight {
  VecF reference, scale, lowest;
  SweepWeight(float reference_logit, double scale_value)
      : reference(splat(reference_logit)),
        scale(splat(static_cast<float>(scale_value * 1.4426950408889634))),
        lowest(splat(static_cast<float>(-87.0 / scale_value))) {}
  VecF operator()(VecF x) const {
    const VecF difference = x - reference;
    return exp2_with_nan((difference < lowest ? lowest : difference) * scale);
  }
};

// What a sweep leaves behind: the sum is that of exp(scale * (x - reference)).
struct TileSweep {
  float max = -INFINITY;
  float reference = -INFINITY;
  bool valid = true;
  double sum = 0.0;
};

// Maximum and sum of a tile, and the maximum of each of its groups where `group_max` is given;
// false where that took the wrong reference.
template <typename Entries>
inline bool sweep_tile(const Entries& entries, int64_t groups, double scale, float* group_max,
                       TileSweep* s) {
  if (!tile_max(entries, 1, &s->reference, nullptr) || s->reference == -INFINITY) return false;
  const SweepWeight weight(s->reference, scale);
  PairSums sums;
  VecF tile = splat(-INFINITY);
  for (int64_t g = 0; g < groups; ++g) {
    VecF first = splat(-INFINITY), second = first;
    sums.add(g * kGroup, (g + 1) * kGroup, [&](int64_t i) {
      const VecPair v = entries(i);
      first = max_of(v.first, first);
      second = max_of(v.second, second);
      return VecPair{weight(v.first), weight(v.second)};
    });
    const VecF group = max_of(first, second);
    if (group_max != nullptr) group_max[g] = max_lanes(group);
    tile = max_of(group, tile);
  }
  s->sum = sums.total();
  s->max = max_lanes(tile);
  s->valid = s->sum == s->sum;
  return scale * (static_cast<double>(s->max) - s->reference) <= kMaxLead;
}

// floor(weight * unit) of one weight. For a law the unit is a power of two and the product exact.
inline uint64_t fixed_weight(float weight, double unit) {
  return static_cast<uint64_t>(static_cast<double>(weight) * unit);
}

// Sums of floor(w * 2^40) for w in [0, 1], in two 32-bit halves of 20 binary places each: all steps
// are exact, and every instruction set converts 32 bits at once. A lane holds fewer than 2^12
// weights.
struct LawSum {
  VecU high = {}, low = {};
  void add(VecF w) {
    const VecF scaled = w * 0x1p20f;
    const VecI whole = __builtin_convertvector(scaled, VecI);
    const VecF rest = scaled - __builtin_convertvector(whole, VecF);
    high += (VecU)whole;
    low += (VecU) __builtin_convertvector(rest * 0x1p20f, VecI);
  }
  uint64_t total() const {
    uint64_t highs = 0, lows = 0;
    for (int i = 0; i < kLanes; ++i) {
      highs += high[i];
      lows += low[i];
    }
    return (highs << 20) + lows;
  }
};

// Sum of floor(weight * 2^40) over the groups of a tile of a law's weights.
inline uint64_t law_fixed_sum(const float* weights, int64_t groups) {
  LawSum sums[2];
  for (int64_t i = 0; i < groups * kGroup; i += 2 * kLanes) {
    sums[0].add(load<VecF>(weights + i));
    sums[1].add(load<VecF>(weights + i + kLanes));
  }
  return sums[0].total() + sums[1].total();
}

// Sum of floor(weight * unit), the product rounded to float64.
inline uint64_t residual_fixed_sum(const float* weights, int64_t groups, double unit) {
  VecL sums[kAccumulators] = {};
  for (int64_t i = 0; i < groups * kGroup; i += kAccumulators * kLanes / 2) {
    for (int a = 0; a < kAccumulators; ++a) {
      const HalfF w = load<HalfF>(weights + i + a * kLanes / 2);
      sums[a] += __builtin_convertvector(__builtin_convertvector(w, VecD) * unit, VecL);
    }
  }
  const VecL total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  uint64_t sum = 0;
  for (int i = 0; i < kLanes / 2; ++i) sum += static_cast<uint64_t>(total[i]);
  return sum;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
