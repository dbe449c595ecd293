// The decision of the block rule (Sun et al., arXiv 2403.10444; core/recursion.h) where drafts are
// sampled: the masses of residuals decide.
//
// Grid: some blocks a request. Every inflow follows from the probabilities of the draft's tokens,
// so each block finds by itself which masses are asked for, and sums its share of their tiles; the
// last block to arrive adds them up and flips the coins. Nobody waits for anybody.
//
// Reads what chain_nodes.cuh says, in every block; both rows of each residual that is asked for
// once. Writes 8 bytes a tile and mass. Included by verify.cu alone.
#pragma once

#include "chain_nodes.cuh"

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

// The nodes whose masses are asked for, a bit each; by every warp for itself.
__device__ __forceinline__ unsigned asking_nodes(const ChainNode* nodes, int64_t base,
                                                 double inflow, const Descent& d) {
  const int64_t i = base + threadIdx.x % kWarp;
  const bool asks = i < d.leaf && needs_mass(i, inflow, nodes[i - base].sampled);
  return __ballot_sync(kAllLanes, asks);
}

// Sums this block's share of the tiles of all masses that are asked for: masses[k * s.tiles + t] of
// tile t in the k-th of them. `inflow` is of the lane's node. Collective over the block.
template <Elements kElements>
__device__ __forceinline__ void sum_share(const Scratch& s, int32_t tiles, const ChainNode* nodes,
                                          unsigned asking, double inflow, const Unit& unit,
                                          int64_t splits, double* masses) {
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

// The mass of the lane's node where it is asked for, a warp a sum. Collective over the block.
__device__ __forceinline__ double add_up_masses(const Scratch& s, int32_t tiles, unsigned asking,
                                                const double* masses) {
  __shared__ double found[kNodesAtOnce];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const bool is_mine = (asking >> threadIdx.x % kWarp & 1u) != 0;
  for (int k = 0; asking != 0; ++k, asking &= asking - 1) {
    if (k % kWarps != warp) continue;
    const double mass = sum_tiles(masses + k * s.tiles, tiles);
    if (threadIdx.x % kWarp == 0) found[lowest_lane(asking)] = mass;
  }
  __syncthreads();
  return is_mine ? found[threadIdx.x % kWarp] : 0.0;
}

template <Elements kElements>
__global__ void __launch_bounds__(kThreads, kBlocksAt128Registers)
    decide_block(const __grid_constant__ VerifyParams p, const __grid_constant__ Scratch s,
                 int64_t splits) {
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
    const unsigned asking = asking_nodes(nodes.data(), base, inflow, d);
    sum_share<kElements>(s, tiles, nodes.data(), asking, inflow, unit, splits,
                         masses + sums * s.tiles);
    sums += __popc(asking);
  } while (d.goes_on);
  if (sums == 0 ? unit.split > 0 : !is_last_block(s.counters + r.b, splits)) return;
  clear_outputs(p, r.b, threadIdx.x, kThreads);
  const bool again = d.leaf >= kNodesAtOnce;  // the first nodes are forgotten
  if (again) d = Descent{};
  sums = 0;
  for (int64_t base = 0;; base = d.leaf) {
    if (again) inflow = come_to(p, s, r, base, &nodes, &d);
    const unsigned asking = asking_nodes(nodes.data(), base, inflow, d);
    const double mass = add_up_masses(s, tiles, asking, masses + sums * s.tiles);
    sums += __popc(asking);
    flip_coins<Reads::kLaws>(p, &r, base, &nodes, inflow, mass, &d);
    if (!d.goes_on) break;
  }
  end_flow(p, r, d);
  if (threadIdx.x >= kThreads - kWarp) close_request<Reads::kLaws>(p, s, r);
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
