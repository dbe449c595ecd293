// Chain verification.
//
// Launches, each over all requests at once and all on the caller's stream:
//   laws     a block takes some tiles of one target or draft row: maximum and sum of exponentials
//   finish   (filters, or long drafts) a block a row: cutoffs; the rows' laws
//   race     (coupled rule) a block takes some tiles of a target row; a row's last block compares
//   masses   (block rule) a block takes some tiles of the residual at one node
//   decide   a block takes some tiles of a request's final residual; every block of a request
//            finds the decision for itself, which costs less than a launch
//   draw     (but for the coupled rule) integer sums of the final law, tile by tile; a request's
//            last block searches
// so 3 for a stepwise rule without filters and 4 for the block rule. raw_logprobs adds 2, and a
// reduced draft vocabulary 2 that come first (token_map.cuh).
//
// Reads 2 or 4 bytes per entry of each target and draft row, again both rows of the residuals of
// undecided nodes, and both rows of the final residual twice, or each target row again for a race;
// and what masks and reduced vocabularies cost (tile.cuh). Unlike the CPU's, a stepwise rule
// reads the rows after its first failure too: waiting for the decision would leave the chip idle.
// Writes O(rows x tiles). Numerics: core/; float sums in fixed tiles combined in tile order, so
// that neither splits nor the batch change a bit.
#include "cutoff.cuh"
#include "kernels.h"
#include "token_map.cuh"
#include "verify_block.cuh"
#include "verify_stepwise.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// ---- laws ---

template <bool kMasked>
__global__ void __launch_bounds__(kThreads, scan_blocks(kMasked))
    scan_laws(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Request, 1> request;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index / s.rows;
  const int64_t slot = unit.index % s.rows;
  open_in_block(p, b, request.data());
  if (unit.split == 0 && threadIdx.x == 0) s.counters[unit.index] = 0;
  scan_share<kMasked>(row_task(p, request[0], slot), s, unit.index, unit.split, splits);
}

template <bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    finish_laws(const VerifyParams p, const Scratch s) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ SharedArray<RowTask, 1> shared_task;  // registers are short
  const int64_t row = blockIdx.x;
  open_in_block(p, row / s.rows, request.data());
  if (threadIdx.x == 0) shared_task[0] = row_task(p, request[0], row % s.rows);
  __syncthreads();
  const RowTask& task = shared_task[0];
  const float* group_max = s.group_max != nullptr ? s.group_max + row * s.groups : nullptr;
  double extra = 0.0;
  const RowLaw law = finish_law<kMasked>(task.row, task.filters, false, task.extra,
                                         s.summaries + row * s.tiles, group_max, &extra);
  if (threadIdx.x == 0) {
    s.laws[row] = law;
    s.extras[row] = extra;
  }
}

// ---- races ---

__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    race_rows(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ SharedArray<RaceTask, 1> task;
  __shared__ LawStorage storage;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index / s.rows;
  const int64_t i = unit.index % s.rows;
  open_in_block(p, b, request.data());
  const Request& r = request[0];
  if (r.greedy || i > r.drafted) return;
  const LawRow target = target_law_row(p, r, gather_laws(p, s, r, i, i, &storage), i);
  if (!target.law.valid) return;
  if (threadIdx.x == 0) task[0] = {target, race_of(p.randomness, b, i)};
  __syncthreads();
  int64_t winner = -1;
  const bool last = run_race(task[0], s.runners + unit.index * s.tiles, s.counters + unit.index,
                             unit.split, splits, &winner);
  if (last && threadIdx.x == 0) s.extras[unit.index] = static_cast<double>(winner);
}

// ---- the extra token ---

template <bool kMapped>
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    draw_extra(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Outcome, 1> outcome;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index;
  if (threadIdx.x == 0) outcome[0] = s.outcomes[b];
  __syncthreads();
  DrawTask& task = outcome[0].draw;
  if (!needs_draw(task)) return;
  double mass = task.mass;
  if (task.residual && mass < 0.0) {
    mass = sum_tiles(s.draw_masses + b * s.tiles, num_tiles(p.target.vocab));
  }
  const bool last =
      draw<kMapped>(&task, mass, s.tile_sums + b * s.tiles, s.counters + b, unit.split, splits);
  if (last && threadIdx.x == 0) write_extra_token(p, b, outcome[0].accepted, task);
}

// ---- raw logprobs ---

// Target row i of a request without filters at T = 1, where a token was emitted.
__device__ RowTask raw_task(const VerifyParams& p, int64_t b, int64_t i) {
  RowTask task;
  if (i <= p.num_accepted[b]) task.row = target_row(p, b, i);
  return task;
}

template <bool kMasked>
__global__ void __launch_bounds__(kThreads, kBlocksAt80Registers)
    scan_raw(const VerifyParams p, const Scratch s, int64_t splits) {
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index / (p.gamma + 1);
  const int64_t i = unit.index % (p.gamma + 1);
  scan_share<kMasked>(raw_task(p, b, i), s, b * s.rows + i, unit.split, splits);
}

// A warp a row.
__global__ void __launch_bounds__(kThreads)
    write_raw_logprobs(const VerifyParams p, const Scratch s) {
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (place >= p.batch * (p.gamma + 1)) return;
  const int64_t b = place / (p.gamma + 1);
  const int64_t i = place % (p.gamma + 1);
  const RowTask task = raw_task(p, b, i);
  double unused = 0.0;
  const RowLaw law = combine_tiles(task.row, task.filters, false, task.extra,
                                   s.summaries + (b * s.rows + i) * s.tiles, &unused);
  if (threadIdx.x % kWarp == 0 && law.valid) {
    p.logprobs[place] = target_log_probability({task.row, law}, p.tokens[place]);
  }
}

// ---- host ---

// All scratch memory of a call, what the workspace has promised already included.
Scratch make_scratch(const VerifyParams& p, const Gpu& gpu, Workspace* workspace) {
  Scratch s;
  const bool filters = any_filters(p);
  const bool block_rule = p.rule == Rule::kBlock;
  const bool has_draft = p.draft.data != nullptr && reads_draft_law(p.rule);
  s.rows = p.gamma + 1 + (has_draft ? p.gamma : 0);
  s.tiles = num_tiles(has_draft && p.draft.vocab > p.target.vocab ? p.draft.vocab : p.target.vocab);
  s.groups = s.tiles * num_groups(kTile);
  s.finished = filters || p.gamma > kMaxUnfinishedGamma;
  s.races = runs_races(p.rule);
  const int64_t rows = p.batch * s.rows;
  const int64_t nodes = block_rule ? p.batch * (p.gamma + 1) : 0;
  const auto summaries = workspace->reserve<TileSummary>(rows * s.tiles);
  const auto group_max = workspace->reserve<float>(filters ? rows * s.groups : 0);
  const auto laws = workspace->reserve<RowLaw>(s.finished ? rows : 0);
  const auto extras = workspace->reserve<double>(s.finished || s.races ? rows : 0);
  const auto runners = workspace->reserve<Runner>(s.races ? rows * s.tiles : 0);
  const auto states = workspace->reserve<NodeState>(nodes);
  const auto node_masses = workspace->reserve<double>(nodes * s.tiles);
  const auto draw_masses = workspace->reserve<double>(p.batch * s.tiles);
  const auto tile_sums = workspace->reserve<uint64_t>(p.batch * s.tiles);
  const auto outcomes = workspace->reserve<Outcome>(p.batch);
  const auto counters = workspace->reserve<uint32_t>(rows);
  workspace->allocate(gpu);
  s.summaries = workspace->at(summaries);
  s.group_max = filters ? workspace->at(group_max) : nullptr;
  s.laws = workspace->at(laws);
  s.extras = workspace->at(extras);
  s.runners = workspace->at(runners);
  s.nodes = workspace->at(states);
  s.node_masses = workspace->at(node_masses);
  s.draw_masses = workspace->at(draw_masses);
  s.tile_sums = workspace->at(tile_sums);
  s.outcomes = workspace->at(outcomes);
  s.counters = workspace->at(counters);
  return s;
}

// Launches kernel(p, s, splits) over units x splits blocks, a row's tiles shared out among as many
// blocks as it takes to fill the chip.
void launch_split(const Gpu& gpu, const char* name,
                  void (*kernel)(const VerifyParams, const Scratch, int64_t), int64_t units,
                  const VerifyParams& p, const Scratch& s) {
  const int64_t splits = splits_for(units, s.tiles);
  launch(gpu, name, kernel, units * splits, p, s, splits);
}

}  // namespace

void verify(const VerifyParams& given, const Gpu& gpu) {
  if (given.batch == 0) return;
  VerifyParams p = given;
  Workspace workspace;
  const MapReservation map = reserve_map(&workspace, p.map);
  const Scratch s = make_scratch(p, gpu, &workspace);
  launch_map(gpu, workspace, map, &p.map);
  const int64_t nodes = p.batch * (p.gamma + 1);
  const bool masked = p.mask.words != nullptr;
  launch_split(gpu, "scan_laws", masked ? scan_laws<true> : scan_laws<false>, p.batch * s.rows, p,
               s);
  if (s.finished) {
    launch(gpu, "finish_laws", masked ? finish_laws<true> : finish_laws<false>, p.batch * s.rows, p,
           s);
  }
  if (s.races) launch_split(gpu, "race_rows", race_rows, p.batch * s.rows, p, s);
  if (p.rule == Rule::kBlock) {
    launch_split(gpu, "block_masses", block_masses, nodes, p, s);
    launch_split(gpu, "decide_block", decide_block, p.batch, p, s);
  } else {
    launch_split(gpu, "decide_stepwise", decide_stepwise, p.batch, p, s);
  }
  if (!s.races) {
    const bool mapped = p.map.ids.data != nullptr;
    launch_split(gpu, "draw_extra", mapped ? draw_extra<true> : draw_extra<false>, p.batch, p, s);
  }
  if (p.raw_logprobs) {
    launch_split(gpu, "scan_raw", masked ? scan_raw<true> : scan_raw<false>, nodes, p, s);
    launch(gpu, "write_raw_logprobs", write_raw_logprobs, (nodes + kWarps - 1) / kWarps, p, s);
  }
}

}  // namespace cuda
}  // namespace specdec
