// The decision: how many draft tokens a request accepts, and what its last token is drawn from.
//
// Grid: any number of blocks, which take work from a queue (work_queue.cuh). One block opens a
// request: it finds the rows' laws, looks at up to 32 nodes side by side and goes down the chain.
// Under the rules that stop at their first failure that is the decision. The block rule (Sun et
// al., arXiv 2403.10444; core/recursion.h) then knows every inflow and asks for the masses of the
// residuals that its coins depend on; the block that adds the last of them flips the coins. A
// residual that the last token is drawn from is asked for its mass too, where it is not known yet.
//
// Reads 32 bytes a tile and row; both rows of each residual once, in pieces that any blocks take.
// Deterministic drafts and laws without a filter have a kernel of their own (decide_alone.cuh).
#pragma once

#include "chain.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// ---- stepwise rules ---

// The lowest lane in a ballot, kWarp if there is none.
__device__ int lowest_lane(unsigned ballot) { return ballot != 0 ? __ffs(ballot) - 1 : kWarp; }

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
    if (!*decided) {
      stop_at(p, r, i, facts[stop], target_law_row(p, s, *r, i), draft_law_row(p, s, *r, i));
    }
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
__device__ bool flow_through(Decision* d, const NodeFacts* facts, int64_t base, double* inflow,
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

// Which masses are asked for. A node with an inflow of 1 accepts for certain, so the deepest of
// them is the only one whose residual may be drawn from. Collective over a full warp.
__device__ void count_masses(Decision* d, NodeState* nodes) {
  int32_t certain = -1, count = 0;
  for (int32_t i = threadIdx.x; i < d->leaf; i += kWarp) {
    if (nodes[i].inflow >= 1.0) certain = i;
  }
  certain = warp_max(certain);
  for (int32_t i = threadIdx.x; i < d->leaf; i += kWarp) {
    if (i == certain) nodes[i].summed = nodes[i].sampled;
    count += nodes[i].summed;
  }
  count = warp_sum(count);
  if (threadIdx.x == 0) d->unfinished = count;
}

__device__ void flow_down(const VerifyParams& p, const Scratch& s, Decision* d, NodeFacts* facts) {
  __shared__ bool done;
  const Request& r = d->request;
  NodeState* nodes = s.nodes + r.b * (p.gamma + 1);
  double inflow = 1.0;
  for (int64_t base = 0; base <= r.drafted; base += kNodesAtOnce) {
    look_at_nodes(p, s, r, base, facts);
    if (threadIdx.x == 0) {
      done = flow_through(d, facts, base, &inflow, nodes);
    }
    __syncthreads();
    if (done) break;
  }
  if (threadIdx.x < kWarp) count_masses(d, nodes);
  __syncthreads();
}

// `publish`, of the works of the lanes that ask, in their order. Collective over a full warp.
__device__ void publish_by_warp(const WorkQueue& queue, const Work& work, bool asks) {
  const unsigned asking = __ballot_sync(kAllLanes, asks);
  const unsigned lane = threadIdx.x % kWarp;
  WorkWord place = 0;
  if (lane == 0) place = atomicAdd(queue.published, static_cast<WorkWord>(__popc(asking)));
  place = __shfl_sync(kAllLanes, place, 0) + __popc(asking & ((1u << lane) - 1));
  if (!asks) return;
  __threadfence();
  atomicExch(queue.words + place, packed(work));
}

// Asks for the masses. From here on the decision is in other blocks' hands, unless there are more
// nodes than lanes. Collective over a full warp.
__device__ void publish_masses(const VerifyParams& p, const Scratch& s, const Decision& d) {
  const int64_t b = d.request.b, leaf = d.leaf;
  const NodeState* nodes = s.nodes + b * (p.gamma + 1);
  for (int64_t base = 0; base < leaf; base += kWarp) {
    const int64_t i = base + threadIdx.x;
    publish_by_warp(s.queue, {b, i, Sum::kMass}, i < leaf && nodes[i].summed);
  }
}

// Takes a mass in, by one thread. Whether it was the last one: then the others are seen.
__device__ bool take_node_mass(const VerifyParams& p, const Scratch& s, const Work& work,
                               double mass) {
  s.nodes[work.request * (p.gamma + 1) + work.node].mass = mass;
  __threadfence();
  const bool last = atomicAdd(&s.decisions[work.request].unfinished, -1) == 1;
  __threadfence();
  return last;
}

// Flips the coins of nodes 1 .. leaf; gives the deepest node that accepts. Collective over the
// block.
__device__ int64_t flip_coins(const VerifyParams& p, const Decision& d, const NodeState* nodes) {
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
                                                       Decision* d) {
  Request& r = d->request;
  const NodeState* nodes = s.nodes + r.b * (p.gamma + 1);
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
      // The rejected token was part of the sum, but has no residual: its inflow came out below 1.
      if (node.summed) r.draw.mass = node.mass;
    }
  }
  __syncthreads();
}

// ---- masses ---

// What a piece of work adds up.
__device__ DrawTask residual_of(const VerifyParams& p, const Scratch& s, const Work& work) {
  const Request& r = s.decisions[work.request].request;
  if (work.sum == Sum::kFinalMass) return r.draw;
  return block_residual(s.nodes[work.request * (p.gamma + 1) + work.node].inflow,
                        target_law_row(p, s, r, work.node), draft_law_row(p, s, r, work.node));
}

// Adds up a piece of a mass. True in every thread of the block that did the last one, with *mass
// set in the first warp.
template <Elements kElements>
__device__ bool add_piece(const VerifyParams& p, const Scratch& s, const Ticket& ticket,
                          double* mass) {
  const Work& work = ticket.work;
  const int64_t place = s.queue.sums == 1 ? 0 : work.node;
  return add_mass<kElements, false>([&] { return residual_of(p, s, work); },
                                    s.masses + (work.request * s.queue.sums + place) * s.tiles,
                                    s.counters + work.request * s.rows + place, ticket.piece,
                                    s.queue.splits, mass);
}

__device__ bool lacks_mass(const DrawTask& task) {
  return needs_draw(task) && task.residual && task.mass < 0.0;
}

// ---- the end of a decision ---

// Writes the outputs that are known, and asks for the final residual's mass. `d` is shared and
// complete. Collective over the block.
__device__ __attribute__((noinline)) void close_decision(const VerifyParams& p, const Scratch& s,
                                                         Decision* d) {
  Request& r = d->request;
  write_accepted(p, r, threadIdx.x, kThreads);
  if (threadIdx.x == 0 && knows_token(&r.draw)) write_extra_token(p, r.b, r.accepted, r.draw);
  copy_by_block(&s.decisions[r.b], *d);
  if (threadIdx.x != 0) return;
  if (lacks_mass(r.draw)) {
    publish(s.queue, {r.b, r.accepted, Sum::kFinalMass});
  } else {
    atomicAdd(s.queue.closed, WorkWord{1});
  }
}

// Opens a request; what earlier launches found is needed from the laws on. Whether all is there for
// its end; else others go on with it. Collective over the block.
__device__ __attribute__((noinline)) bool open_chain(const VerifyParams& p, const Scratch& s,
                                                     int64_t b, Decision* d) {
  __shared__ NodeFacts facts[kNodesAtOnce];
  open_in_block(p, b, &d->request);
  clear_outputs(p, b, threadIdx.x, kThreads);
  wait_for_launch_before();
  find_laws(p, s, d->request);
  __syncthreads();  // before accept_probs are written
  if (p.rule != Rule::kBlock) {
    walk_down(p, s, &d->request, facts);
    return true;
  }
  flow_down(p, s, d, facts);
  if (d->unfinished > 0) {
    copy_by_block(&s.decisions[b], *d);
    if (threadIdx.x < kWarp) publish_masses(p, s, *d);
    return false;
  }
  settle_block(p, s, d);
  return true;
}

// Does a ticket's work. Whether all is there for the end of its request. Collective over the block.
template <Elements kElements>
__device__ bool do_work(const VerifyParams& p, const Scratch& s, const Ticket& ticket,
                        Decision* d) {
  __shared__ bool last;
  const Work& work = ticket.work;
  if (work.sum == Sum::kNone) return open_chain(p, s, work.request, d);
  double mass = 0.0;
  if (!add_piece<kElements>(p, s, ticket, &mass)) return false;
  if (work.sum == Sum::kFinalMass) {
    if (threadIdx.x == 0) {
      s.decisions[work.request].request.draw.mass = mass;
      atomicAdd(s.queue.closed, WorkWord{1});
    }
    return false;
  }
  if (threadIdx.x == 0) last = take_node_mass(p, s, work, mass);
  __syncthreads();
  if (!last) return false;
  copy_by_block(d, s.decisions[work.request]);
  settle_block(p, s, d);
  return true;
}

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    decide(const __grid_constant__ VerifyParams p, const __grid_constant__ Scratch s) {
  __shared__ SharedArray<Decision, 1> decision;
  let_next_launch_begin();
  Ticket ticket{true, {blockIdx.x, 0, Sum::kNone}, 0};
  if (s.queue.sums > 0) {
    wait_for_launch_before();  // the queue is empty
    ticket = take_ticket(s.queue);
  }
  while (ticket.given) {
    if (do_work<kElements>(p, s, ticket, decision.data())) {
      close_decision(p, s, decision.data());
    }
    if (s.queue.sums == 0) return;  // a block a request
    ticket = take_ticket(s.queue);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
