// Shortlists: the few entries of a row among which are all that its filters keep. The block that
// finds a row's cutoff leaves them (cutoff.cuh), and whoever draws from the row reads nothing else
// of it.
//
// Reads 8 bytes an entry and, in a residual, those tokens' logits in the draft's row. Numerics: the
// integer weights of draw.cuh, whose sums are exact.
#pragma once

#include "draw_parts.cuh"

namespace specdec {
namespace cuda {

struct alignas(8) Candidate {
  int32_t entry;
  float value;
};

struct Shortlist {
  int32_t count;  // 0: there is none, as the law has no cutoff or keeps too many entries
  Candidate candidates[kThreads];  // in the order of their entries
};

// ---- draws ---

namespace {  // row_value is another one where there is code for lists of a draft's tokens

using namespace SPECDEC_CPU_ISA;

// Whether a residual leaves nothing of a token.
__device__ __forceinline__ bool is_excluded(const DrawTask& task, int64_t token) {
  return token == task.excluded || is_in(task.tried, token);
}

// An entry's weight under a law of logits. (ExpWeight makes 0 of weights below some 2^-125 besides,
// which come to nothing in integers and in sums.)
__device__ __forceinline__ float listed_weight(const RowLaw& law, float value) {
  const ExpWeight weight(law.max, law.scale);
  return value < law.cutoff ? 0.0f : exp2_weight(weight.log2_weight(value));
}

// What the residual of a task leaves of a token that its target gives this weight, in units of its
// outer scale.
__device__ __forceinline__ float weight_in_residual(const DrawTask& task, int64_t token,
                                                    float weight) {
  const Row& draft = task.draft;
  if (draft.data == nullptr || is_in(task.no_draft, token)) return weight;
  const int64_t entry = entry_of_token(draft, token);
  const float value = entry >= 0 ? row_value(draft, entry) : nothing(draft);
  const float q =
      draft.linear ? value * draft_lift(task.draft_law) : listed_weight(task.draft_law, value);
  return what_is_left(weight, draft_ratio(task), q);
}

// The mass of a residual whose target has a shortlist, in an order that depends on the list alone.
// By a full warp; in every lane. A call, so that its registers do not count where there is no list.
inline __device__ __attribute__((noinline)) double residual_mass(const Shortlist& shortlist,
                                                                 const DrawTask& task) {
  double sum = 0.0;
#pragma unroll 2
  for (int32_t i = threadIdx.x % kWarp; i < shortlist.count; i += kWarp) {
    const auto [token, value] = shortlist.candidates[i];
    if (is_excluded(task, token)) continue;
    sum += weight_in_residual(task, token, listed_weight(task.target_law, value));
  }
  return outer_scale(task) * warp_sum(sum);
}

// The integer weight of a candidate under what a task draws from or, if that is not `residual`,
// under its target's law.
__device__ __forceinline__ uint64_t weight_of(const Candidate& candidate, const DrawTask& task,
                                              bool residual) {
  const float weight = listed_weight(task.target_law, candidate.value);
  if (residual && is_excluded(task, candidate.entry)) return 0;
  if (!residual || task.draft.data == nullptr) return fixed_weight(weight);
  return fixed_weight(weight_in_residual(task, candidate.entry, weight), residual_unit(task));
}

// A draw by a shortlist, if there is one.
struct ListedDraw {
  bool listed = false;
  bool is_mine = false;  // in the one thread that has what is drawn
  Drawn drawn{-1, 0.0f};
  double log_z = 0.0;  // log(z) of the target's law
};

// Draws from a task whose target has a shortlist of `count` candidates, of which each thread brings
// its own. Collective over the block; all threads see the task. kResidual: it may be a residual.
template <bool kResidual>
__device__ __forceinline__ ListedDraw draw_candidate(const Candidate& mine, int32_t count,
                                                     const DrawTask& task) {
  const bool is_there = static_cast<int32_t>(threadIdx.x) < count;
  const double log_z = log(task.target_law.z);
#pragma unroll 1
  for (bool residual = kResidual && task.residual;; residual = false) {
    const uint64_t weight = is_there ? weight_of(mine, task, residual) : 0;
    uint64_t total = 0;
    const uint64_t before = block_exclusive_sum(weight, &total);
    if (total > 0 || !residual) {
      const uint64_t threshold = draw_threshold(task.u, total);
      const bool is_mine = before <= threshold && threshold - before < weight;
      return {true, is_mine, {mine.entry, mine.value}, log_z};
    }
    // Nothing is left, by rounding or because p = q: the target's own law.
  }
}

// Draws from a task by its target's shortlist, null where there is none. Collective likewise.
template <bool kResidual = true>
__device__ __forceinline__ ListedDraw draw_if_listed(const Shortlist* shortlist,
                                                     const DrawTask& task) {
  if (shortlist == nullptr) return {};
  const Candidate mine = shortlist->candidates[threadIdx.x];  // while its number is on its way
  const int32_t count = shortlist->count;
  return count > 0 ? draw_candidate<kResidual>(mine, count, task) : ListedDraw{};
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
