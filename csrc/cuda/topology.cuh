// A request's tree in shared memory: what tree_mask and verify_tree share.
#pragma once

#include "../core/topology.h"
#include "block.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// The parents in shared memory; gives tree_size of core/topology.h. Collective over the block.
template <typename Params>
__device__ int64_t load_tree(const Params& p, int64_t b, int16_t* parents) {
  constexpr int kIllegal = static_cast<int>(kMaxNodes);  // more than a tree has children
  bool legal = true;
  int children = 0;
#pragma unroll 1
  for (int v = static_cast<int>(threadIdx.x); v < p.nodes; v += kThreads) {
    const int64_t parent = load_id(p.parents, b, v);
    const bool after_padding = v > 1 && load_id(p.parents, b, v - 1) < 0;
    legal = legal && is_legal_node(v, parent) && !(after_padding && parent >= 0);
    children += parent >= 0;
    parents[v] = static_cast<int16_t>(parent);
  }
  children = block_sum(legal ? children : kIllegal);
  return children < kIllegal ? children + 1 : 0;
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
