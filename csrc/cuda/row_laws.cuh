// The laws of all rows of an operator: what row_law, sample, acceptance and verify_tree share.
//
// Rows is a functor that travels to the device: FilteredRow rows(r) is row r of `count`, and
// rows.p.mask the mask that all of them have or lack.
#pragma once

#include "cutoff.cuh"
#include "draw.cuh"

namespace specdec {
namespace cuda {
namespace {

struct FilteredRow {
  Row row;
  Filters filters;
};

// Scratch memory for `count` rows of up to `tiles` tiles.
struct LawScratch {
  int64_t count = 0;
  int64_t tiles = 0;
  TileSummary* summaries = nullptr;  // [count, tiles]
  float* group_max = nullptr;        // [count, tiles, kTileGroups], with filters
  RowLaw* laws = nullptr;            // [count], if finished
  uint32_t* counters = nullptr;  // [count], all 0 after scan_rows; before it, too, if it combines

  // Whether scan_rows finds the laws: filters take a launch of their own.
  __host__ __device__ bool combines() const { return laws != nullptr && group_max == nullptr; }
};

struct LawReservation {
  Reserved<TileSummary> summaries;
  Reserved<float> group_max;
  Reserved<RowLaw> laws;
  Reserved<uint32_t> counters;
};

// `finished`: the laws are asked for in any case, else only with filters.
LawReservation reserve_laws(Workspace* workspace, int64_t count, int64_t tiles, bool filters,
                            bool finished = false) {
  return {workspace->reserve<TileSummary>(count * tiles),
          workspace->reserve<float>(filters ? count * tiles * kTileGroups : 0),
          workspace->reserve<RowLaw>(filters || finished ? count : 0),
          workspace->reserve<uint32_t>(count)};
}

LawScratch laws_at(const Workspace& workspace, const LawReservation& reserved, int64_t count,
                   int64_t tiles, bool filters, bool finished = false) {
  LawScratch s{count,   tiles,   workspace.at(reserved.summaries),
               nullptr, nullptr, workspace.at(reserved.counters)};
  if (filters) s.group_max = workspace.at(reserved.group_max);
  if (filters || finished) s.laws = workspace.at(reserved.laws);
  return s;
}

__device__ __forceinline__ const float* group_max_of(const LawScratch& s, int64_t r) {
  return s.group_max != nullptr ? s.group_max + r * s.tiles * kTileGroups : nullptr;
}

// The law of row r by the last of its `splits` blocks, if scan_rows finds laws. Collective over the
// block.
__device__ __forceinline__ void combine_if_last(const FilteredRow& task, const LawScratch& s,
                                                int64_t r, int64_t splits) {
  if (!s.combines() || !is_last_block(s.counters + r, splits)) return;
  if (threadIdx.x >= kWarp) return;
  double unused = 0.0;
  const RowLaw law =
      combine_tiles(task.row, task.filters, false, ExtraTask{}, s.summaries + r * s.tiles, &unused);
  if (threadIdx.x == 0) s.laws[r] = law;
}

// Grid: (row, split). Numerics and traffic: law_pass.cuh.
template <typename Rows, bool kMasked>
__global__ void __launch_bounds__(kThreads, scan_blocks(kMasked))
    scan_rows(const Rows rows, const LawScratch s, bool want_argmax, int64_t splits) {
  begin_kernel();
  const auto [r, split] = this_unit(splits);
  if (!s.combines() && split == 0 && threadIdx.x == 0) s.counters[r] = 0;
  const FilteredRow task = rows(r);
  const Share share = share_of(num_tiles(task.row.vocab), split, splits);
  float* group_max =
      s.group_max != nullptr ? s.group_max + (r * s.tiles + share.first) * kTileGroups : nullptr;
  scan_tiles<kMasked>(task.row, task.filters, want_argmax, ExtraTask{}, share.first, share.last,
                      s.summaries + r * s.tiles + share.first, group_max);
  combine_if_last(task, s, r, splits);
}

// Grid: a block a row. Numerics and traffic: cutoff.cuh.
template <typename Rows, bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    finish_rows(const Rows rows, const LawScratch s) {
  begin_kernel();
  const int64_t r = blockIdx.x;
  const FilteredRow task = rows(r);
  double unused = 0.0;
  const RowLaw law = finish_law<kMasked>(task.row, task.filters, false, ExtraTask{},
                                         s.summaries + r * s.tiles, group_max_of(s, r), &unused);
  if (threadIdx.x == 0) s.laws[r] = law;
}

// The law of row r after these launches. Collective over a full warp.
__device__ __forceinline__ RowLaw law_of(const FilteredRow& task, const LawScratch& s, int64_t r) {
  if (s.laws != nullptr) return s.laws[r];
  double unused = 0.0;
  return combine_tiles(task.row, task.filters, false, ExtraTask{}, s.summaries + r * s.tiles,
                       &unused);
}

template <typename Rows>
void launch_scan(const Gpu& gpu, const Rows& rows, const LawScratch& s, bool want_argmax) {
  const int64_t splits = splits_for(gpu, s.count, s.tiles);
  const auto kernel = rows.p.mask.words != nullptr ? scan_rows<Rows, true> : scan_rows<Rows, false>;
  launch(gpu, "scan_rows", kernel, s.count * splits, rows, s, want_argmax, splits);
}

template <typename Rows>
void launch_finish(const Gpu& gpu, const Rows& rows, const LawScratch& s) {
  if (s.laws == nullptr || s.combines()) return;
  const auto kernel =
      rows.p.mask.words != nullptr ? finish_rows<Rows, true> : finish_rows<Rows, false>;
  launch(gpu, "finish_rows", kernel, s.count, rows, s);
}

template <typename Rows>
void launch_laws(const Gpu& gpu, const Rows& rows, const LawScratch& s) {
  launch_scan(gpu, rows, s, false);
  launch_finish(gpu, rows, s);
}

template <typename Rows>
void load_scan(const Loading& load) {
  load(scan_rows<Rows, false>, scan_rows<Rows, true>);
}

template <typename Rows>
void load_laws(const Loading& load) {
  load_scan<Rows>(load);
  load(finish_rows<Rows, false>, finish_rows<Rows, true>);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
