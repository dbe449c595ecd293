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
  bool legal = true;
  int children = 0, last = 0;
  for (int v = static_cast<int>(threadIdx.x); v < p.nodes; v += kThreads) {
    const int64_t parent = load_id(p.parents, b, v);
    legal = legal && is_legal_node(v, parent);
    children += parent >= 0;
    if (parent >= 0) last = v;
    parents[v] = static_cast<int16_t>(parent);
  }
  legal = block_all(legal);
  children = block_sum(children);
  last = block_max(last);
  return legal && children == last ? children + 1 : 0;
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
