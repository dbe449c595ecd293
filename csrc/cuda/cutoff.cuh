// Cutoffs without sorting: which logits top-k, top-p and min-p keep, and the sums of what is kept.
//
// Grid: a block a row. The maxima of groups of 128 entries, left by the law pass, say where kept
// entries can be: a filter's kept set lies above a floor that is found from them and from z, and
// only groups that reach the floor are read again (4 bytes a group and, as a rule, one group for
// each of k entries). As a rule no more entries reach it than the block has threads; then all of
// them are compared with each other, once for all filters, and listed (shortlist.cuh) if anybody
// draws from the row. Where more than 4,096 do (a large top-k, a top-p of a nearly flat law), the
// row is read again instead, three times or more, from L2.
//
// Numerics: counts, and masses in 2^-40 fixed point, are exact; so neither the order in which
// threads find candidates nor the number of threads changes a cutoff or a sum. A top-p alone that
// is found among candidates is a share of the law pass's z, which is the same mass within its
// rounding.
#pragma once

#include "selection.cuh"
#include "shortlist.cuh"

namespace specdec {
namespace cuda {

// ---- candidates ---

// The groups that reach the floor; false if they are too many.
__device__ __forceinline__ bool list_groups(CutoffMemory* memory, const float* group_max,
                                            int64_t groups, float floor, int32_t* count) {
  if (threadIdx.x == 0) memory->count = 0;
  __syncthreads();
#pragma unroll 1
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

// All finite entries >= floor of a row as candidates; false if they do not fit. Few entries are:
// the loop over groups notes their places only, and they are read once more.
template <bool kMasked>
__device__ inline bool collect_above(CutoffMemory* memory, const Row& row, const float* group_max,
                                     float floor, CandidateSource* out) {
  constexpr int kInFlight = 4;
  constexpr int kVectors = kGroup / kVector;
  static_assert(kInFlight * kVector <= 32, "an entry in flight has a bit");
  int32_t groups = 0;
  if (!list_groups(memory, group_max, num_tiles(row.vocab) * kTileGroups, floor, &groups)) {
    return false;
  }
  const float least = fmaxf(floor, -FLT_MAX);
  const auto first_of = [=](int32_t at) {
    return memory->groups[at / kVectors] * kGroup + at % kVectors * kVector;
  };
  if (threadIdx.x == 0) memory->count = 0;
  __syncthreads();
#pragma unroll 1
  for (int32_t base = threadIdx.x; base < groups * kVectors; base += kInFlight * kThreads) {
    RawVector raw[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t at = base + i * kThreads;
      if (at < groups * kVectors) load_vector_at(row, first_of(at), &raw[i]);
    }
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads >= groups * kVectors) continue;
      float x[kVector];
      widen_vector(row.element, raw[i], x);
      if (kMasked) hide_in_vector(row, first_of(base + i * kThreads), x);
#pragma unroll
      for (int j = 0; j < kVector; ++j) wanted |= (x[j] >= least ? 1u : 0u) << (i * kVector + j);
    }
    if (wanted == 0) continue;
    int32_t place = atomicAdd(&memory->count, __popc(wanted));
#pragma unroll 1
    for (; wanted != 0; wanted &= wanted - 1, ++place) {
      const int32_t bit = __ffs(static_cast<int>(wanted)) - 1;
      if (place >= kMaxCandidates) break;
      memory->places[place] = first_of(base + bit / kVector * kThreads) + bit % kVector;
    }
  }
  __syncthreads();
  *out = {memory->candidates, memory->count};
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < out->count && i < kMaxCandidates; i += kThreads) {
    const int32_t entry = memory->places[i];
    if (i < kThreads) memory->entries[i] = entry;
    memory->candidates[i] = stored_value(row, entry);
  }
  __syncthreads();
  return out->count <= kMaxCandidates;
}

// ---- floors: no kept entry lies below ---

// The k-th largest group maximum, or -inf. Found among 2,048 bins between the extremes; any bins
// will do, as the lowest maximum in those that are kept is the floor. A call: where k is small, as
// a rule, floor_of_pairs takes its place.
inline __device__ __attribute__((noinline)) float floor_by_bins(CutoffMemory* memory,
                                                                const float* group_max,
                                                                int64_t groups, int64_t k,
                                                                float max) {
  float low = INFINITY;
#pragma unroll 1
  for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
    if (group_max[g] > -INFINITY) low = fminf(low, group_max[g]);
  }
  low = block_min(low);
  const float slope = kLastBin / (max - low);
  const auto bin_of = [=](float value) {
    return kLastBin - static_cast<int>(fminf((max - value) * slope, kLastBin));
  };
  clear_histogram(memory);
#pragma unroll 1
  for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
    if (group_max[g] > -INFINITY) shared_add(&memory->histogram[bin_of(group_max[g])], 1);
  }
  uint64_t above = 0;
  int bin = 0;
  if (!find_bin(memory, static_cast<uint64_t>(k), &above, &bin)) return -INFINITY;
  float floor = INFINITY;
#pragma unroll 1
  for (int64_t g = threadIdx.x; g < groups; g += kThreads) {
    if (group_max[g] > -INFINITY && bin_of(group_max[g]) >= bin) floor = fminf(floor, group_max[g]);
  }
  return block_min(floor);
}

// The largest maximum of this thread's groups.
__device__ __forceinline__ float max_of_groups(const float* group_max, int64_t groups) {
  constexpr int kInFlight = 8;
  float max = -INFINITY;
#pragma unroll 1
  for (int64_t base = threadIdx.x; base < groups; base += kInFlight * kThreads) {
    float found[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t g = base + i * kThreads;
      found[i] = g < groups ? group_max[g] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) max = fmaxf(max, found[i]);
  }
  return max;
}

// The k-th largest of what pairs of threads find: each the largest maximum of its groups, which is
// compared with all others'. -inf where less than k pairs find anything.
__device__ __forceinline__ float floor_of_pairs(CutoffMemory* memory, const float* group_max,
                                                int64_t groups, int32_t k) {
  constexpr int kOfThread = kThreads / 4;  // pairs whose maxima a thread looks at
  constexpr int kVectors = 2, kWords = 4;
  static_assert(kOfThread % (kVectors * kWords) == 0, "no vector is left over");
  __shared__ float of_warp[kWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const auto larger_one = [](float a, float b) { return fmaxf(a, b); };
  const float mine = reduce_neighbours<2>(max_of_groups(group_max, groups), larger_one);
  if (thread % 2 == 0) memory->candidates[thread / 2] = mine;
  __syncthreads();
  const auto* others = reinterpret_cast<const float4*>(memory->candidates + thread % 2 * kOfThread);
  int32_t larger[kWords] = {0, 0, 0, 0};  // several, because each addition waits for the one before
#pragma unroll 2
  for (int i = 0; i < kOfThread / kWords; i += kVectors) {
    float4 found[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) found[v] = others[i + v];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      larger[0] += found[v].x > mine;
      larger[1] += found[v].y > mine;
      larger[2] += found[v].z > mine;
      larger[3] += found[v].w > mine;
    }
  }
  const int32_t above = reduce_neighbours<2>((larger[0] + larger[1]) + (larger[2] + larger[3]),
                                             [](int32_t a, int32_t b) { return a + b; });
  const float lowest = -warp_max_by_key(above < k ? -mine : -INFINITY);
  if (thread % kWarp == 0) of_warp[thread / kWarp] = lowest;
  __syncthreads();  // the next call comes by a barrier before it writes to of_warp
  float floor = of_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) floor = fminf(floor, of_warp[w]);
  return floor;
}

// At least k groups, hence k entries, reach the floor: the k-th largest group maximum or, where k
// is at most a quarter of the threads, somewhat less, so that a fifth of k more do.
__device__ __forceinline__ float top_k_floor(CutoffMemory* memory, const float* group_max,
                                             int64_t groups, int64_t k, float max) {
  if (4 * k <= kThreads) {
    const float floor = floor_of_pairs(memory, group_max, groups, static_cast<int32_t>(k));
    if (floor > -INFINITY) return floor;
  }
  return floor_by_bins(memory, group_max, groups, k, max);
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
    if (!(x >= law.cutoff) || bin_of(x) != bin) return;
    const int32_t place = atomicAdd(&memory->count, 1);
    if (place < kMaxCandidates) memory->candidates[place] = x;
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

// What is compared: a candidate and its mass.
struct alignas(16) Compared {
  Candidate candidate;
  uint64_t mass;
};

// What a thread finds out about a candidate by a look at all of them.
struct Standing {
  uint64_t mass = 0;   // of larger ones
  int32_t larger = 0;  // their number
  int32_t equal = 0;   // itself among them; equal values have equal masses
  int32_t before = 0;  // candidates of lower entries
};

// Threads that share the look of one of `count` candidates at all others: neighbours.
__device__ __forceinline__ int32_t comparing_threads(int32_t count) {
  return 4 * count <= kThreads ? 4 : 2 * count <= kThreads ? 2 : 1;
}

constexpr int kComparedAtOnce = 4;  // by a thread: loads that are not waited for one by one

// Behind the candidates lie as many that count for nothing as make up the last round.
constexpr int kBehindCandidates = 4 * kComparedAtOnce;

// Of one candidate among `count`, by `parts` neighbours.
__device__ __forceinline__ Standing standing_of(const Compared* candidates, int32_t count,
                                                const Candidate& mine, int32_t part,
                                                int32_t parts) {
  Standing found;
#pragma unroll 1
  for (int32_t base = part; base < count; base += kComparedAtOnce * parts) {
    Compared others[kComparedAtOnce];
#pragma unroll
    for (int k = 0; k < kComparedAtOnce; ++k) {
      // In one piece.
      const float4 words = *reinterpret_cast<const float4*>(&candidates[base + k * parts]);
      memcpy(&others[k], &words, sizeof words);
    }
#pragma unroll
    for (int k = 0; k < kComparedAtOnce; ++k) {
      const auto& [candidate, mass] = others[k];
      found.mass += candidate.value > mine.value ? mass : 0;
      found.larger += candidate.value > mine.value ? 1 : 0;
      found.equal += candidate.value == mine.value ? 1 : 0;
      found.before += candidate.entry < mine.entry ? 1 : 0;
    }
  }
#pragma unroll 1
  for (int32_t lanes = 1; lanes < parts; lanes *= 2) {
    found.mass += __shfl_xor_sync(kAllLanes, found.mass, lanes);
    found.larger += __shfl_xor_sync(kAllLanes, found.larger, lanes);
    found.equal += __shfl_xor_sync(kAllLanes, found.equal, lanes);
    found.before += __shfl_xor_sync(kAllLanes, found.before, lanes);
  }
  return found;
}

// Sets cutoff and z from at most kThreads candidates, a thread or some for each of them, between a
// few barriers; false where they turn out not to hold all that is kept. Lists them, all but their
// number.
__device__ __forceinline__ bool narrow_few(CutoffMemory* memory, const CandidateSource& candidates,
                                           float floor, const Filters& filters, RowLaw* law,
                                           double* entropy, Shortlist* shortlist) {
  static_assert(sizeof(Compared) * (kThreads + kBehindCandidates) + sizeof(uint64_t) * kThreads <=
                    sizeof memory->histogram,
                "sums and what is compared lie in the histogram");
  uint64_t* sums = memory->histogram;  // from the largest candidate down to each
  auto* compared = reinterpret_cast<Compared*>(memory->histogram + kThreads);
  const int32_t thread = static_cast<int32_t>(threadIdx.x), count = candidates.count;
  const int32_t parts = comparing_threads(count), part = thread % parts, mine = thread / parts;
  const bool has_one = mine < count, writes = has_one && part == 0;
  const Candidate candidate =
      has_one ? Candidate{memory->entries[mine], candidates.values[mine]} : Candidate{0, INFINITY};
  const uint64_t mass = has_one ? Mass(*law)(candidate.value) : 0;
  if (writes) compared[mine] = {candidate, mass};
  if (thread < kBehindCandidates) compared[count + thread] = {{INT32_MAX, -INFINITY}, 0};
  if (thread == 0) memory->bin = memory->other = -1;
  __syncthreads();
  const Standing place = standing_of(compared, count, candidate, part, parts);
  const uint64_t sum = place.mass + static_cast<uint64_t>(place.equal) * mass;
  if (writes) sums[mine] = sum;
  if (writes && shortlist != nullptr) shortlist->candidates[place.before] = candidate;
  // Less than k: there are no more finite entries, or min-p's floor is above the k-th.
  const bool cuts = has_top_k(filters) && filters.top_k <= count;
  const int32_t k = cuts ? static_cast<int32_t>(filters.top_k) : count;
  const bool is_kept = has_one && place.larger < k;
  // Of equal values any will do.
  if (is_kept && place.larger + place.equal >= k) atomicMax(&memory->bin, mine);
  __syncthreads();
  int32_t lowest = memory->bin;  // of those that are kept
  if (lowest < 0) return false;
  if (cuts) law->cutoff = candidates.values[lowest] + 0.0f;  // -0 as 0, as keys have it
  const float min_p =
      has_min_p(filters) ? min_p_cutoff(law->max, filters.temperature, filters.min_p) : -INFINITY;
  if (has_top_p(filters)) {
    const uint64_t total =
        has_top_k(filters) ? sums[lowest] : static_cast<uint64_t>(law->z * kLawUnit);
    uint64_t bound = top_p_bound(filters.top_p, total);
    bound = bound > 0 ? bound : 1;  // the top entry stays
    if (is_kept && place.mass < bound && sum >= bound) atomicMax(&memory->other, mine);
    __syncthreads();
    const int32_t found = memory->other;
    if (found >= 0) {
      lowest = found;
      law->cutoff = candidates.values[found] + 0.0f;
    } else if (min_p < floor) {
      return false;  // it lies below the floor, and so does min-p's
    }
  }
  if (entropy == nullptr && !(min_p > law->cutoff)) {
    law->z = static_cast<double>(sums[lowest]) / kLawUnit;
    return true;
  }
  raise(&law->cutoff, min_p);
  sum_kept(candidates, law, entropy);
  return true;
}

// The same of more candidates. A call: it is rare.
inline __device__ __attribute__((noinline)) bool narrow_many(CutoffMemory* memory,
                                                             const CandidateSource& candidates,
                                                             float floor, const Filters& filters,
                                                             RowLaw* law, double* entropy) {
  const float min_p =
      has_min_p(filters) ? min_p_cutoff(law->max, filters.temperature, filters.min_p) : -INFINITY;
  double total = law->z * kLawUnit;
  if (has_top_k(filters)) {
    select_value(memory, candidates, static_cast<uint64_t>(filters.top_k), 0, by_number(*law),
                 &law->cutoff);
    total = static_cast<double>(sum_of(candidates, Mass(*law)));
  }
  if (has_top_p(filters)) {
    const uint64_t bound = top_p_bound(filters.top_p, static_cast<uint64_t>(total));
    const bool found =
        select_value(memory, candidates, bound > 0 ? bound : 1, 0, by_mass(*law), &law->cutoff);
    if (!found && min_p < floor) return false;
  }
  raise(&law->cutoff, min_p);
  sum_kept(candidates, law, entropy);
  return true;
}

__device__ __forceinline__ bool narrow_candidates(CutoffMemory* memory,
                                                  const CandidateSource& candidates, float floor,
                                                  const Filters& filters, RowLaw* law,
                                                  double* entropy, Shortlist* shortlist) {
  if (candidates.count <= kThreads) {
    return narrow_few(memory, candidates, floor, filters, law, entropy, shortlist);
  }
  return narrow_many(memory, candidates, floor, filters, law, entropy);
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
// where the rank or entropy goes. `shortlist`: likewise, if anybody draws from the row.
template <bool kMasked>
__device__ inline RowLaw finish_law(const Row& row, const Filters& filters, bool want_argmax,
                                    const ExtraTask& extra, const TileSummary* tiles,
                                    const float* group_max, double* extra_value,
                                    Shortlist* shortlist = nullptr) {
  __shared__ CutoffMemory memory;
  if (shortlist != nullptr && threadIdx.x == 0) shortlist->count = 0;
  RowLaw law = combine_tiles(row, filters, want_argmax, extra, tiles, extra_value);
  if (!law.valid || !wants_group_max(row, filters)) return law;
  double* entropy = extra.kind == Extra::kEntropy ? extra_value : nullptr;
  const RowLaw unfiltered = law;
  const float floor = kept_floor(&memory, row, filters, group_max, law);
  CandidateSource candidates{};
  if (collect_above<kMasked>(&memory, row, group_max, floor, &candidates) &&
      narrow_candidates(&memory, candidates, floor, filters, &law, entropy, shortlist)) {
    const bool few = candidates.count <= kThreads;
    if (shortlist != nullptr && few && threadIdx.x == 0) shortlist->count = candidates.count;
    return law;
  }
  law = unfiltered;
  __syncthreads();  // the memory has been read
  narrow_row<kMasked>(&memory, row, filters, &law, entropy);
  return law;
}

}  // namespace cuda
}  // namespace specdec
