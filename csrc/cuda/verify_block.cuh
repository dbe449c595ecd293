// The decision of the block rule (Sun et al., arXiv 2403.10444): the recursion of core/recursion.h
// on a chain, in two launches.
//
// block_masses, grid (request, node, split): the inflow of a node, and the mass of its residual
// where it is asked for (both rows again). decide_block, grid (request, split): the nodes' coins, a
// warp a node, then the share of the final residual's mass.
#pragma once

#include "chain.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

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

__global__ void __launch_bounds__(kThreads)
    block_masses(const VerifyParams p, const Scratch s, int64_t splits) {
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
    look_at_nodes(p, r, laws, base, node, facts);
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

// The residual mass of a node that asks for it; by a full warp.
__device__ double node_mass(const VerifyParams& p, const Scratch& s, int64_t b, int64_t i) {
  return sum_tiles(s.node_masses + (b * (p.gamma + 1) + i) * s.tiles, num_tiles(p.target.vocab));
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
      const double mass = needs_mass(i, node.inflow, sampled) ? node_mass(p, s, r.b, i) : 0.0;
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

__global__ void __launch_bounds__(kThreads)
    decide_block(const VerifyParams p, const Scratch s, int64_t splits) {
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
  const NodeState* nodes = s.nodes + r.b * (p.gamma + 1);
  const NodeState& node = nodes[winner];
  // The rejected token was part of the sum, but has no residual: its inflow came out below 1.
  const bool has_mass = winner < leaf && needs_mass(winner, node.inflow, node.facts.sampled);
  const double mass = has_mass ? node_mass(p, s, r.b, winner) : -1.0;
  if (threadIdx.x == 0) {
    const LawRow target = target_law_row(p, r, laws, winner);
    r.accepted = winner;
    r.status |= nodes[leaf].status;
    if (winner == leaf) {
      draw_from_target(&r, target);
    } else {
      draw_from_residual(&r, target, draft_law_row(p, r, laws, winner), column_at(p, r.b, winner),
                         node.facts.sampled, node.inflow);
      r.draw.mass = mass;
    }
  }
  __syncthreads();
  if (report) report_block(p, s, r, leaf);
  close_decision(p, s, &r, unit.split, splits);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
