// What the kernels of verify share: scratch memory, a request seen by a block, its rows and laws.
// Included by verify.cu alone.
#pragma once

#include "../core/chain.h"
#include "block.cuh"
#include "draw_parts.cuh"
#include "law_pass.cuh"
#include "race.cuh"
#include "shared.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Nodes whose facts a block looks at side by side.
constexpr int kNodesAtOnce = 32;

// Rows of a request: target rows 0 .. gamma, then draft rows 0 .. gamma - 1 if there is a draft
// law.
struct Scratch {
  int64_t rows = 0;       // of a request
  int64_t tiles = 0;      // of the wider vocabulary: the stride of a row's tiles
  int64_t groups = 0;     // likewise
  bool finished = false;  // finish_laws has found the laws, else they are in the summaries
  bool races = false;
  bool draws = false;                // a launch of its own draws the last tokens
  TileSummary* summaries = nullptr;  // [B, rows, tiles]
  float* group_max = nullptr;        // [B, rows, groups], with filters
  RowLaw* laws = nullptr;            // [B, rows], with filters
  double* extras = nullptr;          // [B, rows], with filters; with races: their winners
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

// As much of a request as says which of its rows are asked for, and their filters; for the whole
// block.
__device__ void open_for_rows(const VerifyParams& p, int64_t b, Request* shared) {
  if (threadIdx.x < kWarp) {
    const Request r = count_columns(p, b);
    if (threadIdx.x == 0) *shared = r;
  }
  __syncthreads();
}

// open_request, for the whole block. Needs no earlier launch, unless there is a map or lists: one
// of those checks or sorts them, and is waited for here.
__device__ void open_in_block(const VerifyParams& p, int64_t b, Request* shared) {
  if (kLists || p.map.ids.data != nullptr) wait_for_launch_before();
  if (threadIdx.x < kWarp) {
    Request r = count_columns(p, b);
    if (!r.greedy) {
      bool in_range = is_uniform_in_range(p.randomness, b, p.gamma);
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

struct RowTask {
  Row row;  // data == nullptr: nobody asks for this row
  Filters filters;
  ExtraTask extra;
};

// The node whose target or draft row a slot is.
__device__ int64_t node_of_slot(const VerifyParams& p, int64_t slot) {
  return slot <= p.gamma ? slot : slot - p.gamma - 1;
}

// A slot's row, whether anybody asks for it or not.
__device__ Row row_of_slot(const VerifyParams& p, int64_t b, int64_t slot) {
  const int64_t i = node_of_slot(p, slot);
  return slot <= p.gamma ? target_row(p, b, i) : draft_row(p, b, i);
}

__device__ RowTask row_task(const VerifyParams& p, const Request& r, int64_t slot) {
  RowTask task;
  const int64_t i = node_of_slot(p, slot);
  if (slot > p.gamma) {
    if (wants_draft_row(p, r, i)) task.row = row_of_slot(p, r.b, slot);
    task.filters = r.draft_filters;
    return task;
  }
  if (i <= r.drafted) task.row = row_of_slot(p, r.b, slot);
  task.filters = r.target_filters;
  if (task.row.data != nullptr) task.extra = extra_task(p, r, i, task.row);
  return task;
}

// Scans this block's share of a row, unless nobody asks for it.
template <bool kMasked, Elements kElements = Elements::kAny>
__device__ void scan_share(const RowTask& task, const Scratch& s, int64_t row, int64_t split,
                           int64_t splits) {
  if (task.row.data == nullptr) return;
  const Share share = share_of(num_tiles(task.row.vocab), split, splits);
  float* group_max = s.group_max != nullptr
                         ? s.group_max + row * s.groups + share.first * num_groups(kTile)
                         : nullptr;
  scan_tiles<kMasked, kElements>(task.row, task.filters, false, task.extra, share.first, share.last,
                                 s.summaries + row * s.tiles + share.first, group_max);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
