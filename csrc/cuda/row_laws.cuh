// The laws of all rows of an operator: what row_law, sample, acceptance and verify_tree share.
//
// Rows is a functor that travels to the device: RowTask rows(r) is row r of `count`, and
// rows.p.mask the mask that all of them have or lack. Kernels begin in turn: in a tree's call a
// later one reads early what was there before them.
#pragma once

#include "cutoff.cuh"
#include "draw.cuh"
#include "scan.cuh"

namespace specdec {
namespace cuda {
namespace {

// Scratch memory for `count` rows of up to `tiles` tiles.
struct LawScratch {
  int64_t count = 0;
  Divisor tiles;
  TileSummary* summaries = nullptr;  // [count, tiles]
  float* group_max = nullptr;        // [count, tiles, kTileGroups], with filters
  Shortlist* shortlists = nullptr;   // [count], with filters, if anybody draws from the rows
  RowTask* tasks = nullptr;          // [count], with filters
  RowLaw* laws = nullptr;            // [count], if finished
  uint32_t* counters = nullptr;  // [count], all 0 after scan_rows; before it, too, if it combines

  // Whether scan_rows finds the laws: filters take a launch of their own.
  __host__ __device__ bool combines() const { return laws != nullptr && group_max == nullptr; }

  // Of row r; null: there are none.
  __device__ __forceinline__ Shortlist* shortlist(int64_t r) const {
    return shortlists != nullptr ? shortlists + r : nullptr;
  }
  __device__ __forceinline__ bool is_listed(int64_t r) const {
    return shortlists != nullptr && shortlists[r].count > 0;
  }
};

// What an operator asks for.
struct LawsAsked {
  bool filters;           // some row may have one
  bool finished = false;  // the laws, even without filters
  bool listed = false;    // shortlists, with filters
};

struct LawReservation {
  Reserved<TileSummary> summaries;
  Reserved<float> group_max;
  Reserved<Shortlist> shortlists;
  Reserved<RowTask> tasks;
  Reserved<RowLaw> laws;
  Reserved<uint32_t> counters;
};

LawReservation reserve_laws(Workspace* workspace, int64_t count, int64_t tiles,
                            const LawsAsked& asked) {
  return {workspace->reserve<TileSummary>(count * tiles),
          workspace->reserve<float>(asked.filters ? count * tiles * kTileGroups : 0),
          workspace->reserve<Shortlist>(asked.filters && asked.listed ? count : 0),
          workspace->reserve<RowTask>(asked.filters ? count : 0),
          workspace->reserve<RowLaw>(asked.filters || asked.finished ? count : 0),
          workspace->reserve<uint32_t>(count)};
}

LawScratch laws_at(const Workspace& workspace, const LawReservation& reserved, int64_t count,
                   int64_t tiles, const LawsAsked& asked) {
  LawScratch s;
  s.count = count;
  s.tiles = tiles;
  s.summaries = workspace.at(reserved.summaries);
  s.counters = workspace.at(reserved.counters);
  if (asked.filters) s.group_max = workspace.at(reserved.group_max);
  if (asked.filters) s.tasks = workspace.at(reserved.tasks);
  if (asked.filters && asked.listed) s.shortlists = workspace.at(reserved.shortlists);
  if (asked.filters || asked.finished) s.laws = workspace.at(reserved.laws);
  return s;
}

__device__ __forceinline__ const float* group_max_of(const LawScratch& s, int64_t r) {
  return s.group_max != nullptr ? s.group_max + r * s.tiles * kTileGroups : nullptr;
}

// The laws of those rows whose last tile is one of the planned ones, a warp a law. Collective over
// the block, whose threads have met.
__device__ __forceinline__ void find_complete_laws(const LawScratch& s, ScanMemory* memory) {
  __shared__ unsigned complete;  // a bit for each tile that was a row's last one
  if (threadIdx.x < kWarp) {
    const int32_t k = static_cast<int32_t>(threadIdx.x);
    bool is_last = false;
    if (k < memory->count) {
      const TilePlan& plan = memory->plans[memory->order[k].plan];
      uint32_t* counter = s.counters + plan.row;
      const int64_t tiles = num_tiles(plan.of_row.row.vocab);
      is_last = add_in_order(counter, 1) == static_cast<uint32_t>(tiles - 1);
      if (is_last) *counter = 0;
    }
    const unsigned found = __ballot_sync(kAllLanes, is_last);
    if (k == 0) complete = found;
  }
  __syncthreads();
  int turn = 0;
  for (unsigned left = complete; left != 0; left &= left - 1, ++turn) {
    if (turn % kWarps != static_cast<int>(threadIdx.x) / kWarp) continue;
    const TilePlan& plan = memory->plans[memory->order[__ffs(static_cast<int>(left)) - 1].plan];
    double unused = 0.0;
    const RowLaw law = combine_tiles(plan.of_row.row, plan.of_row.filters, false, ExtraTask{},
                                     s.summaries + plan.row * s.tiles, &unused);
    if (threadIdx.x % kWarp == 0) s.laws[plan.row] = law;
  }
  __syncthreads();  // the plans have been read
}

// Numerics and traffic: scan.cuh.
template <typename Rows, bool kMasked>
__global__ void __launch_bounds__(kThreads, scan_blocks(kMasked))
    scan_rows(const Rows rows, const LawScratch s, bool want_argmax) {
  begin_in_turn();
  if (!s.combines()) clear_counters(s.counters, s.count);
  scan_all<kMasked, Elements::kAny>(RowsToScan<Rows>{rows, s.count * s.tiles, s.tiles, s.summaries,
                                                     s.group_max, want_argmax, s.tasks},
                                    [&](ScanMemory* memory) {
                                      if (s.combines()) find_complete_laws(s, memory);
                                    });
}

// Grid: a block a row. Numerics and traffic: cutoff.cuh.
template <bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers) finish_rows(const LawScratch s) {
  begin_in_turn();
  __shared__ SharedArray<RowTask, 1> of_row;  // registers are short where cutoffs are looked for
  const int64_t r = blockIdx.x;
  copy_by_block(of_row.data(), s.tasks[r]);
  const RowTask& task = of_row[0];
  double unused = 0.0;
  const RowLaw law =
      finish_law<kMasked>(task.row, task.filters, false, ExtraTask{}, s.summaries + r * s.tiles,
                          group_max_of(s, r), &unused, s.shortlist(r));
  if (threadIdx.x == 0) s.laws[r] = law;
}

// The law of row r after these launches. Collective over a full warp.
__device__ __forceinline__ RowLaw law_of(const RowTask& task, const LawScratch& s, int64_t r) {
  if (s.laws != nullptr) return s.laws[r];
  double unused = 0.0;
  return combine_tiles(task.row, task.filters, false, ExtraTask{}, s.summaries + r * s.tiles,
                       &unused);
}

template <typename Rows>
void launch_scan(const Gpu& gpu, const Rows& rows, const LawScratch& s, bool want_argmax) {
  const bool masked = rows.p.mask.words != nullptr;
  launch(gpu, "scan_rows", masked ? scan_rows<Rows, true> : scan_rows<Rows, false>,
         blocks_to_scan(gpu, s.count * s.tiles, scan_blocks(masked)), rows, s, want_argmax);
}

template <typename Rows>
void launch_finish(const Gpu& gpu, const Rows& rows, const LawScratch& s) {
  if (s.laws == nullptr || s.combines()) return;
  const bool masked = rows.p.mask.words != nullptr;
  launch(gpu, "finish_rows", masked ? finish_rows<true> : finish_rows<false>, s.count, s);
}

template <typename Rows>
void launch_laws(const Gpu& gpu, const Rows& rows, const LawScratch& s) {
  launch_scan(gpu, rows, s, false);
  launch_finish(gpu, rows, s);
}

template <typename Rows>
void load_scan(Loading& load) {
  load(scan_rows<Rows, false>, scan_rows<Rows, true>);
}

template <typename Rows>
void load_laws(Loading& load) {
  load_scan<Rows>(load);
  load(finish_rows<false>, finish_rows<true>);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
