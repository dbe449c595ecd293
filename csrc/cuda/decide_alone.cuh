// The decision where no residual's mass decides: a block a request, which waits for nobody. So it
// is under the rules that stop at their first failure, and under the block rule where drafts are
// deterministic. It draws the last token, too, where it can (draw_at_once.cuh): where no draft's
// law is read one warp decides, while the others find the tile in which the draw falls if it is
// made at their node.
//
// Grid: a block a request, chained to the scan or to the launch that finds cutoffs. Reads and
// numerics: chain_nodes.cuh and draw_at_once.cuh. Included by verify.cu alone.
#pragma once

#include "draw_at_once.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Under the rules that test one token after the other.
template <Reads kReads>
__device__ __forceinline__ Verdict test_at(const VerifyParams& p, const Request& r, int64_t i,
                                           const ChainNode& node) {
  if (!node.known) return {false, 0.0};
  NodeFacts facts{false, true, node.sampled, node.p, node.q, NAN, {false, 0.0}, -1};
  if constexpr (kReads == Reads::kTarget) {
    facts.winner = node.winner;
    return accept_test(p, r, i, node.logit, node.target, facts, node.extra);
  }
  return coin_test(p, r, node.logit, node.target.law, facts, [&] { return node.coin; });
}

// Nodes [base, base + kNodesAtOnce) of a request, a lane a node: what `visit` of core/chain.h does
// one by one. By the clerk's warp, or by every warp for itself.
template <Reads kReads>
__device__ __forceinline__ void pass_nodes(const VerifyParams& p, Request* r, int64_t base,
                                           ChainNodes* nodes, Descent* d) {
  static_assert(kNodesAtOnce == kWarp, "a lane a node");
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const ChainNode& node = (*nodes)[lane];
  const bool over = base + lane > r->drafted || node.ends || !node.usable;
  const Verdict verdict = over ? Verdict{false, 0.0} : test_at<kReads>(p, *r, base + lane, node);
  const int end = lowest_lane(__ballot_sync(kAllLanes, over));
  const bool fails = over || d->decided || !verdict.accepted;
  const int stop = lowest_lane(__ballot_sync(kAllLanes, fails));
  const bool all = d->decided || p.full_accept_probs;
  if (is_in_clerks_warp() && lane < end && (lane <= stop || all)) {
    p.accept_probs[r->b * p.gamma + base + lane] = static_cast<float>(verdict.probability);
  }
  const bool over_there = stop == end;
  const bool from_target = kReads == Reads::kTarget || over_there || r->greedy;
  if (is_clerk() && stop < kWarp) {
    if (!d->decided) draw_at<kReads>((*nodes)[stop], from_target, 1.0, base + stop, r);
    const bool comes_to_end = end < kWarp && (over_there || all);
    if (comes_to_end && lacks_draft_law((*nodes)[end])) r->status |= kNoDraftLaw;
  }
  d->reports = stop;
  d->draws = d->decided || stop == kWarp ? -1 : stop;
  if (stop == kWarp) return;
  d->decided = true;
  d->goes_on = end == kWarp && all;
}

template <Reads kReads>
__device__ __forceinline__ void decide_nodes(const VerifyParams& p, Request* r, int64_t base,
                                             ChainNodes* nodes, Descent* d) {
  if (kReads == Reads::kTokens && p.rule == Rule::kBlock) {
    const double inflow = flow_through<kReads>(*r, base, nodes->data(), d);
    flip_coins<kReads>(p, r, base, nodes, inflow, 0.0, d);
  } else {
    pass_nodes<kReads>(p, r, base, nodes, d);
  }
}

template <Reads kReads>
__global__ void __launch_bounds__(kThreads, kBlocksAt64Registers)
    decide_alone(const __grid_constant__ VerifyParams p, const __grid_constant__ Scratch s) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ ChainNodes nodes;
  __shared__ SharedArray<Descent, 1> told;
  let_next_launch_begin();
  Request& r = request[0];
  open_in_block(p, blockIdx.x, &r);
  clear_outputs(p, r.b, threadIdx.x, kThreads);
  Descent d;
  int64_t base = 0;
  for (;; base += kNodesAtOnce) {
    const int32_t count = clamp_to(r.drafted + 1 - base, 0, kNodesAtOnce);
    open_nodes<kReads>(p, r, base, count, &nodes);
    if (base == 0) wait_for_launch_before();
    find_laws_of<kReads>(p, s, r, base, count, &nodes);
    if constexpr (kReads == Reads::kLaws) {
      pass_nodes<kReads>(p, &r, base, &nodes, &d);
    } else {
      // One warp decides, while the others find out where the draw falls at each node.
      if (is_in_clerks_warp()) {
        decide_nodes<kReads>(p, &r, base, &nodes, &d);
        if (is_clerk()) told[0] = d;
      }
      find_places<kReads>(p, s, r, base, count, &nodes);
      __syncthreads();
      d = told[0];
    }
    if (!d.goes_on) break;
    report_log_probabilities(p, r, base, d.reports, &nodes);
    if (kReads != Reads::kLaws && is_clerk() && d.draws >= 0) {
      nodes.place = nodes[d.draws].place;
    }
    __syncthreads();  // the nodes are overwritten
  }
  if (kReads == Reads::kTokens && p.rule == Rule::kBlock) end_flow(p, r, d);
  constexpr bool kReadsDraftLaws = kReads == Reads::kLaws;
  bool drawn = false;
  if (!kReadsDraftLaws || s.finished) {
    if (kReadsDraftLaws) __syncthreads();  // the clerk has decided
    drawn =
        draw_at_once<kReadsDraftLaws>(p, s, r, d.draws >= 0 ? nodes[d.draws].place : nodes.place);
  }
  report_log_probabilities(p, r, base, d.reports, &nodes);
  if (threadIdx.x >= kThreads - kWarp) close_request<kReads>(p, s, r, drawn);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
