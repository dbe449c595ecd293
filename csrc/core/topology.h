// Draft trees as their parents: what a valid one is, and the ancestors of a node.
//
// Node 0 is the root, of parent -1; every other node comes after its parent; padding nodes have
// parent -1 and come last.
#pragma once

#include "rows.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// The 64 nodes that a word of ancestor bits is about.
constexpr int64_t kWordNodes = 64;

SPECDEC_HD int64_t ancestor_words(int64_t nodes) { return (nodes + kWordNodes - 1) / kWordNodes; }

// Whether the node itself is legal: the root, a child of an earlier node, or padding. A tree of
// such nodes is valid if its padding comes last: if the last child is as far as the children count.
SPECDEC_HD bool is_legal_node(int64_t node, int64_t parent) {
  return parent >= -1 && parent < node;
}

// The nodes that are no padding; 0: not a tree.
SPECDEC_HD int64_t tree_size(const IdArray& parents, int64_t b, int64_t nodes) {
  int64_t size = 1;
  for (int64_t v = 0; v < nodes; ++v) {
    const int64_t parent = load_id(parents, b, v);
    if (!is_legal_node(v, parent)) return 0;
    if (parent < 0) continue;
    if (size != v) return 0;
    ++size;
  }
  return size;
}

// ---- an accepted path in a cache ---

// Bits of `status` that the lengths of request b set. What they set keeps the cache as it is.
SPECDEC_HD int32_t compact_status(const CompactKvParams& p, int64_t b) {
  const int64_t accepted = load_id(p.num_accepted, b, 0), seq_len = load_id(p.seq_lens, b, 0);
  const bool in_range = accepted >= 0 && accepted <= p.steps && seq_len >= 0 && seq_len <= p.places;
  return in_range ? 0 : kParameterOutOfRange;
}

// Whether accepted node k comes after the one before it, and lies in the cache. Where all do, no
// node is overwritten before it has moved: place k + 1 is never behind node k.
SPECDEC_HD bool is_legal_step(const CompactKvParams& p, int64_t b, int64_t k, int64_t seq_len) {
  const int64_t node = load_id(p.path, b, k);
  const int64_t before = k == 0 ? 0 : load_id(p.path, b, k - 1);
  return node > before && node < p.places - seq_len;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
