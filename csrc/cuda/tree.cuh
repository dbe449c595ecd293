// What the kernels of verify_tree share: scratch memory, rows, and how a request is opened.
// Included by verify_tree.cu alone.
#pragma once

#include "../core/tree.h"
#include "race.cuh"
#include "row_laws.cuh"
#include "topology.cuh"
#include "work_queue.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Rows of a request: the targets of all nodes, then the drafts of their children if there is a
// draft law.
struct TreeScratch {
  int64_t rows = 0;   // of a request
  int64_t tiles = 0;  // of the wider vocabulary: the stride of a row's tiles
  LawScratch laws;    // [B, rows]
  TreeMemory memory;
  Tree* trees = nullptr;           // [B]
  Request* requests = nullptr;     // [B]
  int32_t* unfinished = nullptr;   // [B] visits that wait, and blocks that take visits on
  NodeVisit* visits = nullptr;     // [B, N]
  uint8_t* wants_draft = nullptr;  // [B, N], with a draft law: whether a child asks for it
  int64_t* winners = nullptr;      // [B, N], with races
  Runner* runners = nullptr;       // [B, N, tiles], with races
  double* masses = nullptr;        // [B, N, tiles]
  uint64_t* tile_sums = nullptr;   // [B, tiles]
  WorkQueue queue;
};

// ---- nodes ---

// The nodes of a request whose laws are known.
struct Nodes {
  const VerifyTreeParams& p;
  const TreeScratch& s;
  int64_t b;
  NodeVisit* visits;

  __device__ Nodes(const VerifyTreeParams& p, const TreeScratch& s, int64_t b)
      : p(p), s(s), b(b), visits(s.visits + b * p.nodes) {}

  __device__ LawRow target(int64_t v) const {
    return {target_row(p, b, v), s.laws.laws[b * s.rows + v]};
  }
  __device__ LawRow draft(int64_t v) const {
    if (s.wants_draft == nullptr || s.wants_draft[b * p.nodes + v] == 0) return {};
    return {draft_row(p, b, v), s.laws.laws[b * s.rows + p.nodes + v]};
  }
  // The token that wins the race at a node.
  __device__ int64_t winner(int64_t v) const {
    return s.winners != nullptr ? s.winners[b * p.nodes + v] : -1;
  }
  // All visits have begun when the request was opened, with an inflow of 1.
  __device__ void begin(int64_t v, double inflow) { visits[v].state.inflow = inflow; }
  __device__ void wait(int64_t v, Pending pending) {
    atomicAdd(s.unfinished + b, 1);
    publish(s.queue, {b, v, pending == Pending::kMass ? Sum::kMass : Sum::kRestMass});
  }
};

__device__ bool is_reachable(const Tree& tree, int64_t v) {
  return v < tree.count && tree.inflow[v] != kUnreachable;
}

// All rows that are asked for, for row_laws.cuh.
struct TreeRows {
  VerifyTreeParams p;
  TreeScratch s;

  __device__ FilteredRow operator()(int64_t row) const {
    const auto [b, slot] = place_in(row, s.rows);
    const Request& r = s.requests[b];
    if (slot >= p.nodes) {
      const int64_t v = slot - p.nodes;
      if (s.wants_draft[b * p.nodes + v] == 0) return {};
      return {draft_row(p, b, v), r.draft_filters};
    }
    if (!is_reachable(s.trees[b], slot)) return {};
    return {target_row(p, b, slot), r.target_filters};
  }
};

// The target rows of emitted tokens without filters at T = 1: row (b, k) is that of the k-th one.
struct RawRows {
  VerifyTreeParams p;

  __device__ FilteredRow operator()(int64_t row) const {
    const auto [b, k] = place_in(row, p.nodes);
    if (k > p.num_accepted[b]) return {};
    return {target_row(p, b, k == 0 ? 0 : p.path[row - 1]), Filters{}};
  }
};

// ---- opening ---

// A request's nodes in shared memory.
struct NodesAsGiven {
  int16_t parents[kMaxNodes];
  int8_t kinds[kMaxNodes];
  ColumnState states[kMaxNodes];
};

// Gives tree_size of core/topology.h. Collective over the block.
__device__ int64_t load_nodes(const VerifyTreeParams& p, int64_t b, NodesAsGiven* given) {
  for (int v = static_cast<int>(threadIdx.x); v < p.nodes; v += kThreads) {
    given->kinds[v] = kind_at(p, b, v);
    given->states[v] = v > 0 ? node_state(p, b, v) : ColumnState::kUsable;
  }
  return load_tree(p, b, given->parents);
}

// link_children and has_valid_kinds of core/tree.h: each thread looks at all nodes for its own.
__device__ bool link_nodes(const NodesAsGiven& given, const Tree& tree) {
  bool valid = true;
  for (int v = static_cast<int>(threadIdx.x); v < tree.count; v += kThreads) {
    int first_child = -1, next_sibling = -1, first_slot = 0;
#pragma unroll 8
    for (int c = 1; c < tree.count; ++c) {
      const int parent = given.parents[c];
      first_slot += parent < v;
      if (parent == v && first_child < 0) first_child = c;
      if (c <= v || parent != given.parents[v]) continue;
      if (next_sibling < 0) next_sibling = c;
      valid = valid && !kinds_clash(given.kinds[v], given.kinds[c]);
    }
    tree.first_child[v] = first_child;
    tree.next_sibling[v] = next_sibling;
    tree.first_slot[v] = first_slot;
  }
  return block_all(valid);
}

// find_reachable of core/tree.h: each thread climbs from its nodes to the root. Collective over the
// block; adds to r->status in every thread.
__device__ void reach_nodes(const VerifyTreeParams& p, const NodesAsGiven& given, const Tree& tree,
                            Request* r) {
  bool invalid = false;
  bool in_range = r->greedy || is_uniform_in_range(p.randomness, r->b, p.nodes - 1);
  for (int v = static_cast<int>(threadIdx.x); v < tree.count; v += kThreads) {
    bool above = true;
    for (int u = given.parents[v]; u > 0; u = given.parents[u]) {
      above = above && given.states[u] == ColumnState::kUsable;
    }
    const ColumnState state = given.states[v];
    invalid = invalid || (above && state == ColumnState::kInvalid);
    const bool reachable = above && state == ColumnState::kUsable;
    clear_node(tree, v, reachable);
    if (v > 0 && reachable)
      in_range = in_range && (r->greedy || is_uniform_in_range(p.randomness, r->b, v - 1));
  }
  if (block_any(invalid)) r->status |= kInvalidDraftToken;
  if (!block_all(in_range)) r->status |= kParameterOutOfRange;
}

// Which draft rows are asked for. Collective over the block.
__device__ void ask_for_drafts(const VerifyTreeParams& p, const NodesAsGiven& given,
                               const Request& r, const Tree& tree, uint8_t* wants_draft) {
  for (int v = static_cast<int>(threadIdx.x); v < p.nodes; v += kThreads) wants_draft[v] = 0;
  __syncthreads();
  for (int c = 1 + static_cast<int>(threadIdx.x); c < tree.count; c += kThreads) {
    if (asks_for_draft_law(p, r, tree, c)) wants_draft[given.parents[c]] = 1;
  }
}

// open_tree of core/tree.h. Grid: a block a request.
__global__ void __launch_bounds__(kThreads)
    open_trees(const VerifyTreeParams p, const TreeScratch s) {
  begin_kernel();
  __shared__ NodesAsGiven given;
  const int64_t b = blockIdx.x;
  Request r = begin_request(p, b);
  Tree tree = tree_in(s.memory, p.nodes, b);
  tree.b = b;
  tree.count = load_nodes(p, b, &given);
  tree.valid = tree.count > 0;
  if (!tree.valid) tree.count = 1;
  if (!link_nodes(given, tree)) {
    tree.valid = false;
    tree.count = 1;
    if (threadIdx.x == 0) tree.first_child[0] = -1;
  }
  if (!tree.valid) r.status |= kInvalidTree;
  reach_nodes(p, given, tree, &r);
  take_final_uniform(p, &r);
  if (s.wants_draft != nullptr) {
    ask_for_drafts(p, given, r, tree, s.wants_draft + b * p.nodes);
  }
  if (s.winners != nullptr) {
    for (int64_t v = threadIdx.x; v < p.nodes; v += kThreads) s.winners[b * p.nodes + v] = -1;
  }
  clear_queue(s.queue, b);
  if (threadIdx.x == 0) {
    s.trees[b] = tree;
    s.requests[b] = r;
    s.unfinished[b] = 1;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
