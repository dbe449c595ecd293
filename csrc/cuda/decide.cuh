// The decision: how many draft tokens a request accepts, and what its last token is drawn from.
//
// Grid: teams of blocks (team.cuh), or a block a request where no mass is asked for. A block finds
// the rows' laws, looks at up to 32 nodes side by side and goes down the chain. Under the rules
// that stop at their first failure that is the decision. The block rule (Sun et al., arXiv
// 2403.10444; core/recursion.h) then knows every inflow, asks for the masses of the residuals that
// its coins depend on, and flips the coins when they are there.
//
// Reads 32 bytes a tile and row; both rows of each residual once, in pieces that the team shares.
// Where no mass decides and a draft's law is read there is another kernel (decide_alone.cuh).
#pragma once

#include "chain.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// ---- stepwise rules ---

// The lowest lane in a ballot, kWarp if there is none.
__device__ int lowest_lane(unsigned ballot) { return ballot != 0 ? __ffs(ballot) - 1 : kWarp; }

// stop_at of core/chain.h. With rows of a draft's law the rules that read it do not come here.
__device__ __forceinline__ void stop_here(const VerifyParams& p, const Scratch& s, Request* r,
                                          int64_t i, const NodeFacts& facts) {
  const LawRow target = target_law_row(p, s, *r, i);
  if constexpr (kLists) {
    stop_at(p, r, i, facts, target, draft_law_row(p, s, *r, i));
  } else {
    r->accepted = i;
    finish_with_target(r, target, facts);
  }
}

// Nodes [base, base + kNodesAtOnce) of a request, a lane a node: what `visit` of core/chain.h does
// one by one. Whether the request goes on behind them. Collective over a full warp.
__device__ bool pass_nodes(const VerifyParams& p, const Scratch& s, Request* r, int64_t base,
                           const NodeFacts* facts, bool* decided) {
  static_assert(kNodesAtOnce == kWarp, "a lane a node");
  const int lane = static_cast<int>(threadIdx.x);
  const NodeFacts& node = facts[lane];
  const bool over = base + lane > r->drafted || is_over(node);
  const int end = lowest_lane(__ballot_sync(kAllLanes, over));
  const bool fails = over || *decided || !node.verdict.accepted;
  const int stop = lowest_lane(__ballot_sync(kAllLanes, fails));
  const bool all = *decided || p.full_accept_probs;
  if (lane < end && (lane <= stop || all)) report_probability(p, *r, base + lane, node);
  if (lane < stop) report_accepted(p, *r, base + lane, node);
  if (stop == kWarp) return true;
  if (lane == 0) {
    const int64_t i = base + stop;
    if (!*decided) stop_here(p, s, r, i, facts[stop]);
    const bool comes_to_end = end < kWarp && (end == stop || all);
    if (comes_to_end && !facts[end].usable) r->status |= kNoDraftLaw;
  }
  *decided = true;
  return end == kWarp && all;
}

__device__ __attribute__((noinline)) void walk_down(const VerifyParams& p, const Scratch& s,
                                                    Request* r, NodeFacts* facts) {
  __shared__ bool goes_on;
  bool decided = false;  // known to the first warp
  for (int64_t base = 0; base <= r->drafted; base += kNodesAtOnce) {
    look_at_nodes(p, s, *r, base, facts);
    if (threadIdx.x < kWarp) {
      const bool more = pass_nodes(p, s, r, base, facts, &decided);
      if (threadIdx.x == 0) goes_on = more;
    }
    __syncthreads();
    if (!goes_on) break;
  }
}

// ---- block rule ---

// Inflows of up to kNodesAtOnce nodes, by one thread. Whether the leaf is among them.
__device__ bool flow_through(ChainLedger* d, const NodeFacts* facts, int64_t base, double* inflow,
                             NodeState* nodes) {
  for (int64_t i = base; i < base + kNodesAtOnce; ++i) {
    const NodeFacts& fact = facts[i - base];
    const BlockStep step = block_step(&d->request, *inflow, fact);
    const bool summed = !step.leaf && needs_mass(i, *inflow, step.sampled);
    nodes[i] = {*inflow, fact.p, 0.0, fact.log_p, step.sampled, summed};
    if (step.leaf) {
      d->leaf = static_cast<int32_t>(i);
      return true;
    }
    *inflow = step.outgoing;
  }
  return false;
}

__device__ void flow_down(const VerifyParams& p, const Scratch& s, ChainLedger* d, NodeState* nodes,
                          NodeFacts* facts) {
  __shared__ bool done;
  const Request& r = d->request;
  double inflow = 1.0;
  for (int64_t base = 0; base <= r.drafted; base += kNodesAtOnce) {
    look_at_nodes(p, s, r, base, facts);
    if (threadIdx.x == 0) {
      done = flow_through(d, facts, base, &inflow, nodes);
    }
    __syncthreads();
    if (done) break;
  }
}

// Flips the coins of nodes 1 .. leaf; gives the deepest node that accepts. Collective over the
// block.
__device__ int64_t flip_coins(const VerifyParams& p, const ChainLedger& d, const NodeState* nodes) {
  __shared__ int32_t winner;
  const Request& r = d.request;
  if (threadIdx.x == 0) winner = 0;
  __syncthreads();
  for (int64_t i = 1 + threadIdx.x; i <= d.leaf; i += kThreads) {
    const NodeState& node = nodes[i];
    const double acceptance =
        i == d.leaf ? node.inflow : block_acceptance(node.inflow, node.sampled, node.mass, node.p);
    p.accept_probs[r.b * p.gamma + i - 1] = static_cast<float>(acceptance);
    if (block_accepts(p, r, i, acceptance)) atomicMax(&winner, static_cast<int32_t>(i));
  }
  __syncthreads();
  return winner;
}

// Decides once all masses are there. Collective over the block.
__device__ __attribute__((noinline)) void settle_block(const VerifyParams& p, const Scratch& s,
                                                       ChainLedger* d, const NodeState* nodes) {
  Request& r = d->request;
  const int64_t winner = flip_coins(p, *d, nodes);
  for (int64_t i = threadIdx.x; i < r.drafted; i += kThreads) {
    if (i < winner) p.logprobs[r.b * (p.gamma + 1) + i] = nodes[i].log_p;
    if (i >= d->leaf && nodes[d->leaf].inflow == 0.0) p.accept_probs[r.b * p.gamma + i] = 0.0f;
  }
  if (threadIdx.x == 0) {
    const LawRow target = target_law_row(p, s, r, winner);
    r.accepted = winner;
    if (winner == d->leaf) {
      draw_from_target(&r, target);
    } else {
      const NodeState& node = nodes[winner];
      draw_from_residual(&r, target, draft_law_row(p, s, r, winner), column_at(p, r.b, winner),
                         node.sampled, node.inflow);
    }
  }
  __syncthreads();
}

// ---- each block of a team ---

// For team.cuh. All functions are collective over the block; all blocks of a team write the same.
class ChainWalk {
 public:
  // `ledger` is in shared memory.
  __device__ ChainWalk(const VerifyParams& p, const Scratch& s, int64_t b, ChainLedger* ledger)
      : p_(p), s_(s), b_(b), ledger_(*ledger), nodes_(nodes_of(p, s, ledger)) {}

  // What earlier launches found is needed from the laws on, and that nobody has taken a piece.
  template <typename Act>
  __device__ __forceinline__ void begin(const Act& act) {
    Request& r = ledger_.request;
    open_in_block(p_, b_, &r);
    clear_outputs(p_, b_, threadIdx.x, kThreads);
    wait_for_launch_before();
    find_laws(p_, s_, r);
    act();
    __syncthreads();  // before accept_probs are written
  }

  __device__ __forceinline__ int32_t next(const double* masses, bool first) {
    if (first) return decide();
    const int32_t k = static_cast<int32_t>(threadIdx.x), sums = ledger_.sums;
    const int32_t last = ledger_.nodes[sums - 1];
    if (k < sums) nodes_[ledger_.nodes[k]].mass = masses[k];
    __syncthreads();
    return ask(last + 1);
  }

  __device__ int64_t tiles(int32_t) const { return num_tiles(p_.target.vocab); }

  __device__ const DrawTask& task(int32_t k) {
    const Request& r = ledger_.request;
    const int64_t i = ledger_.nodes[k];
    if (threadIdx.x == 0) {
      ledger_.task = block_residual(nodes_[i].inflow, target_law_row(p_, s_, r, i),
                                    draft_law_row(p_, s_, r, i));
    }
    __syncthreads();
    return ledger_.task;
  }

 private:
  __device__ static NodeState* nodes_of(const VerifyParams& p, const Scratch& s,
                                        ChainLedger* ledger) {
    return p.gamma < kStatesInShared ? ledger->states : s.nodes + blockIdx.x * (p.gamma + 1);
  }

  __device__ __forceinline__ int32_t decide() {
    __shared__ NodeFacts facts[kNodesAtOnce];
    if (p_.rule != Rule::kBlock) {
      walk_down(p_, s_, &ledger_.request, facts);
      return end();
    }
    flow_down(p_, s_, &ledger_, nodes_, facts);
    return ask(0);
  }

  // Asks for the masses of nodes from `first` on, as many as a round takes. If there are none, all
  // is there for the decision.
  __device__ int32_t ask(int32_t first) {
    if (threadIdx.x < kWarp) {
      list_sums(
          first, ledger_.leaf, [&](int32_t i) { return nodes_[i].summed; }, ledger_.nodes,
          &ledger_.sums);
    }
    __syncthreads();
    if (ledger_.sums > 0) return ledger_.sums;
    settle_block(p_, s_, &ledger_, nodes_);
    return end();
  }

  // Writes the outputs that are known, and hands the request to the draw.
  __device__ int32_t end() {
    Request& r = ledger_.request;
    write_accepted(p_, r, threadIdx.x, kThreads);
    if (threadIdx.x == 0) {
      if (knows_token(&r.draw)) write_extra_token(p_, b_, r.accepted, r.draw);
    }
    __syncthreads();
    copy_by_block(&s_.requests[b_], ledger_.request);
    return 0;
  }

  const VerifyParams& p_;
  const Scratch& s_;
  int64_t b_;
  ChainLedger& ledger_;
  NodeState* nodes_;
};

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    decide(const __grid_constant__ VerifyParams p, const __grid_constant__ Scratch s) {
  __shared__ SharedArray<ChainLedger, 1> ledger;
  let_next_launch_begin();
  for_each_request(p.batch, [&](int64_t b, int32_t members) {
    ChainWalk walk(p, s, b, ledger.data());
    work_in_team<kElements, false>(s.teams, b, members, &walk);
  });
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
