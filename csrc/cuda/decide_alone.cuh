// The decision where the draft is deterministic and laws have no filter: a block a request, which
// asks nobody for a mass.
//
// Grid: a block a request, chained to the scan. Before the scan has ended it reads what the call
// was given, a warp a node: draft token, its logit, coin; and the tile of each draft token once
// more, by the whole block, summed without that token. Then a warp combines a row's tiles, which
// gives the token's probability and, of all other tokens, the residual's mass; every warp goes down
// the chain by itself, because that takes less time than to be told. Nodes are taken 32 at once.
//
// Reads 32 bytes a tile and row, and 2 or 4 bytes an entry of a tile a row. Numerics: core/chain.h;
// a mass is the scan's sums, with that of the tile without its token, in the tree of sum_row.
#pragma once

#include "decide.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Where decide_alone takes the place of decide.
inline bool decides_alone(const VerifyParams& p, const Scratch& s) {
  return s.teams.sums == 0 && reads_draft_law(p.rule);
}

// A node of a request, i draft tokens deep.
struct LoneNode {
  LawRow target;
  int64_t token;  // of the draft, after the node; -1: none
  double coin;    // that tests the token or, in the block rule, the node
  double p;       // of the token
  double others;  // what all other tokens' weights sum to
  Verdict verdict;
  float logit;  // of the token
  bool known;   // the target has the token
  bool usable;  // NodeFacts
  bool ends;    // NodeFacts
};

using LoneNodes = SharedArray<LoneNode, kNodesAtOnce>;
using LoneTiles = SharedArray<TileSummary, kNodesAtOnce>;

// A thread with time left: nodes are the first warps' first.
__device__ __forceinline__ bool is_clerk() { return threadIdx.x == kThreads - kWarp; }

// ---- what the call was given ---

__device__ __forceinline__ void look_at_given(const VerifyParams& p, const Request& r, int64_t i,
                                              LoneNode* node) {
  const bool drafted = i < r.drafted, block_rule = p.rule == Rule::kBlock;
  node->target.row = target_row(p, r.b, i);
  node->known = false;
  node->usable = true;
  node->token = -1;
  if (drafted) {
    const Row& row = node->target.row;
    const Column column = column_at(p, r.b, i);
    node->token = column.token;
    node->usable = r.greedy || proposal_of(column, LawRow{}).usable;
    node->known = row.data != nullptr && column.token < row.vocab;
    if (node->known) node->logit = row_value(row, column.token);
  }
  const bool flips = block_rule ? i > 0 : drafted;
  if (flips && !r.greedy) node->coin = uniform_at(p, r.b, block_rule ? i - 1 : i);
}

// Sums the tiles of the draft tokens without these tokens. Collective over the block.
template <Elements kElements>
__device__ __forceinline__ void sum_besides(const Request& r, int32_t count, LoneNodes* nodes,
                                            LoneTiles* besides) {
  __shared__ WarpSummary of_warp[kNodesAtOnce][kWarps];
  static_assert(kNodesAtOnce <= kWaiting, "they are combined at once");
  const ScanTask task(Row{}, r.target_filters, false, ExtraTask{});
  for (int32_t k = 0; k < count; ++k) {
    const LoneNode& node = (*nodes)[k];
    WarpSum s{-INFINITY, 0.0f};
    if (node.known) {
      const int64_t tile = node.token / kTile;
      RawTile raw;
      float x[kPerThread];
      load_tile<Layout::kStriped, kElements>(node.target.row, tile, &raw);
      widen_tile<Layout::kStriped, kElements>(node.target.row, tile, raw, x);
      exclude<Layout::kStriped>(node.target.row, tile, node.token, x);
      float max = x[0];
#pragma unroll
      for (int j = 1; j < kPerThread; ++j) max = fmaxf(max, x[j]);
      s.max = warp_max_by_key(max);
      s.sum = sum_weights(task, x, s.max);
    }
    if (threadIdx.x % kWarp == 0) of_warp[k][threadIdx.x / kWarp] = summary_of(s);
  }
  write_summaries(
      task, count, [&](int32_t k, int32_t w) { return of_warp[k][w]; }, besides->data());
}

// Nodes [base, base + count) as far as the call says. Collective over the block.
template <Elements kElements>
__device__ __forceinline__ void open_nodes(const VerifyParams& p, const Request& r, int64_t base,
                                           int32_t count, LoneNodes* nodes, LoneTiles* besides) {
  if (threadIdx.x % kWarp == 0) {
    for (int32_t k = threadIdx.x / kWarp; k < count; k += kWarps) {
      look_at_given(p, r, base + k, nodes->data() + k);
    }
  }
  __syncthreads();
  sum_besides<kElements>(r, count, nodes, besides);
}

// ---- what the scan has found ---

// combine_tiles of logits without a filter; `others` is what all tokens but the draft's weigh,
// whose tile is `without` (-1: none) and, without it, `beside`. What takes no tile comes first,
// then a lane's tiles two by two, because each of them takes its time to come. By a full warp.
__device__ __forceinline__ RowLaw combine_lone(const Row& row, const Filters& filters,
                                               const TileSummary* tiles, int32_t without,
                                               const TileSummary& beside, double* others) {
  RowLaw law;
  if (row.data == nullptr) return law;
  const double scale = 1.0 / filters.temperature;
  const float log2_of = log2_scale(scale);
  const int32_t n = static_cast<int32_t>(num_tiles(row.vocab));
  const int32_t lane = static_cast<int32_t>(threadIdx.x % kWarp);
  const auto each_two = [&](const auto& take) {
    for (int32_t t = lane; t < n; t += 2 * kWarp) {
      take(t, tiles[t], tiles[t + kWarp < n ? t + kWarp : t], t + kWarp < n);
    }
  };
  uint32_t valid = 1;
  float max = -INFINITY;
  each_two([&](int32_t, const TileSummary& a, const TileSummary& b, bool) {
    valid &= a.valid & b.valid;
    max = fmaxf(max, fmaxf(a.max, b.max));
  });
  law.max = warp_max_by_key(max);
  law.valid = __all_sync(kAllLanes, valid) && law.max > -INFINITY;
  law.point_mass = law.valid && is_greedy(filters);
  if (!law.valid) return law;
  if (law.point_mass) {
    law.argmax = first_maximum(tiles, n, law.max);
    law.cutoff = law.max;
    law.scale = INFINITY;
    law.z = 1.0;
    return law;
  }
  law.scale = scale;
  const auto mass = [&](const TileSummary& tile) {
    const double weight = exp2_weight((tile.max - law.max) * log2_of);
    return tile.sum > 0.0 ? weight * tile.sum : 0.0;
  };
  double z = 0.0, rest = 0.0;
  each_two([&](int32_t t, const TileSummary& a, const TileSummary& b, bool two) {
    const double of_a = mass(a), of_b = two ? mass(b) : 0.0;
    z = z + of_a + of_b;
    rest = rest + (t != without ? of_a : 0.0) + (t + kWarp != without ? of_b : 0.0);
  });
  if (lane == 0) rest += mass(beside);
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const double other_z = __shfl_xor_sync(kAllLanes, z, lanes);
    const double other_rest = __shfl_xor_sync(kAllLanes, rest, lanes);
    z += other_z;
    rest += other_rest;
  }
  law.z = z;
  law.valid = z > 0.0;
  *others = rest;
  return law;
}

// By a full warp.
__device__ __forceinline__ void find_law(const VerifyParams& p, const Scratch& s, const Request& r,
                                         int64_t i, const TileSummary& beside, LoneNode* node) {
  double others = 0.0;
  const int32_t without = node->known ? static_cast<int32_t>(node->token / kTile) : -1;
  const RowLaw law =
      combine_lone(node->target.row, r.target_filters, s.summaries + (r.b * s.rows + i) * s.tiles,
                   without, beside, &others);
  NodeFacts facts{
      i >= r.drafted || !law.valid, node->usable, false, 0.0, 1.0, NAN, {false, 0.0}, -1};
  if (!facts.ends && node->known) {
    facts.p = law_probability(law, node->logit, node->token);
    if (p.rule != Rule::kBlock) {
      facts.verdict = coin_test(p, r, node->logit, law, facts, [&] { return node->coin; });
    }
  }
  if (threadIdx.x % kWarp != 0) return;
  node->target.law = law;
  node->p = facts.p;
  node->others = others;
  node->verdict = facts.verdict;
  node->ends = facts.ends;
}

// Writes the log-probabilities of the draft tokens after the first `count` nodes from `base` on.
__device__ __forceinline__ void report_log_probabilities(const VerifyParams& p, const Request& r,
                                                         int64_t base, int32_t count,
                                                         LoneNodes* nodes) {
  if (threadIdx.x % kWarp != 0) return;
  for (int32_t k = threadIdx.x / kWarp; k < count; k += kWarps) {
    const LoneNode& node = (*nodes)[k];
    if (!node.known) continue;
    p.logprobs[r.b * (p.gamma + 1) + base + k] =
        static_cast<float>(law_log_probability(node.target.law, node.logit));
  }
}

// ---- the decision ---

// What every thread knows of a request on its way down.
struct Descent {
  bool decided = false;  // stepwise rules; then still on its way to report probabilities
  bool goes_on = true;   // behind these nodes
  double inflow = 1.0;   // block rule: of the next node
  int64_t accepted = 0;  // so far
  int64_t leaf = 0;      // block rule, once it does not go on
};

// By one thread: the last token is drawn at this node.
__device__ __forceinline__ void draw_at(const LoneNode& node, bool from_target, double inflow,
                                        int64_t i, Request* r) {
  r->accepted = i;
  if (from_target) return draw_from_target(r, node.target);
  draw_from_residual(r, node.target, LawRow{}, {node.token, false}, false, inflow);
  r->draw.mass = r->draw.coefficients.target / node.target.law.z * node.others;
}

// pass_nodes of decide.cuh, by every warp for itself; the first one writes, and the clerk.
__device__ __forceinline__ void pass_lone_nodes(const VerifyParams& p, Request* r, int64_t base,
                                                LoneNodes* nodes, Descent* d) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const LoneNode& node = (*nodes)[lane];
  const bool over = base + lane > r->drafted || node.ends || !node.usable;
  const int end = lowest_lane(__ballot_sync(kAllLanes, over));
  const bool fails = over || d->decided || !node.verdict.accepted;
  const int stop = lowest_lane(__ballot_sync(kAllLanes, fails));
  const bool all = d->decided || p.full_accept_probs;
  if (threadIdx.x < kWarp && lane < end && (lane <= stop || all)) {
    p.accept_probs[r->b * p.gamma + base + lane] = static_cast<float>(node.verdict.probability);
  }
  if (is_clerk() && stop < kWarp) {
    const bool over_there = stop == end;
    if (!d->decided) draw_at((*nodes)[stop], over_there || r->greedy, 1.0, base + stop, r);
    const bool comes_to_end = end < kWarp && (over_there || all);
    if (comes_to_end && !(*nodes)[end].usable) r->status |= kNoDraftLaw;
  }
  report_log_probabilities(p, *r, base, stop, nodes);
  if (stop == kWarp) return;
  d->decided = true;
  d->goes_on = end == kWarp && all;
}

// The block rule's way through nodes [base, base + kNodesAtOnce), by every warp for itself.
__device__ __forceinline__ void flow_through_lone(const VerifyParams& p, Request* r, int64_t base,
                                                  LoneNodes* nodes, Descent* d) {
  constexpr int kApart = 8;  // tokens whose probabilities are fetched side by side
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const bool there = base + lane <= r->drafted;
  const double p_of_lane = there ? (*nodes)[lane].p : 0.0;
  const bool over = !there || (*nodes)[lane].ends || !(*nodes)[lane].usable;
  const int end = lowest_lane(__ballot_sync(kAllLanes, over));
  double mine = d->inflow;  // the inflow of the lane's node
  for (int first = 0; first < end; first += kApart) {
    double p_of[kApart];
#pragma unroll
    for (int k = 0; k < kApart; ++k) p_of[k] = __shfl_sync(kAllLanes, p_of_lane, first + k);
#pragma unroll
    for (int k = 0; k < kApart; ++k) {
      const double next = child_inflow(node_with(d->inflow), p_of[k], 1.0, 1.0, false);
      d->inflow = first + k < end ? next : d->inflow;
      mine = lane > first + k ? d->inflow : mine;
    }
  }
  const int dry = lowest_lane(__ballot_sync(kAllLanes, mine == 0.0 && lane <= end));
  const int leaf = dry < end ? dry : end;
  const LoneNode& node = (*nodes)[lane];
  const int64_t i = base + lane;
  bool accepts = i == 0;
  if (i > 0 && lane <= leaf) {
    const double acceptance = lane == leaf ? mine : block_acceptance(mine, false, 0.0, node.p);
    accepts = block_accepts(*r, node.coin, acceptance);
    if (threadIdx.x < kWarp) {
      p.accept_probs[r->b * p.gamma + i - 1] = static_cast<float>(acceptance);
    }
  }
  const unsigned accepting = __ballot_sync(kAllLanes, accepts);
  const int winner = 31 - __clz(static_cast<int>(accepting));
  const double inflow = __shfl_sync(kAllLanes, mine, winner < 0 ? 0 : winner);
  if (winner >= 0) d->accepted = base + winner;
  d->leaf = base + leaf;
  d->goes_on = leaf == kNodesAtOnce;
  if (is_clerk()) {
    if (winner >= 0) draw_at((*nodes)[winner], winner == leaf, inflow, d->accepted, r);
    if (!d->goes_on) {
      const LoneNode& last = (*nodes)[leaf];
      if (!last.ends && !last.usable && d->inflow != 0.0) r->status |= kNoDraftLaw;
    }
  }
  // If it goes on behind these nodes, one of them may be the winner all the same: end_flow.
  report_log_probabilities(p, *r, base, d->goes_on ? leaf : winner, nodes);
}

// Once the leaf is known: where the inflow has run dry nothing is accepted, and what nodes after
// the winner have reported is taken back. Collective over the block.
__device__ __forceinline__ void end_flow(const VerifyParams& p, const Request& r,
                                         const Descent& d) {
  if (d.leaf >= kNodesAtOnce) __syncthreads();  // only then there are such reports
  for (int64_t i = threadIdx.x; i < r.drafted; i += kThreads) {
    const bool taken_back = i >= d.accepted && i < d.leaf;
    if (taken_back && d.leaf >= kNodesAtOnce) p.logprobs[r.b * (p.gamma + 1) + i] = NAN;
    if (i >= d.leaf && d.inflow == 0.0) p.accept_probs[r.b * p.gamma + i] = 0.0f;
  }
}

// The rest of a decision, by the clerk's warp alone: nobody waits for those who still report.
__device__ __forceinline__ void close_lone(const VerifyParams& p, const Scratch& s,
                                           const Request& r) {
  constexpr int kWords = static_cast<int>(sizeof(Request) / sizeof(uint64_t));
  static_assert(sizeof(Request) % sizeof(uint64_t) == 0, "words");
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  __syncwarp();  // the clerk has written
  const auto* from = reinterpret_cast<const uint64_t*>(&r);
  auto* to = reinterpret_cast<uint64_t*>(&s.requests[r.b]);
#pragma unroll
  for (int i = lane; i < kWords; i += kWarp) to[i] = from[i];
  write_accepted(p, r, lane, kWarp);
  if (lane != 0) return;
  DrawTask task = r.draw;
  if (knows_token(&task)) write_extra_token(p, r.b, r.accepted, task);
}

// Asks for the tiles that sum_besides reads, a warp a token.
__device__ __forceinline__ void prefetch_tiles_of_tokens(const VerifyParams& p, const Request& r) {
  constexpr int32_t kLines = kTile * 4 / 128 / kWarp + 1;  // of a lane
  for (int64_t i = threadIdx.x / kWarp; i < r.drafted; i += kWarps) {
    const int64_t tile = load_id(p.draft_tokens, r.b, i) / kTile;
    prefetch_tiles(target_row(p, r.b, i), {tile, tile + 1}, threadIdx.x % kWarp, kWarp, kLines);
  }
}

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt64Registers)
    decide_alone(const __grid_constant__ VerifyParams p, const __grid_constant__ Scratch s) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ LoneNodes nodes;
  __shared__ LoneTiles besides;
  let_next_launch_begin();
  Request& r = request[0];
  open_in_block(p, blockIdx.x, &r);
  clear_outputs(p, r.b, threadIdx.x, kThreads);
  prefetch_tiles_of_tokens(p, r);
  Descent d;
  for (int64_t base = 0; d.goes_on; base += kNodesAtOnce) {
    const int32_t count = clamp_to(r.drafted + 1 - base, 0, kNodesAtOnce);
    open_nodes<kElements>(p, r, base, count, &nodes, &besides);
    if (base == 0) wait_for_launch_before();
    for (int32_t k = threadIdx.x / kWarp; k < count; k += kWarps) {
      find_law(p, s, r, base + k, besides[k], nodes.data() + k);
    }
    __syncthreads();
    if (p.rule == Rule::kBlock) {
      flow_through_lone(p, &r, base, &nodes, &d);
    } else {
      pass_lone_nodes(p, &r, base, &nodes, &d);
    }
    if (d.goes_on) __syncthreads();  // the nodes are overwritten
  }
  if (p.rule == Rule::kBlock) end_flow(p, r, d);
  if (threadIdx.x >= kThreads - kWarp) close_lone(p, s, r);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
