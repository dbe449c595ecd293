// Chain verification.
//
// Launches, each over all requests at once and all on the caller's stream:
//   laws     a block takes some tiles of one target or draft row: maximum and sum of exponentials
//   finish   (filters, or long drafts) a block a row: cutoffs; the rows' laws
//   masses   (block rule) a block takes some tiles of the residual at one node
//   decide   a block takes some tiles of a request's final residual; every block of a request
//            finds the decision for itself, which costs less than a launch
//   draw     integer sums of the final law, tile by tile; a request's last block searches
// so 3 for a stepwise rule without filters and 4 for the block rule. raw_logprobs adds 2.
//
// Reads 2 or 4 bytes per entry of each target and draft row, again both rows of the residuals of
// undecided nodes, and both rows of the final residual twice. Unlike the CPU's, a stepwise rule
// reads the rows after its first failure too: waiting for the decision would leave the chip idle.
// Writes O(rows x tiles). Numerics: core/; float sums in fixed tiles combined in tile order, so
// that neither splits nor the batch change a bit.
#include "../core/chain.h"
#include "block.cuh"
#include "draw.cuh"
#include "kernels.h"
#include "law_pass.cuh"
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
  TileSummary* summaries = nullptr;  // [B, rows, tiles]
  float* group_max = nullptr;        // [B, rows, groups], with filters
  RowLaw* laws = nullptr;            // [B, rows], if finished
  double* extras = nullptr;          // [B, rows], if finished
  NodeState* nodes = nullptr;        // [B, gamma + 1], block rule
  double* node_masses = nullptr;     // [B, gamma + 1, tiles], block rule
  double* draw_masses = nullptr;     // [B, tiles]
  uint64_t* tile_sums = nullptr;     // [B, tiles]
  Outcome* outcomes = nullptr;       // [B]
  uint32_t* counters = nullptr;      // [B]
};

// ---- requests and rows
// ------------------------------------------------------------------------------

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
      bool fine = is_uniform_fine(p, b, p.gamma);
      for (int64_t slot = lane; slot < r.drafted; slot += kWarp) {
        fine &= is_uniform_fine(p, b, slot);
      }
      if (warp_min(static_cast<int32_t>(fine)) == 0) r.status |= kParameterOutOfRange;
    }
    take_final_uniform(p, &r);
    if (lane == 0) *shared = r;
  }
  __syncthreads();
}

struct RowTask {
  Row row;  // data == nullptr: nobody asks for this row
  Filters filters;
  ExtraTask extra{Extra::kNone, 0.0f};
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
  if (i >= r.drafted || task.row.data == nullptr) return task;
  const int64_t token = load_id(p.draft_tokens, r.b, i);
  if (p.rule == Rule::kTopBeta && token < task.row.vocab) {
    task.extra = {Extra::kRank, row_value(task.row, token)};
  } else if (p.rule == Rule::kTypical && !r.greedy) {
    task.extra = {Extra::kEntropy, 0.0f};
  }
  return task;
}

// Block k of a launch of [units, splits] blocks.
struct Unit {
  int64_t index;
  int64_t split;
};

__device__ Unit this_unit(int64_t splits) {
  return {static_cast<int64_t>(blockIdx.x) / splits, static_cast<int64_t>(blockIdx.x) % splits};
}

// Scans this block's share of a row, unless nobody asks for it.
__device__ void scan_share(const RowTask& task, const Scratch& s, int64_t row, int64_t split,
                           int64_t splits) {
  if (task.row.data == nullptr) return;
  const Share share = share_of(num_tiles(task.row.vocab), split, splits);
  float* group_max = s.group_max != nullptr
                         ? s.group_max + row * s.groups + share.first * num_groups(kTile)
                         : nullptr;
  scan_tiles(task.row, task.filters, false, task.extra, share.first, share.last,
             s.summaries + row * s.tiles + share.first, group_max);
}

__global__ void scan_laws(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Request, 1> request;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index / s.rows;
  const int64_t slot = unit.index % s.rows;
  open_in_block(p, b, request.data());
  if (slot == 0 && unit.split == 0 && threadIdx.x == 0) s.counters[b] = 0;
  scan_share(row_task(p, request[0], slot), s, unit.index, unit.split, splits);
}

__global__ void finish_laws(const VerifyParams p, const Scratch s) {
  __shared__ SharedArray<Request, 1> request;
  const int64_t row = blockIdx.x;
  open_in_block(p, row / s.rows, request.data());
  const RowTask task = row_task(p, request[0], row % s.rows);
  const float* group_max = s.group_max != nullptr ? s.group_max + row * s.groups : nullptr;
  double extra = 0.0;
  const RowLaw law = finish_law(task.row, task.filters, false, task.extra,
                                s.summaries + row * s.tiles, group_max, &extra);
  if (threadIdx.x == 0) {
    s.laws[row] = law;
    s.extras[row] = extra;
  }
}

// ---- laws of one request
// ------------------------------------------------------------------------------

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
  return {storage->laws.data(), storage->extras};
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

// Facts of nodes [base, base + kNodesAtOnce), as far as the request goes.
__device__ void look_at_nodes(const VerifyParams& p, const Request& r, const Laws& laws,
                              int64_t base, NodeFacts* facts) {
  const int64_t i = base + threadIdx.x;
  if (threadIdx.x < kNodesAtOnce && i <= r.drafted) {
    facts[threadIdx.x] = node_facts(p, r, i, target_law_row(p, r, laws, i),
                                    draft_law_row(p, r, laws, i), laws.extras[i]);
  }
  __syncthreads();
}

// ---- decisions
// --------------------------------------------------------------------------------------

// The end of every decision: outputs by the request's first block, and each block's share of the
// final residual's mass. `r` is shared and complete.
__device__ void close_decision(const VerifyParams& p, const Scratch& s, Request* r, int64_t split,
                               int64_t splits) {
  if (split == 0) {
    write_accepted(p, *r, threadIdx.x, kThreads);
    if (threadIdx.x == 0) {
      if (r->draw.target_law.point_mass) {  // nothing to draw
        r->draw.token = r->draw.target_law.argmax;
        write_extra_token(p, r->b, r->accepted, r->draw);
      }
      s.outcomes[r->b] = {r->accepted, r->draw};
    }
  }
  if (!needs_draw(r->draw) || !r->draw.residual) return;
  const Share share = share_of(num_tiles(p.target.vocab), split, splits);
  residual_mass_tiles(r->draw, share.first, share.last,
                      s.draw_masses + r->b * s.tiles + share.first);
}

__global__ void decide_stepwise(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ SharedArray<Walk, 1> walk;
  __shared__ LawStorage storage;
  __shared__ NodeFacts facts[kNodesAtOnce];
  const Unit unit = this_unit(splits);
  open_in_block(p, unit.index, request.data());
  Request& r = request[0];
  if (unit.split == 0) clear_outputs(p, unit.index, threadIdx.x, kThreads);
  if (threadIdx.x == 0) walk[0] = Walk{};
  const Laws laws = gather_laws(p, s, r, 0, r.drafted, &storage);
  for (int64_t base = 0; base <= r.drafted; base += kNodesAtOnce) {
    look_at_nodes(p, r, laws, base, facts);
    if (threadIdx.x == 0) {
      for (int64_t i = base; i < base + kNodesAtOnce && walk[0].walking; ++i) {
        visit(p, &r, walk.data(), i, facts[i - base], target_law_row(p, r, laws, i),
              draft_law_row(p, r, laws, i), unit.split == 0);
      }
    }
    __syncthreads();
    if (!walk[0].walking) break;
  }
  close_decision(p, s, &r, unit.split, splits);
}

// ---- block rule
// -----------------------------------------------------------------------------------

// The way down to a node, which ends there or at a leaf before it.
struct Flow {
  int64_t node;
  double inflow;
  BlockStep step;
  bool done;
};

// Goes on through the nodes whose facts are there; by one thread.
__device__ void flow_through(Request* r, const NodeFacts* facts, int64_t base, int64_t last,
                             Flow* flow) {
  for (int64_t i = base; i < base + kNodesAtOnce; ++i) {
    flow->node = i;
    flow->step = block_step(r, flow->inflow, facts[i - base]);
    flow->done = flow->step.leaf || i == last;
    if (flow->done) return;
    flow->inflow = flow->step.outgoing;
  }
}

__global__ void block_masses(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ SharedArray<DrawTask, 1> residual;
  __shared__ LawStorage storage;
  __shared__ NodeFacts facts[kNodesAtOnce];
  __shared__ Flow flow;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index / (p.gamma + 1);
  const int64_t node = unit.index % (p.gamma + 1);
  open_in_block(p, b, request.data());
  Request& r = request[0];
  if (node > r.drafted) return;
  const Laws laws = gather_laws(p, s, r, 0, node, &storage);
  if (threadIdx.x == 0) flow.inflow = 1.0;
  for (int64_t base = 0; base <= node; base += kNodesAtOnce) {
    look_at_nodes(p, r, laws, base, facts);
    if (threadIdx.x == 0) flow_through(&r, facts, base, node, &flow);
    __syncthreads();
    if (flow.done) break;
  }
  const bool reached = flow.node == node;
  const bool leaf = flow.step.leaf;
  if (unit.split == 0 && threadIdx.x == 0) {
    s.nodes[unit.index] = {flow.inflow, facts[node % kNodesAtOnce], r.status, leaf, !reached};
  }
  if (!reached || leaf || !needs_mass(node, flow.inflow, flow.step.sampled)) return;
  if (threadIdx.x == 0) {
    residual[0] = block_residual(flow.inflow, target_law_row(p, r, laws, node),
                                 draft_law_row(p, r, laws, node));
  }
  __syncthreads();
  const Share share = share_of(num_tiles(p.target.vocab), unit.split, splits);
  residual_mass_tiles(residual[0], share.first, share.last,
                      s.node_masses + unit.index * s.tiles + share.first);
}

// By one warp, in tile order up to a fixed tree.
__device__ double sum_in_warp(const double* values, int64_t n) {
  double sum = 0.0;
  for (int64_t t = threadIdx.x % kWarp; t < n; t += kWarp) sum += values[t];
  return warp_sum(sum);
}

// Flips the coins of nodes 1 .. leaf, a warp a node.
__device__ void flip_coins(const VerifyParams& p, const Scratch& s, const Request& r, bool report,
                           int32_t* accepted, int32_t* leaf) {
  const NodeState* nodes = s.nodes + r.b * (p.gamma + 1);
  for (int64_t i = threadIdx.x / kWarp; i <= r.drafted; i += kWarps) {
    const NodeState& node = nodes[i];
    if (node.below_leaf) break;
    const bool lane0 = threadIdx.x % kWarp == 0;
    if (node.leaf && lane0) *leaf = static_cast<int32_t>(i);
    if (i == 0) continue;
    double acceptance = node.inflow;
    if (!node.leaf) {
      const bool sampled = node.facts.sampled;
      const double mass = needs_mass(i, node.inflow, sampled)
                              ? sum_in_warp(s.node_masses + (r.b * (p.gamma + 1) + i) * s.tiles,
                                            num_tiles(p.target.vocab))
                              : 0.0;
      acceptance = block_acceptance(node.inflow, sampled, mass, node.facts.p);
    }
    if (!lane0) continue;
    if (report) p.accept_probs[r.b * p.gamma + i - 1] = static_cast<float>(acceptance);
    if (block_accepts(p, r, i, acceptance)) atomicMax(accepted, static_cast<int32_t>(i));
  }
  __syncthreads();
}

// What flip_coins leaves out: logprobs of accepted tokens, and zeros below a leaf that nothing
// flows into.
__device__ void report_block(const VerifyParams& p, const Scratch& s, const Request& r,
                             int64_t leaf) {
  const NodeState* nodes = s.nodes + r.b * (p.gamma + 1);
  for (int64_t i = threadIdx.x; i < r.drafted; i += kThreads) {
    if (i < r.accepted) p.logprobs[r.b * (p.gamma + 1) + i] = nodes[i].facts.log_p;
    if (i >= leaf && nodes[leaf].inflow == 0.0) p.accept_probs[r.b * p.gamma + i] = 0.0f;
  }
}

__global__ void decide_block(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ LawStorage storage;
  __shared__ int32_t accepted, leaf;
  const Unit unit = this_unit(splits);
  const bool report = unit.split == 0;
  if (threadIdx.x == 0) accepted = 0;
  open_in_block(p, unit.index, request.data());
  Request& r = request[0];
  if (report) clear_outputs(p, unit.index, threadIdx.x, kThreads);
  __syncthreads();  // before accept_probs are written
  flip_coins(p, s, r, report, &accepted, &leaf);
  const int64_t winner = accepted;
  const Laws laws = gather_laws(p, s, r, winner, winner, &storage);
  if (threadIdx.x == 0) {
    const NodeState* nodes = s.nodes + r.b * (p.gamma + 1);
    const LawRow target = target_law_row(p, r, laws, winner);
    r.accepted = winner;
    r.status |= nodes[leaf].status;
    if (winner == leaf) {
      draw_from_target(&r, target);
    } else {
      draw_from_residual(&r, target, draft_law_row(p, r, laws, winner), column_at(p, r.b, winner),
                         nodes[winner].facts.sampled, nodes[winner].inflow);
    }
  }
  __syncthreads();
  if (report) report_block(p, s, r, leaf);
  close_decision(p, s, &r, unit.split, splits);
}

// ---- the extra token
// -----------------------------------------------------------------------------

__global__ void draw_extra(const VerifyParams p, const Scratch s, int64_t splits) {
  __shared__ SharedArray<Outcome, 1> outcome;
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index;
  if (threadIdx.x == 0) outcome[0] = s.outcomes[b];
  __syncthreads();
  DrawTask& task = outcome[0].draw;
  if (!needs_draw(task)) return;
  double mass = 0.0;
  for (int64_t t = threadIdx.x; task.residual && t < num_tiles(p.target.vocab); t += kThreads) {
    mass += s.draw_masses[b * s.tiles + t];
  }
  mass = block_sum(mass);
  const bool last =
      draw(&task, mass, s.tile_sums + b * s.tiles, s.counters + b, unit.split, splits);
  if (last && threadIdx.x == 0) write_extra_token(p, b, outcome[0].accepted, task);
}

// ---- raw logprobs
// --------------------------------------------------------------------------------

// Target row i of a request without filters at T = 1, where a token was emitted.
__device__ RowTask raw_task(const VerifyParams& p, int64_t b, int64_t i) {
  RowTask task;
  if (i <= p.num_accepted[b]) task.row = target_row(p, b, i);
  return task;
}

__global__ void scan_raw(const VerifyParams p, const Scratch s, int64_t splits) {
  const Unit unit = this_unit(splits);
  const int64_t b = unit.index / (p.gamma + 1);
  const int64_t i = unit.index % (p.gamma + 1);
  scan_share(raw_task(p, b, i), s, b * s.rows + i, unit.split, splits);
}

// A warp a row.
__global__ void write_raw_logprobs(const VerifyParams p, const Scratch s) {
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

// ---- host
// ----------------------------------------------------------------------------------------

bool has_filter_arrays(const SamplingParams& sampling) {
  return sampling.top_k.data != nullptr || sampling.top_p.data != nullptr ||
         sampling.min_p.data != nullptr;
}

bool any_filters(const VerifyParams& p) {
  if (ignores_sampling(p.rule)) return false;
  return has_filter_arrays(p.target_sampling) ||
         (reads_draft_law(p.rule) && has_filter_arrays(p.draft_sampling));
}

// All scratch memory of a call. `workspace` owns it.
Scratch make_scratch(const VerifyParams& p, const Gpu& gpu, Workspace* workspace) {
  Scratch s;
  const bool filters = any_filters(p);
  const bool block_rule = p.rule == Rule::kBlock;
  const bool has_draft = p.draft.data != nullptr && reads_draft_law(p.rule);
  s.rows = p.gamma + 1 + (has_draft ? p.gamma : 0);
  s.tiles = num_tiles(has_draft && p.draft.vocab > p.target.vocab ? p.draft.vocab : p.target.vocab);
  s.groups = s.tiles * num_groups(kTile);
  s.finished = filters || p.gamma > kMaxUnfinishedGamma;
  const int64_t rows = p.batch * s.rows;
  const int64_t nodes = block_rule ? p.batch * (p.gamma + 1) : 0;
  const auto summaries = workspace->reserve<TileSummary>(rows * s.tiles);
  const auto group_max = workspace->reserve<float>(filters ? rows * s.groups : 0);
  const auto laws = workspace->reserve<RowLaw>(s.finished ? rows : 0);
  const auto extras = workspace->reserve<double>(s.finished ? rows : 0);
  const auto states = workspace->reserve<NodeState>(nodes);
  const auto node_masses = workspace->reserve<double>(nodes * s.tiles);
  const auto draw_masses = workspace->reserve<double>(p.batch * s.tiles);
  const auto tile_sums = workspace->reserve<uint64_t>(p.batch * s.tiles);
  const auto outcomes = workspace->reserve<Outcome>(p.batch);
  const auto counters = workspace->reserve<uint32_t>(p.batch);
  workspace->allocate(gpu);
  s.summaries = workspace->at(summaries);
  s.group_max = filters ? workspace->at(group_max) : nullptr;
  s.laws = workspace->at(laws);
  s.extras = workspace->at(extras);
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

void verify(const VerifyParams& p, const Gpu& gpu) {
  if (p.batch == 0) return;
  Workspace workspace;
  const Scratch s = make_scratch(p, gpu, &workspace);
  const int64_t nodes = p.batch * (p.gamma + 1);
  launch_split(gpu, "scan_laws", scan_laws, p.batch * s.rows, p, s);
  if (s.finished) launch(gpu, "finish_laws", finish_laws, p.batch * s.rows, p, s);
  if (p.rule == Rule::kBlock) {
    launch_split(gpu, "block_masses", block_masses, nodes, p, s);
    launch_split(gpu, "decide_block", decide_block, p.batch, p, s);
  } else {
    launch_split(gpu, "decide_stepwise", decide_stepwise, p.batch, p, s);
  }
  launch_split(gpu, "draw_extra", draw_extra, p.batch, p, s);
  if (p.raw_logprobs || p.rule == Rule::kTopBeta) {
    launch_split(gpu, "scan_raw", scan_raw, nodes, p, s);
    launch(gpu, "write_raw_logprobs", write_raw_logprobs, (nodes + kWarps - 1) / kWarps, p, s);
  }
}

}  // namespace cuda
}  // namespace specdec
