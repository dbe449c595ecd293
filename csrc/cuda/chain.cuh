// What the kernels of verify share: scratch memory, a request seen by a block, its rows and laws,
// and the end of a decision. Included by verify.cu alone.
#pragma once

#include "../core/chain.h"
#include "block.cuh"
#include "draw.cuh"
#include "law_pass.cuh"
#include "race.cuh"
#include "shared.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Up to this draft length every block that needs the laws combines them from the tiles itself.
constexpr int64_t kMaxUnfinishedGamma = 8;
constexpr int kMaxUnfinishedRows = 2 * kMaxUnfinishedGamma + 1;

// Nodes whose facts a block looks at side by side.
constexpr int kNodesAtOnce = 32;

// A node of the block rule, between the launches.
struct NodeState {
  double inflow;
  NodeFacts facts;
  int32_t status;
  bool leaf;
  bool below_leaf;
};

struct Outcome {
  int64_t accepted;
  DrawTask draw;
};

// Rows of a request: target rows 0 .. gamma, then draft rows 0 .. gamma - 1 if there is a draft
// law.
struct Scratch {
  int64_t rows = 0;    // of a request
  int64_t tiles = 0;   // of the wider vocabulary: the stride of a row's tiles
  int64_t groups = 0;  // likewise
  bool finished = false;
  bool races = false;
  TileSummary* summaries = nullptr;  // [B, rows, tiles]
  float* group_max = nullptr;        // [B, rows, groups], with filters
  RowLaw* laws = nullptr;            // [B, rows], if finished
  double* extras = nullptr;          // [B, rows], if finished, or with races: their winners
  Runner* runners = nullptr;         // [B, rows, tiles], with races
  NodeState* nodes = nullptr;        // [B, gamma + 1], block rule
  double* node_masses = nullptr;     // [B, gamma + 1, tiles], block rule
  double* draw_masses = nullptr;     // [B, tiles]
  uint64_t* tile_sums = nullptr;     // [B, tiles]
  Outcome* outcomes = nullptr;       // [B]
  uint32_t* counters = nullptr;      // [B, rows], all 0 after scan_laws
};

// ---- requests and rows ---

// open_request by one warp, for the whole block: columns are looked at side by side.
__device__ void open_in_block(const VerifyParams& p, int64_t b, Request* shared) {
  if (threadIdx.x < kWarp) {
    const int64_t lane = threadIdx.x;
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
    if (!r.greedy) {
      bool in_range = is_uniform_in_range(p.randomness, b, p.gamma);
      for (int64_t slot = lane; slot < r.drafted; slot += kWarp) {
        in_range &= is_uniform_in_range(p.randomness, b, slot);
      }
      if (warp_min(static_cast<int32_t>(in_range)) == 0) r.status |= kParameterOutOfRange;
    }
    take_final_uniform(p, &r);
    if (lane == 0) *shared = r;
  }
  __syncthreads();
}

struct RowTask {
  Row row;  // data == nullptr: nobody asks for this row
  Filters filters;
  ExtraTask extra;
};

__device__ RowTask row_task(const VerifyParams& p, const Request& r, int64_t slot) {
  RowTask task;
  const int64_t i = slot <= p.gamma ? slot : slot - p.gamma - 1;
  if (slot > p.gamma) {
    if (wants_draft_row(p, r, i)) task.row = draft_row(p, r.b, i);
    task.filters = r.draft_filters;
    return task;
  }
  if (i <= r.drafted) task.row = target_row(p, r.b, i);
  task.filters = r.target_filters;
  if (task.row.data != nullptr) task.extra = extra_task(p, r, i, task.row);
  return task;
}

// Scans this block's share of a row, unless nobody asks for it.
template <bool kMasked>
__device__ void scan_share(const RowTask& task, const Scratch& s, int64_t row, int64_t split,
                           int64_t splits) {
  if (task.row.data == nullptr) return;
  const Share share = share_of(num_tiles(task.row.vocab), split, splits);
  float* group_max = s.group_max != nullptr
                         ? s.group_max + row * s.groups + share.first * num_groups(kTile)
                         : nullptr;
  scan_tiles<kMasked>(task.row, task.filters, false, task.extra, share.first, share.last,
                      s.summaries + row * s.tiles + share.first, group_max);
}

// ---- laws of one request ---

// The laws of a request's rows: where finish_laws left them, or combined here.
struct Laws {
  const RowLaw* laws;
  const double* extras;
};

struct LawStorage {
  SharedArray<RowLaw, kMaxUnfinishedRows> laws;
  double extras[kMaxUnfinishedRows];
};

// Laws of nodes [first, last] of a request; a warp a row.
__device__ Laws gather_laws(const VerifyParams& p, const Scratch& s, const Request& r,
                            int64_t first, int64_t last, LawStorage* storage) {
  const int64_t first_row = r.b * s.rows;
  if (s.finished) return {s.laws + first_row, s.extras + first_row};
  for (int64_t slot = threadIdx.x / kWarp; slot < s.rows; slot += kWarps) {
    const int64_t node = slot <= p.gamma ? slot : slot - p.gamma - 1;
    if (node < first || node > last) continue;
    const RowTask task = row_task(p, r, slot);
    double extra = 0.0;
    const RowLaw law = combine_tiles(task.row, task.filters, false, task.extra,
                                     s.summaries + (first_row + slot) * s.tiles, &extra);
    if (threadIdx.x % kWarp == 0) {
      storage->laws[static_cast<int>(slot)] = law;
      storage->extras[slot] = extra;
    }
  }
  __syncthreads();
  return {storage->laws.data(), s.races ? s.extras + first_row : storage->extras};
}

__device__ LawRow target_law_row(const VerifyParams& p, const Request& r, const Laws& laws,
                                 int64_t i) {
  return {target_row(p, r.b, i), laws.laws[i]};
}

__device__ LawRow draft_law_row(const VerifyParams& p, const Request& r, const Laws& laws,
                                int64_t i) {
  if (!wants_draft_row(p, r, i)) return {};
  return {draft_row(p, r.b, i), laws.laws[p.gamma + 1 + i]};
}

// Facts of nodes [base, base + kNodesAtOnce) up to `last`, whose laws must be there.
__device__ void look_at_nodes(const VerifyParams& p, const Request& r, const Laws& laws,
                              int64_t base, int64_t last, NodeFacts* facts) {
  const int64_t i = base + threadIdx.x;
  if (threadIdx.x < kNodesAtOnce && i <= last) {
    facts[threadIdx.x] = node_facts(p, r, i, target_law_row(p, r, laws, i),
                                    draft_law_row(p, r, laws, i), laws.extras[i]);
  }
  __syncthreads();
}

// ---- decisions ---

// The end of every decision: outputs by the request's first block, and each block's share of the
// final residual's mass. `r` is shared and complete.
__device__ void close_decision(const VerifyParams& p, const Scratch& s, Request* r, int64_t split,
                               int64_t splits) {
  if (split == 0) {
    write_accepted(p, *r, threadIdx.x, kThreads);
    if (threadIdx.x == 0) {
      if (knows_token(&r->draw)) write_extra_token(p, r->b, r->accepted, r->draw);
      s.outcomes[r->b] = {r->accepted, r->draw};
    }
  }
  if (!needs_draw(r->draw) || !r->draw.residual || r->draw.mass >= 0.0) return;
  const Share share = share_of(num_tiles(p.target.vocab), split, splits);
  residual_mass_tiles(r->draw, share.first, share.last,
                      s.draw_masses + r->b * s.tiles + share.first);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
