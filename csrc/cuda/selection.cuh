// Selection without sorting: the largest value for which all entries from it on, or their masses,
// reach a bound. A block, by histograms of the keys' digits (core/row_law.h has the serial form).
//
// Reads its source three times, a row or what it has of it in shared memory. Numerics: counts, and
// masses in 2^-40 fixed point, are exact: whatever the order and the number of threads.
#pragma once

#include "law_pass.cuh"

namespace specdec {
namespace cuda {

constexpr int kMaxCandidates = 4096;
constexpr int kLastBin = kRadixBins - 1;
constexpr int kBinsPerThread = kRadixBins / kThreads;
static_assert(kRadixBins % kThreads == 0, "threads share the bins evenly");

// What a block shares while it looks for the cutoffs of a row: 34 KB.
struct CutoffMemory {
  union {
    alignas(16) float candidates[kMaxCandidates];
    int32_t places[kMaxCandidates];  // in the row, before candidates are read from there
  };
  int32_t entries[kThreads];  // of the row, that the first candidates are
  union {
    alignas(16) uint64_t histogram[kRadixBins];
    int32_t groups[kMaxCandidates];
  };
  int32_t count;
  int32_t bin;
  int32_t other;
  uint64_t above;
};

__device__ __forceinline__ void clear_histogram(CutoffMemory* memory) {
#pragma unroll 1
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
#pragma unroll 1
  for (int i = 0; i < kBinsPerThread; ++i) {
    sum += memory->histogram[last - static_cast<int>(i + threadIdx.x) % kBinsPerThread];
  }
  uint64_t total = 0;
  uint64_t so_far = *above + block_exclusive_sum(sum, &total);
  if (*above + total < bound) return false;
  if (so_far < bound && so_far + sum >= bound) {
    int at = last;
#pragma unroll 1
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
#pragma unroll 1
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
// false if there is none. A call: where entries are few, as a rule, narrow_few takes its place.
template <typename Source>
__device__ __attribute__((noinline)) bool select_value(CutoffMemory* memory, const Source& source,
                                                       uint64_t bound, uint64_t above,
                                                       const Weigh& weigh, float* value) {
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

template <typename Source>
__device__ __forceinline__ uint64_t sum_of(const Source& source, const Mass& mass) {
  uint64_t sum = 0;
  source([&](float x) { sum += mass(x); });
  return block_sum(sum);
}

__device__ __forceinline__ void raise(float* cutoff, float value) {
  *cutoff = value > *cutoff ? value : *cutoff;
}

}  // namespace cuda
}  // namespace specdec
