// Cutoffs without sorting: which logits top-k, top-p and min-p keep, and the sums of what is kept.
//
// Grid: a block a row. The maxima of groups of 128 entries, left by the law pass, say where kept
// entries can be: a filter's kept set lies above a floor that is found from them and from z, and
// only groups that reach the floor are read again (4 bytes a group and, as a rule, one group for
// each of k entries). Where more than 4,096 entries reach it (a large top-k, a top-p of a nearly
// flat law), the row is read again instead, three times or more, from L2.
// Numerics: counts, and masses in 2^-40 fixed point, are exact; so neither the order in which
// threads find candidates nor the number of threads changes a cutoff or a sum. A top-p alone that
// is found among candidates is a share of the law pass's z, which is the same mass within its
// rounding.
#pragma once

#include "law_pass.cuh"

namespace specdec {
namespace cuda {

constexpr int kMaxCandidates = 4096;
constexpr int kLastBin = kRadixBins - 1;
constexpr int kBinsPerThread = kRadixBins / kThreads;
static_assert(kRadixBins % kThreads == 0, "threads share the bins evenly");

// What a block shares while it looks for the cutoffs of a row: 33 KB.
struct CutoffMemory {
  float candidates[kMaxCandidates];
  union {
    uint64_t histogram[kRadixBins];
    int32_t groups[kMaxCandidates];
  };
  int32_t count;
  int32_t bin;
  uint64_t above;
};

__device__ __forceinline__ void clear_histogram(CutoffMemory* memory) {
  for (int bin = threadIdx.x; bin < kRadixBins; bin += kThreads) memory->histogram[bin] = 0;
  __syncthreads();
}

// Goes from the last bin down to the one where the weight above it, *above included, comes to reach
// the bound; false if none does. The parallel form of core's radix_descend. The histogram is
// complete (the threads need not have met yet).
__device__ __forceinline__ bool find_bin(CutoffMemory* memory, uint64_t bound, uint64_t* above,
                                         int* bin) {
  __syncthreads();
  const int last = kLastBin - static_cast<int>(threadIdx.x) * kBinsPerThread;
  uint64_t sum = 0;
  // Each thread begins at another of its bins: neighbours would meet in the same memory bank.
  for (int i = 0; i < kBinsPerThread; ++i) {
    sum += memory->histogram[last - static_cast<int>(i + threadIdx.x) % kBinsPerThread];
  }
  uint64_t total = 0;
  uint64_t so_far = *above + block_exclusive_sum(sum, &total);
  if (*above + total < bound) return false;
  if (so_far < bound && so_far + sum >= bound) {
    int at = last;
    while (so_far + memory->histogram[at] < bound) so_far += memory->histogram[at--];
    memory->bin = at;
    memory->above = so_far;
  }
  __syncthreads();
  *above = memory->above;
  *bin = memory->bin;
  return true;
}

// ---- where entries come from ---

// Every source calls visit(x) for its entries, each in one thread.

struct CandidateSource {
  const float* values;
  int32_t count;

  template <typename Visit>
  __device__ __forceinline__ void operator()(const Visit& visit) const {
    for (int32_t i = threadIdx.x; i < count; i += kThreads) visit(values[i]);
  }
};

__device__ __forceinline__ void load_vector_at(const Row& row, int64_t first, RawVector* out) {
  if (row.element == Element::kFloat32) {
    load_vector<4>(row.element, span_from<4>(row, first), 0, out);
  } else {
    load_vector<2>(row.element, span_from<2>(row, first), 0, out);
  }
}

__device__ __forceinline__ void hide_in_vector(const Row& row, int64_t first, float* x) {
  const uint32_t allowed = allowed_in_vector(row, first);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if ((allowed >> j & 1u) == 0) x[j] = nothing(row);
  }
}

template <bool kMasked>
struct RowSource {
  const Row& row;

  // A thread's vectors lie a block apart. A round loads the next of them before it visits the one
  // that the round before has loaded: the wait overlaps, and the code for each is there once.
  template <typename Visit>
  __device__ __forceinline__ void operator()(const Visit& visit) const {
    constexpr int64_t kApart = kThreads * kVector;
    RawVector raw, next;
#pragma unroll 1
    for (int64_t at = threadIdx.x * kVector; at < row.vocab + kApart; at += kApart) {
      if (at < row.vocab) load_vector_at(row, at, &next);
      if (at >= kApart) visit_vector(at - kApart, raw, visit);
      raw = next;
    }
  }

 private:
  // Masked entries and those past the row have no part in any selection.
  template <typename Visit>
  __device__ __forceinline__ void visit_vector(int64_t first, const RawVector& raw,
                                               const Visit& visit) const {
    float x[kVector];
    widen_vector(row.element, raw, x);
    if (kMasked) hide_in_vector(row, first, x);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (x[j] > -INFINITY) visit(x[j]);
    }
  }
};

// ---- selections ---

// Masses of a law's entries in 2^-40 fixed point: 0 below its cutoff.
struct Mass {
  ExpWeight weight;
  __device__ __forceinline__ explicit Mass(const RowLaw& law) : weight(law) {}
  __device__ __forceinline__ uint64_t operator()(float x) const { return fixed_weight(weight(x)); }
};

// What a selection adds up: entries, or their masses. One type for both, because the code of a
// selection is large.
struct Weigh {
  bool counts;
  Mass mass;
  __device__ __forceinline__ uint64_t operator()(float x) const { return counts ? 1 : mass(x); }
};

__device__ __forceinline__ Weigh by_number(const RowLaw& law) { return {true, Mass(law)}; }
__device__ __forceinline__ Weigh by_mass(const RowLaw& law) { return {false, Mass(law)}; }

// The largest value for which the weight of all entries >= it, `above` included, reaches the bound;
// false if there is none. A call: where entries are few, as a rule, select_among_few takes its
// place.
template <typename Source>
__device__ __attribute__((noinline)) bool select_by_radix(CutoffMemory* memory,
                                                          const Source& source, uint64_t bound,
                                                          uint64_t above, const Weigh& weigh,
                                                          float* value) {
  RadixSelection selection;
#pragma unroll 1
  for (int level = 0; level < kRadixLevels; ++level) {
    clear_histogram(memory);
    source([&](float x) {
      const uint32_t key = order_key(x);
      if (!radix_matches(selection, key, level)) return;
      const uint64_t weight = weigh(x);
      if (weight > 0) shared_add(&memory->histogram[radix_digit(key, level)], weight);
    });
    int bin = 0;
    if (!find_bin(memory, bound, &above, &bin)) return false;
    selection.prefix |= static_cast<uint32_t>(bin) << radix_shift(level);
  }
  *value = key_value(selection.prefix);
  return true;
}

// Threads that compare one of `count` candidates with all others, a part of them each; neighbours.
__device__ __forceinline__ int32_t comparing_threads(int32_t count) {
  return 4 * count <= kThreads ? 4 : 2 * count <= kThreads ? 2 : 1;
}

// The same of at most kThreads candidates, which are compared with each other, between three
// barriers in the place of a dozen.
__device__ __forceinline__ bool select_among_few(CutoffMemory* memory,
                                                 const CandidateSource& source, uint64_t bound,
                                                 uint64_t above, const Weigh& weigh, float* value) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const int32_t parts = comparing_threads(source.count);
  const int32_t mine = thread / parts;
  uint64_t* weights = memory->histogram;
  const bool has_one = mine < source.count;
  const float x = has_one ? source.values[mine] : 0.0f;
  const uint64_t weight = has_one ? weigh(x) : 0;
  if (has_one && thread % parts == 0) weights[mine] = weight;
  if (thread == 0) memory->bin = -1;
  __syncthreads();
  uint64_t larger = 0;
  uint32_t ties = 0;  // itself among them; equal values have equal weights
  if (has_one) {
#pragma unroll 4
    for (int32_t i = thread % parts; i < source.count; i += parts) {
      const float other = source.values[i];
      larger += other > x ? weights[i] : 0;
      ties += other == x ? 1 : 0;
    }
  }
  for (int32_t lanes = 1; lanes < parts; lanes *= 2) {
    larger += __shfl_xor_sync(kAllLanes, larger, lanes);
    ties += __shfl_xor_sync(kAllLanes, ties, lanes);
  }
  above += larger;
  // Of equal values any will do.
  if (has_one && above < bound && above + ties * weight >= bound) atomicMax(&memory->bin, mine);
  __syncthreads();
  const int32_t found = memory->bin;
  if (found >= 0) *value = source.values[found] + 0.0f;  // -0 as 0, as keys have it
  __syncthreads();
  return found >= 0;
}

template <typename Source>
__device__ __forceinline__ bool select_value(CutoffMemory* memory, const Source& source,
                                             uint64_t bound, uint64_t above, const Weigh& weigh,
                                             float* value) {
  if constexpr (std::is_same<Source, CandidateSource>::value) {
    if (source.count <= kThreads) {
      return select_among_few(memory, source, bound, above, weigh, value);
    }
  }
  return select_by_radix(memory, source, bound, above, weigh, value);
}

template <typename Source>
__device__ __forceinline__ uint64_t sum_of(const Source& source, const Mass& mass) {
  uint64_t sum = 0;
  source([&](float x) { sum += mass(x); });
  return block_sum(sum);
}

__device__ __forceinline__ void raise(float* cutoff, float value) {
  *cutoff = value > *cutoff ? value : *cutoff;
}

// ---- candidates ---

// Appends the entries of a vector that are wanted(x); their number may pass what fits.
template <typename Wanted>
__device__ __forceinline__ void append(CutoffMemory* memory, const float* x, int n,
                                       const Wanted& wanted) {
  int32_t found = 0;
#pragma unroll
  for (int j = 0; j < n; ++j) found += wanted(x[j]);
  if (found == 0) return;
  int32_t place = atomicAdd(&memory->count, found);
#pragma unroll
  for (int j = 0; j < n; ++j) {
    if (!wanted(x[j])) continue;
    if (place < kMaxCandidates) memory->candidates[place] = x[j];
    ++place;
  }
}

// The groups that reach the floor; false if they are too many.
__device__ __forceinline__ bool list_groups(CutoffMemory* memory, const float* group_max,
                                            int64_t groups, float floor, int32_t* count) {
  if (threadIdx.x == 0) memory->count = 0;
  __syncthreads();
  for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
    if (!(group_max[g] >= floor) || group_max[g] == -INFINITY) continue;
    const int32_t place = atomicAdd(&memory->count, 1);
    if (place < kMaxCandidates) memory->groups[place] = static_cast<int32_t>(g);
  }
  __syncthreads();
  *count = memory->count;
  __syncthreads();
  return *count <= kMaxCandidates;
}

// All finite entries >= floor of a row as candidates; false if they do not fit.
template <bool kMasked>
__device__ inline bool collect_above(CutoffMemory* memory, const Row& row, const float* group_max,
                                     float floor, CandidateSource* out) {
  constexpr int kInFlight = 4;
  constexpr int kVectors = kGroup / kVector;
  int32_t groups = 0;
  if (!list_groups(memory, group_max, num_tiles(row.vocab) * kTileGroups, floor, &groups)) {
    return false;
  }
  const auto first_of = [=](int32_t at) {
    return int64_t{memory->groups[at / kVectors]} * kGroup + at % kVectors * kVector;
  };
  if (threadIdx.x == 0) memory->count = 0;
  __syncthreads();
  for (int32_t base = threadIdx.x; base < groups * kVectors; base += kInFlight * kThreads) {
    RawVector raw[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t at = base + i * kThreads;
      if (at >= groups * kVectors) continue;
      load_vector_at(row, first_of(at), &raw[i]);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads >= groups * kVectors) continue;
      float x[kVector];
      widen_vector(row.element, raw[i], x);
      if (kMasked) hide_in_vector(row, first_of(base + i * kThreads), x);
      append(memory, x, kVector, [=](float v) { return v >= floor && v > -INFINITY; });
    }
  }
  __syncthreads();
  *out = {memory->candidates, memory->count};
  __syncthreads();
  return out->count <= kMaxCandidates;
}

// ---- floors: no kept entry lies below ---

// At least k groups, hence k entries, reach the k-th largest group maximum. Found among 2,048 bins
// between the extremes; any bins will do, as the lowest maximum in those that are kept is the
// floor.
__device__ inline float top_k_floor(CutoffMemory* memory, const float* group_max, int64_t groups,
                                    int64_t k, float max) {
  float low = INFINITY;
  for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
    if (group_max[g] > -INFINITY) low = fminf(low, group_max[g]);
  }
  low = block_min(low);
  const float slope = kLastBin / (max - low);
  const auto bin_of = [=](float value) {
    return kLastBin - static_cast<int>(fminf((max - value) * slope, kLastBin));
  };
  clear_histogram(memory);
  for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
    if (group_max[g] > -INFINITY) shared_add(&memory->histogram[bin_of(group_max[g])], 1);
  }
  uint64_t above = 0;
  int bin = 0;
  if (!find_bin(memory, static_cast<uint64_t>(k), &above, &bin)) return -INFINITY;
  float floor = INFINITY;
  for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
    if (group_max[g] > -INFINITY && bin_of(group_max[g]) >= bin) floor = fminf(floor, group_max[g]);
  }
  return block_min(floor);
}

// Entries below this logit have less than half of the mass that a top-p leaves out.
__device__ __forceinline__ float top_p_floor(const Row& row, const Filters& filters,
                                             const RowLaw& law) {
  const double weight = 0.5 * (1.0 - filters.top_p) * law.z / static_cast<double>(row.vocab);
  return static_cast<float>(law.max + filters.temperature * log(weight));
}

__device__ inline float kept_floor(CutoffMemory* memory, const Row& row, const Filters& filters,
                                   const float* group_max, const RowLaw& law) {
  float floor = -INFINITY;
  if (has_top_k(filters)) {
    floor =
        top_k_floor(memory, group_max, num_tiles(row.vocab) * kTileGroups, filters.top_k, law.max);
    if (has_top_p(filters)) return floor;  // its total is that of the whole top-k
  } else if (has_top_p(filters)) {
    floor = top_p_floor(row, filters, law);
  }
  if (has_min_p(filters)) {
    raise(&floor, min_p_cutoff(law.max, filters.temperature, filters.min_p));
  }
  return floor;
}

// ---- top-p over a row ---

// Bins of equal width in log-weight, 51 to the octave; weights below 2^-40 share the first bin.
struct LogWeightBin {
  ExpWeight weight;
  __device__ __forceinline__ explicit LogWeightBin(const RowLaw& law) : weight(law) {}
  __device__ __forceinline__ int operator()(float x) const {
    const float octaves = -weight.log2_weight(x);
    return kLastBin - static_cast<int>(fminf(octaves * 51.0f, static_cast<float>(kLastBin)));
  }
};

// The entries of one bin that a law keeps; false if they do not fit.
template <bool kMasked>
__device__ __forceinline__ bool collect_bin(CutoffMemory* memory, const Row& row, const RowLaw& law,
                                            int bin, CandidateSource* out) {
  const LogWeightBin bin_of(law);
  if (threadIdx.x == 0) memory->count = 0;
  __syncthreads();
  RowSource<kMasked>{row}([&](float x) {
    append(memory, &x, 1, [&](float v) { return v >= law.cutoff && bin_of(v) == bin; });
  });
  __syncthreads();
  *out = {memory->candidates, memory->count};
  __syncthreads();
  return out->count <= kMaxCandidates;
}

// The lowest logit for which the mass strictly above it is < top_p of the total: first its bin,
// then a selection among the logits of that bin.
template <bool kMasked>
__device__ __attribute__((noinline)) float top_p_in_row(CutoffMemory* memory, const Row& row,
                                                        const RowLaw& law, double top_p) {
  const Weigh weigh = by_mass(law);
  const LogWeightBin bin_of(law);
  clear_histogram(memory);
  uint64_t total = 0;
  RowSource<kMasked>{row}([&](float x) {
    const uint64_t weight = weigh.mass(x);
    total += weight;
    if (weight > 0) shared_add(&memory->histogram[bin_of(x)], weight);
  });
  total = block_sum(total);
  uint64_t bound = top_p_bound(top_p, total);
  bound = bound > 0 ? bound : 1;  // the top entry stays
  uint64_t above = 0;
  int bin = 0;
  float cutoff = law.cutoff;
  CandidateSource candidates{};
  if (find_bin(memory, bound, &above, &bin) &&
      collect_bin<kMasked>(memory, row, law, bin, &candidates)) {
    select_value(memory, candidates, bound, above, weigh, &cutoff);
  } else {
    select_value(memory, RowSource<kMasked>{row}, bound, 0, weigh, &cutoff);
  }
  return cutoff;
}

// ---- all filters ---

// z, and the entropy in nats where `entropy` is not null, of what a law keeps.
template <typename Source>
__device__ __forceinline__ void sum_kept(const Source& source, RowLaw* law, double* entropy) {
  const ExpWeight weight(*law);
  uint64_t mass = 0, share = 0;
  source([&](float x) {
    const float w = weight(x);
    mass += fixed_weight(w);
    if (entropy != nullptr && w > 0.0f) share += fixed_weight(w * -weight.log2_weight(x));
  });
  const double total = static_cast<double>(block_sum(mass));
  law->z = total / kLawUnit;
  if (entropy == nullptr) return;
  *entropy = log(law->z) + kLn2 * static_cast<double>(block_sum(share)) / total;
}

// Sets cutoff and z from candidates; false where they turn out not to hold all that is kept.
__device__ inline bool narrow_candidates(CutoffMemory* memory, const CandidateSource& candidates,
                                         float floor, const Filters& filters, RowLaw* law,
                                         double* entropy) {
  const float min_p =
      has_min_p(filters) ? min_p_cutoff(law->max, filters.temperature, filters.min_p) : -INFINITY;
  double total = law->z * kLawUnit;
  if (has_top_k(filters)) {
    // Less than k: there are no more finite entries, or min-p's floor is above the k-th.
    select_value(memory, candidates, static_cast<uint64_t>(filters.top_k), 0, by_number(*law),
                 &law->cutoff);
    total = static_cast<double>(sum_of(candidates, Mass(*law)));
  }
  if (has_top_p(filters)) {
    const uint64_t bound = top_p_bound(filters.top_p, static_cast<uint64_t>(total));
    const bool found =
        select_value(memory, candidates, bound > 0 ? bound : 1, 0, by_mass(*law), &law->cutoff);
    if (!found && min_p < floor) return false;  // it lies below the floor, and so does min-p's
  }
  raise(&law->cutoff, min_p);
  sum_kept(candidates, law, entropy);
  return true;
}

// Where candidates do not fit: rare, hence a call.
template <bool kMasked>
__device__ __attribute__((noinline)) void narrow_row(CutoffMemory* memory, const Row& row,
                                                     const Filters& filters, RowLaw* law,
                                                     double* entropy) {
  const RowSource<kMasked> source{row};
  if (has_top_k(filters)) {
    select_value(memory, source, static_cast<uint64_t>(filters.top_k), 0, by_number(*law),
                 &law->cutoff);
  }
  if (has_top_p(filters))
    raise(&law->cutoff, top_p_in_row<kMasked>(memory, row, *law, filters.top_p));
  if (has_min_p(filters)) {
    raise(&law->cutoff, min_p_cutoff(law->max, filters.temperature, filters.min_p));
  }
  sum_kept(source, law, entropy);
}

// The law of any row (kMasked: all have a mask, else none), from what scan.cuh left. Collective
// over the block, result in every thread. group_max: null where no row has a filter. `extra_value`:
// where the rank or entropy goes.
template <bool kMasked>
__device__ inline RowLaw finish_law(const Row& row, const Filters& filters, bool want_argmax,
                                    const ExtraTask& extra, const TileSummary* tiles,
                                    const float* group_max, double* extra_value) {
  __shared__ CutoffMemory memory;
  RowLaw law = combine_tiles(row, filters, want_argmax, extra, tiles, extra_value);
  if (!law.valid || !wants_group_max(row, filters)) return law;
  double* entropy = extra.kind == Extra::kEntropy ? extra_value : nullptr;
  const RowLaw unfiltered = law;
  const float floor = kept_floor(&memory, row, filters, group_max, law);
  CandidateSource candidates{};
  if (collect_above<kMasked>(&memory, row, group_max, floor, &candidates) &&
      narrow_candidates(&memory, candidates, floor, filters, &law, entropy)) {
    return law;
  }
  law = unfiltered;
  narrow_row<kMasked>(&memory, row, filters, &law, entropy);
  return law;
}

}  // namespace cuda
}  // namespace specdec
