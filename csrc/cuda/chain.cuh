// What the kernels of verify share: scratch memory, a request seen by a block, its rows and laws.
// Included by verify.cu alone.
#pragma once

#include "../core/chain.h"
#include "block.cuh"
#include "draw_parts.cuh"
#include "race.cuh"
#include "scan.cuh"
#include "shortlist.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Nodes whose facts a block looks at side by side.
constexpr int kNodesAtOnce = 32;

// Rows of a request: target rows 0 .. gamma, then draft rows 0 .. gamma - 1 if there is a draft
// law.
struct Scratch {
  Divisor rows;           // of a request
  Divisor tiles;          // of the wider vocabulary: the stride of a row's tiles
  Divisor gamma;          // draft tokens of a request
  int64_t groups = 0;     // likewise
  bool finished = false;  // finish_laws has found the laws, else they are in the summaries
  bool races = false;
  bool draws = false;                // a launch of its own draws the last tokens
  TileSummary* summaries = nullptr;  // [B, rows, tiles]
  int64_t whole = 0;                 // how many there are; behind them are those of rests
  int64_t all = 0;                   // how many there are together
  TileSummary* rests = nullptr;      // [B, gamma], or none: ChainRests
  float* group_max = nullptr;        // [B, rows, groups], with filters
  RowLaw* laws = nullptr;            // [B, rows], with filters
  double* extras = nullptr;          // [B, rows], with filters; with races: their winners
  Shortlist* shortlists = nullptr;   // [B, rows], with filters
  RowTask* tasks = nullptr;          // [B, rows], likewise
  Runner* runners = nullptr;         // [B, rows, tiles], with races
  Request* requests = nullptr;       // [B], decided, for the launch that draws
  uint64_t* part_sums = nullptr;     // [B, tiles, kWarps], likewise
  int64_t sums = 0;                  // masses that a request may ask for
  double* masses = nullptr;          // [B, sums, tiles], block rule
  uint32_t* counters = nullptr;      // [B, rows], all 0 after scan_laws
};

// ---- requests and rows ---

// begin_request, and the columns counted side by side, by one full warp.
__device__ Request count_columns(const VerifyParams& p, int64_t b) {
  const int64_t lane = threadIdx.x % kWarp;
  Request r = begin_request(p, b);
  const int64_t length = draft_length(p, b, &r.status);
  r.drafted = length;
#pragma unroll 1
  for (int64_t base = 0; base < length && r.drafted == length; base += kWarp) {
    const int64_t i = base + lane;
    const bool usable = i >= length || column_state(p, b, i) == ColumnState::kUsable;
    r.drafted = warp_min(usable ? length : i);
  }
  if (r.drafted < length && column_state(p, b, r.drafted) == ColumnState::kInvalid) {
    r.status |= kInvalidDraftToken;
  }
  return r;
}

// What a call was given is there before any launch, but for maps and lists, which launches of its
// own check or sort.
__device__ __forceinline__ void wait_for_inputs(const VerifyParams& p) {
  if (kLists || p.map.ids.data != nullptr) wait_for_launch_before();
}

// open_request, for the whole block; waits for nothing but the inputs.
__device__ void open_in_block(const VerifyParams& p, int64_t b, Request* shared) {
  wait_for_inputs(p);
  if (threadIdx.x < kWarp) {
    Request r = count_columns(p, b);
    if (!r.greedy) {
      bool in_range = is_uniform_in_range(p.randomness, b, p.gamma);
#pragma unroll 1
      for (int64_t slot = threadIdx.x; slot < r.drafted; slot += kWarp) {
        in_range &= is_uniform_in_range(p.randomness, b, slot);
      }
      if (!__all_sync(kAllLanes, in_range)) r.status |= kParameterOutOfRange;
    }
    take_final_uniform(p, &r);
    if (threadIdx.x == 0) *shared = r;
  }
  __syncthreads();
}

// The node whose target or draft row a slot is.
__device__ int64_t node_of_slot(const VerifyParams& p, int64_t slot) {
  return slot <= p.gamma ? slot : slot - p.gamma - 1;
}

// A slot's row, whether anybody asks for it or not.
__device__ Row row_of_slot(const VerifyParams& p, int64_t b, int64_t slot) {
  const int64_t i = node_of_slot(p, slot);
  return slot <= p.gamma ? target_row(p, b, i) : draft_row(p, b, i);
}

__device__ RowTask target_task(const VerifyParams& p, const Request& r, int64_t i) {
  RowTask task;
  task.filters = r.target_filters;
  if (i > r.drafted) return task;
  task.row = target_row(p, r.b, i);
  task.extra = extra_task(p, r, i, task.row);
  return task;
}

// As much of a request as says whether a row of node i is asked for. By one thread: columns are
// looked at side by side, and none after the node's.
__device__ __forceinline__ Request request_up_to(const VerifyParams& p, int64_t b, int64_t i) {
  Request r;
  r.b = b;
  r.drafted = draft_length(p, b, &r.status);
  const int64_t last = i < r.drafted ? i : r.drafted - 1;
#pragma unroll 2
  for (int64_t k = last; k >= 0; --k) {
    if (column_state(p, b, k) != ColumnState::kUsable) r.drafted = k;
  }
  r.target_filters = target_filters_of(p, b);
  r.greedy = is_greedy(r.target_filters);
  return r;
}

// All rows of a call, as scan.cuh wants them.
struct ChainRows {
  const VerifyParams& p;
  const Divisor& rows;  // of a request

  __device__ __forceinline__ RowTask operator()(int64_t k) const {
    const auto [b, slot] = place_in(k, rows);
    const int64_t i = node_of_slot(p, slot);
    const Request r = request_up_to(p, b, i);
    if (slot <= p.gamma) return target_task(p, r, i);
    if (!wants_draft_row(p, r, i)) return RowTask{};
    return {draft_row(p, b, i), draft_filters_of(p, b), {}};
  }
};

// The tiles of draft tokens without these, if what replaces a rejected one is drawn by tiles
// (draw_at_once.cuh).
struct ChainRests {
  static constexpr bool kAny = true;
  const VerifyParams& p;
  const Divisor& rows;   // of a request
  const Divisor& gamma;  // draft tokens of a request
  int64_t end;

  __device__ __forceinline__ int64_t row(int64_t k) const {
    const auto [b, i] = place_in(k, gamma);
    return b * rows + i;
  }
  __device__ __forceinline__ int64_t entry(int64_t k) const {
    const auto [b, i] = place_in(k, gamma);
    const int64_t token = column_at(p, b, i).token;
    return token < p.target.vocab ? token : -1;
  }
};

}  // namespace
}  // namespace cuda
}  // namespace specdec
