// The decision where no residual's mass decides: a block a request, which waits for nobody. So it
// is under the rules that stop at their first failure, and under the block rule where drafts are
// deterministic.
//
// Grid: a block a request, chained to the scan or to the launch that finds cutoffs. Before that has
// ended it reads what the call was given, a warp a node: draft token, its logits, coin. Then a warp
// finds a row's law, which gives the token's probability; every warp goes down the chain by itself,
// because that takes less time than to be told. Nodes are taken 32 at once. kLaws: there are laws
// of the draft.
//
// Reads 32 bytes a tile and row, or a row's law where cutoffs were found. Numerics: core/chain.h.
#pragma once

#include "decide.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// A node of a request, i draft tokens deep.
struct LoneNode {
  LawRow target;
  LawRow draft;   // of a sampled token
  int64_t token;  // of the draft, after the node; -1: none
  int64_t entry;  // the token's in the draft's row; -1: none
  double coin;    // that tests the token or, in the block rule, the node
  double p;       // of the token
  double q;
  float logit;  // of the token
  float draft_logit;
  bool known;    // the target has the token
  bool sampled;  // NodeFacts; until laws are known, whether the draft's is asked for
  bool usable;   // NodeFacts
  bool ends;     // NodeFacts
};

using LoneNodes = SharedArray<LoneNode, kNodesAtOnce>;

// Whether nothing but the want of the draft's law ends the way down at a node. Where the target's
// is missing as well, that one is reported.
__device__ __forceinline__ bool lacks_draft_law(const LoneNode& node) {
  return !node.ends && !node.usable;
}

// A thread with time left: nodes are the first warps' first.
__device__ __forceinline__ bool is_clerk() { return threadIdx.x == kThreads - kWarp; }

// ---- what the call was given ---

template <bool kLaws>
__device__ __forceinline__ void look_at_given(const VerifyParams& p, const Request& r, int64_t i,
                                              LoneNode* node) {
  const bool drafted = i < r.drafted, block_rule = p.rule == Rule::kBlock;
  node->target.row = target_row(p, r.b, i);
  node->known = node->sampled = false;
  node->usable = true;
  node->token = node->entry = -1;
  node->q = 1.0;
  if (drafted) {
    const Row& row = node->target.row;
    const Column column = column_at(p, r.b, i);
    node->token = column.token;
    node->known = row.data != nullptr && column.token < row.vocab;
    if (node->known) node->logit = row_value(row, column.token);
    if constexpr (kLaws) {
      node->sampled = wants_draft_row(p, r, i);
      if (node->sampled) node->draft.row = draft_row(p, r.b, i);
      const Row& other = node->draft.row;
      if (node->sampled && other.data != nullptr) node->entry = entry_of_token(other, node->token);
      if (node->entry >= 0) node->draft_logit = row_value(other, node->entry);
    } else {
      node->usable = r.greedy || proposal_of(column, LawRow{}).usable;
    }
  }
  const bool flips = block_rule ? i > 0 : drafted;
  if (flips && !r.greedy) node->coin = uniform_at(p, r.b, block_rule ? i - 1 : i);
}

// Nodes [base, base + count) as far as the call says. Collective over the block.
template <bool kLaws>
__device__ __forceinline__ void open_nodes(const VerifyParams& p, const Request& r, int64_t base,
                                           int32_t count, LoneNodes* nodes) {
  if (threadIdx.x % kWarp == 0) {
    for (int32_t k = threadIdx.x / kWarp; k < count; k += kWarps) {
      look_at_given<kLaws>(p, r, base + k, nodes->data() + k);
    }
  }
  __syncthreads();
}

// ---- what earlier launches have found ---

// The law of a row. By a full warp.
__device__ __forceinline__ RowLaw find_law(const Scratch& s, const Row& row, int64_t slot,
                                           const Filters& filters) {
  if (s.finished) return s.laws[slot];
  double unused = 0.0;
  return combine_tiles(row, filters, false, ExtraTask{}, s.summaries + slot * s.tiles, &unused);
}

// What the target's law says of a node. By a full warp.
__device__ __forceinline__ void find_target(const Scratch& s, const Request& r, int64_t i,
                                            LoneNode* node) {
  const RowLaw law = find_law(s, node->target.row, r.b * s.rows + i, r.target_filters);
  const bool ends = i >= r.drafted || !law.valid;
  const bool tells = !ends && node->known;
  const double probability = tells ? law_probability(law, node->logit, node->token) : 0.0;
  if (threadIdx.x % kWarp != 0) return;
  node->target.law = law;
  node->p = probability;
  node->ends = ends;
}

// What the draft's law says of a node: proposal_of. By a full warp.
__device__ __forceinline__ void find_draft(const VerifyParams& p, const Scratch& s,
                                           const Request& r, int64_t i, LoneNode* node) {
  if (!node->sampled) return;
  const int64_t slot = r.b * s.rows + p.gamma + 1 + i;
  const RowLaw law = find_law(s, node->draft.row, slot, r.draft_filters);
  const bool tells = law.valid && node->entry >= 0;
  const double q = tells ? law_probability(law, node->draft_logit, node->entry) : 0.0;
  __syncwarp();  // all lanes have read whether it is sampled
  if (threadIdx.x % kWarp != 0) return;
  node->draft.law = law;
  node->q = q;
  node->usable = q > 0.0;
  node->sampled = !tells || !law.point_mass;
}

// What the laws say of nodes [base, base + count), a warp a row. Collective over the block, whose
// threads meet at the end.
template <bool kLaws>
__device__ __forceinline__ void find_laws_of(const VerifyParams& p, const Scratch& s,
                                             const Request& r, int64_t base, int32_t count,
                                             LoneNodes* nodes) {
  const int32_t rows = kLaws ? 2 * count : count;
  for (int32_t k = threadIdx.x / kWarp; k < rows; k += kWarps) {
    if (k < count) {
      find_target(s, r, base + k, nodes->data() + k);
    } else {
      find_draft(p, s, r, base + k - count, nodes->data() + k - count);
    }
  }
  __syncthreads();
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

// Under the rules that test one token after the other.
__device__ __forceinline__ Verdict test_at(const VerifyParams& p, const Request& r,
                                           const LoneNode& node) {
  if (!node.known) return {false, 0.0};
  const NodeFacts facts{false, true, node.sampled, node.p, node.q, NAN, {false, 0.0}, -1};
  return coin_test(p, r, node.logit, node.target.law, facts, [&] { return node.coin; });
}

// By one thread: the last token is drawn at this node.
__device__ __forceinline__ void draw_at(const LoneNode& node, bool from_target, double inflow,
                                        int64_t i, Request* r) {
  r->accepted = i;
  if (from_target) return draw_from_target(r, node.target);
  const LawRow draft = node.sampled ? node.draft : LawRow{};
  draw_from_residual(r, node.target, draft, {node.token, node.sampled}, node.sampled, inflow);
}

// pass_nodes of decide.cuh, by every warp for itself; the first one writes, and the clerk.
__device__ __forceinline__ void pass_lone_nodes(const VerifyParams& p, Request* r, int64_t base,
                                                LoneNodes* nodes, Descent* d) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const LoneNode& node = (*nodes)[lane];
  const bool over = base + lane > r->drafted || node.ends || !node.usable;
  const Verdict verdict = over ? Verdict{false, 0.0} : test_at(p, *r, node);
  const int end = lowest_lane(__ballot_sync(kAllLanes, over));
  const bool fails = over || d->decided || !verdict.accepted;
  const int stop = lowest_lane(__ballot_sync(kAllLanes, fails));
  const bool all = d->decided || p.full_accept_probs;
  if (threadIdx.x < kWarp && lane < end && (lane <= stop || all)) {
    p.accept_probs[r->b * p.gamma + base + lane] = static_cast<float>(verdict.probability);
  }
  const bool over_there = stop == end;
  const bool from_target = over_there || r->greedy;
  if (is_clerk() && stop < kWarp) {
    if (!d->decided) draw_at((*nodes)[stop], from_target, 1.0, base + stop, r);
    const bool comes_to_end = end < kWarp && (over_there || all);
    if (comes_to_end && lacks_draft_law((*nodes)[end])) r->status |= kNoDraftLaw;
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
  if (winner >= 0) {
    d->accepted = base + winner;
  }
  d->leaf = base + leaf;
  d->goes_on = leaf == kNodesAtOnce;
  if (is_clerk()) {
    if (winner >= 0) draw_at((*nodes)[winner], winner == leaf, inflow, d->accepted, r);
    const bool starves = !d->goes_on && d->inflow != 0.0 && lacks_draft_law((*nodes)[leaf]);
    if (starves) r->status |= kNoDraftLaw;
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

template <bool kLaws>
__global__ void __launch_bounds__(kThreads, kBlocksAt64Registers)
    decide_alone(const __grid_constant__ VerifyParams p, const __grid_constant__ Scratch s) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ LoneNodes nodes;
  let_next_launch_begin();
  Request& r = request[0];
  open_in_block(p, blockIdx.x, &r);
  clear_outputs(p, r.b, threadIdx.x, kThreads);
  Descent d;
  for (int64_t base = 0; d.goes_on; base += kNodesAtOnce) {
    const int32_t count = clamp_to(r.drafted + 1 - base, 0, kNodesAtOnce);
    open_nodes<kLaws>(p, r, base, count, &nodes);
    if (base == 0) wait_for_launch_before();
    find_laws_of<kLaws>(p, s, r, base, count, &nodes);
    if (!kLaws && p.rule == Rule::kBlock) {
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
