// The decision of the block rule (Sun et al., arXiv 2403.10444; core/recursion.h) where drafts are
// sampled: the masses of residuals decide.
//
// Grid: some blocks a request. Every inflow follows from the probabilities of the draft's tokens,
// so each block finds by itself which masses are asked for, and sums its share of their tiles; the
// last block to arrive adds them up and flips the coins. Nobody waits for anybody. That block finds
// the masses by itself where the target's filters have left a shortlist, and draws the last token.
//
// Reads what chain_nodes.cuh says, in every block; both rows of each residual that is asked for
// once, or what shortlist.cuh says. Writes 8 bytes a tile and mass. Included by verify.cu alone.
#pragma once

#include "draw_at_once.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Nodes [base, base + kNodesAtOnce) of a request, and its way through them: gives the inflow of the
// lane's node. A call, so that a kernel has this code once. Collective over the block.
__device__ __attribute__((noinline)) double come_to(const VerifyParams& p, const Scratch& s,
                                                    const Request& r, int64_t base,
                                                    ChainNodes* nodes, Descent* d) {
  const int32_t count = clamp_to(r.drafted + 1 - base, 0, kNodesAtOnce);
  if (base > 0) __syncthreads();  // nodes are overwritten
  open_nodes<Reads::kLaws>(p, r, base, count, nodes);
  wait_for_launch_before();
  find_laws_of<Reads::kLaws>(p, s, r, base, count, nodes);
  return flow_through<Reads::kLaws>(r, base, nodes->data(), d);
}

// The nodes whose masses are asked for, a bit each: of those whose target has a shortlist, and of
// the others.
struct AskingNodes {
  unsigned listed, others;
};

// By every warp for itself.
__device__ __forceinline__ AskingNodes asking_nodes(const Scratch& s, const Request& r,
                                                    const ChainNode* nodes, int64_t base,
                                                    double inflow, const Descent& d) {
  const int64_t i = base + threadIdx.x % kWarp;
  const bool asks = i < d.leaf && needs_mass(i, inflow, nodes[i - base].sampled);
  const bool listed = asks && s.finished && s.shortlists[r.b * s.rows + i].count > 0;
  return {__ballot_sync(kAllLanes, listed), __ballot_sync(kAllLanes, asks && !listed)};
}

// Sums this block's share of the tiles of all masses that are asked for: masses[k * s.tiles + t] of
// tile t in the k-th of them. `inflow` is of the lane's node. Collective over the block.
template <Elements kElements>
__device__ __forceinline__ void sum_share(const Scratch& s, int32_t tiles, const ChainNode* nodes,
                                          unsigned asking, double inflow, const Unit& unit,
                                          const Divisor& splits, double* masses) {
  __shared__ SharedArray<DrawTask, 1> task;
  const Share share = share_of(__popc(asking) * tiles, unit.split, splits);
  for (int32_t first = 0; asking != 0; first += tiles, asking &= asking - 1, masses += s.tiles) {
    const int32_t from = clamp_to(share.first - first, 0, tiles);
    const int32_t to = clamp_to(share.last - first, 0, tiles);
    if (from == to) continue;
    const int lane = lowest_lane(asking);
    const double flows_in = __shfl_sync(kAllLanes, inflow, lane);
    if (threadIdx.x == 0) {
      task[0] = block_residual(flows_in, nodes[lane].target, nodes[lane].draft);
    }
    __syncthreads();
    residual_mass_tiles<kElements>(task[0], from, to, masses + from);
  }
}

// The mass of the lane's node where it is asked for, a warp a sum. Those of `others` are summed
// from their tiles'. Collective over the block.
__device__ __forceinline__ double add_up_masses(const Scratch& s, const Request& r, int32_t tiles,
                                                const ChainNode* nodes, int64_t base,
                                                const AskingNodes& asking, double inflow,
                                                const double* masses) {
  __shared__ double found[kNodesAtOnce];
  __shared__ SharedArray<DrawTask, kWarps> tasks;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned all = asking.listed | asking.others;
  int k = 0;
  for (unsigned left = all; left != 0; left &= left - 1, ++k) {
    if (k % kWarps != warp) continue;
    const int lane = lowest_lane(left);
    const double flows_in = __shfl_sync(kAllLanes, inflow, lane);
    double mass = 0.0;
    if ((asking.listed >> lane & 1u) != 0) {
      __syncwarp();  // all lanes have read the one before
      if (threadIdx.x % kWarp == 0) {
        tasks[warp] = block_residual(flows_in, nodes[lane].target, nodes[lane].draft);
      }
      __syncwarp();
      mass = residual_mass(s.shortlists[r.b * s.rows + base + lane], tasks[warp]);
    } else {
      const int before = __popc(asking.others & ((1u << lane) - 1));
      mass = sum_tiles(masses + before * s.tiles, tiles);
    }
    if (threadIdx.x % kWarp == 0) found[lane] = mass;
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  return (all >> lane & 1u) != 0 ? found[lane] : 0.0;
}

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    decide_block(const __grid_constant__ VerifyParams p, const __grid_constant__ Scratch s,
                 Divisor splits) {
  __shared__ SharedArray<Request, 1> request;
  __shared__ ChainNodes nodes;
  let_next_launch_begin();
  const Unit unit = this_unit(splits);
  Request& r = request[0];
  open_in_block(p, unit.index, &r);
  const int32_t tiles = static_cast<int32_t>(num_tiles(p.target.vocab));
  double* const masses = s.masses + r.b * s.sums * s.tiles;
  Descent d;
  double inflow = 1.0;  // of the lane's node
  int32_t sums = 0;
  do {
    const int64_t base = d.leaf;
    inflow = come_to(p, s, r, base, &nodes, &d);
    const unsigned asking = asking_nodes(s, r, nodes.data(), base, inflow, d).others;
    sum_share<kElements>(s, tiles, nodes.data(), asking, inflow, unit, splits,
                         masses + sums * s.tiles);
    sums += __popc(asking);
  } while (d.goes_on);
  if (sums == 0 ? unit.split > 0 : !is_last_block(s.counters + r.b, splits)) return;
  clear_outputs(p, r.b, threadIdx.x, kThreads);
  const bool again = d.leaf >= kNodesAtOnce;  // the first nodes are forgotten
  if (again) {
    __syncthreads();  // nodes are overwritten
    d = Descent{};
  }
  sums = 0;
  for (int64_t base = 0;; base = d.leaf) {
    if (again) inflow = come_to(p, s, r, base, &nodes, &d);
    const AskingNodes asking = asking_nodes(s, r, nodes.data(), base, inflow, d);
    const double mass =
        add_up_masses(s, r, tiles, nodes.data(), base, asking, inflow, masses + sums * s.tiles);
    sums += __popc(asking.others);
    flip_coins<Reads::kLaws>(p, &r, base, &nodes, inflow, mass, &d);
    report_log_probabilities(p, r, base, d.reports, &nodes);
    if (!d.goes_on) break;
  }
  end_flow(p, r, d);
  bool drawn = false;
  if (s.finished) {
    __syncthreads();  // the clerk has decided
    drawn = draw_at_once<true>(p, s, r, nodes.place);
  }
  if (threadIdx.x >= kThreads - kWarp) close_request<Reads::kLaws>(p, s, r, drawn);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
