// tree_mask: the ancestors of every node as bits, and its depth.
//
// Grid: a block a request, its nodes over the threads. Reads a parent and writes
// 8 + 8 ceil(N/64) bytes a node. A thread walks from its node to the root in shared memory; the
// nodes on the way descend, so that it fills one word after the other.
#include "kernels.h"
#include "topology.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

__device__ void write_node(const TreeMaskParams& p, int64_t b, int v, bool padding,
                           const int16_t* parents) {
  const int words = static_cast<int>(ancestor_words(p.nodes));
  uint64_t* const out = p.ancestors + (b * p.nodes + v) * words;
  int node = padding ? -1 : v, depth = -1;
  for (int w = words - 1; w >= 0; --w) {
    uint64_t bits = 0;
    for (; node >= w * kWordNodes; ++depth) {
      bits |= uint64_t{1} << (node % kWordNodes);
      node = node == 0 ? -1 : parents[node];  // the root of what is no tree may have one
    }
    out[w] = bits;
  }
  p.depths[b * p.nodes + v] = depth;
}

__global__ void __launch_bounds__(kThreads) write_tree(const TreeMaskParams p) {
  begin_kernel();
  __shared__ int16_t parents[kMaxNodes];
  const int64_t b = blockIdx.x;
  int64_t size = load_tree(p, b, parents);
  if (threadIdx.x == 0) p.status[b] = size > 0 ? 0 : kInvalidTree;
  if (size == 0) size = 1;
  for (int v = static_cast<int>(threadIdx.x); v < p.nodes; v += kThreads) {
    write_node(p, b, v, v >= size, parents);
  }
}

}  // namespace

void tree_mask(const TreeMaskParams& p, const Gpu& gpu) {
  launch(gpu, "write_tree", write_tree, p.batch, p);
}

void load_tree_mask(Loading& load) { load(write_tree); }

}  // namespace cuda
}  // namespace specdec
