// tree_mask: the ancestors of every node as bits, and its depth.
//
// Grid: requests over threads. Reads a parent and writes 8 + 8 ceil(N/64) bytes a node.
#include "../core/topology.h"
#include "kernels.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

void write_node(const TreeMaskParams& p, int64_t b, int64_t v, bool padding) {
  const int64_t words = ancestor_words(p.nodes);
  uint64_t* own = p.ancestors + (b * p.nodes + v) * words;
  // The root of what is no tree may have a parent.
  const int64_t parent = padding || v == 0 ? -1 : load_id(p.parents, b, v);
  const uint64_t* above = p.ancestors + (b * p.nodes + parent) * words;
  for (int64_t w = 0; w < words; ++w) own[w] = parent < 0 ? 0 : above[w];
  if (!padding) own[v / kWordNodes] |= uint64_t{1} << (v % kWordNodes);
  const int64_t above_depth = parent < 0 ? -1 : p.depths[b * p.nodes + parent];
  p.depths[b * p.nodes + v] = padding ? -1 : above_depth + 1;
}

}  // namespace

void tree_mask(const TreeMaskParams& p, const ThreadPool& pool) {
  constexpr int64_t kNodesPerThread = 4096;
  parallel_for(pool, p.batch, kNodesPerThread / p.nodes + 1, [&](int64_t b) {
    int64_t size = tree_size(p.parents, b, p.nodes);
    p.status[b] = size > 0 ? 0 : kInvalidTree;
    if (size == 0) size = 1;  // the root is there in any case
    for (int64_t v = 0; v < p.nodes; ++v) write_node(p, b, v, v >= size);
  });
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
