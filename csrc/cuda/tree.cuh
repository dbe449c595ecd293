// What the kernels of verify_tree share: scratch memory, rows, and how a request is opened.
// Included by verify_tree.cu alone.
#pragma once

#include "../core/tree.h"
#include "race.cuh"
#include "row_laws.cuh"
#include "team.cuh"
#include "topology.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// Trees of at most so many nodes are in shared memory while they are visited.
constexpr int kNodesInShared = 64;

__host__ __device__ bool is_small(const VerifyTreeParams& p) { return p.nodes <= kNodesInShared; }

// Rows of a request: the targets of all nodes, then the drafts of their children if there is a
// draft law.
struct TreeScratch {
  Divisor rows;     // of a request
  Divisor tiles;    // of the wider vocabulary: the stride of a row's tiles
  LawScratch laws;  // [B, rows]
  TreeMemory memory;
  Tree* trees = nullptr;           // [B]
  Request* requests = nullptr;     // [B], opened
  Request* results = nullptr;      // [B], decided
  NodeVisit* visits = nullptr;     // [visiting blocks, N], of large trees
  TreeMemory own;                  // [visiting blocks], likewise
  uint8_t* wants_draft = nullptr;  // [B, N], with a draft law: whether a child asks for it
  int32_t* ends = nullptr;         // [B], the nodes from whose laws last tokens are drawn
  int64_t* winners = nullptr;      // [B, N], with races
  Runner* runners = nullptr;       // [B, N, tiles], with races
  uint64_t* part_sums = nullptr;   // [B, tiles, kWarps]
  Teams teams;
};

// ---- nodes ---

// The nodes of a request whose laws are known.
struct Nodes {
  const VerifyTreeParams& p;
  const TreeScratch& s;
  int64_t b;

  __device__ LawRow target(int64_t v) const { return {target_row(v), s.laws.laws[b * s.rows + v]}; }
  __device__ Row target_row(int64_t v) const { return SPECDEC_CPU_ISA::target_row(p, b, v); }
  // Where nobody asks for the law, it is not valid.
  __device__ LawRow draft(int64_t v) const {
    if (s.wants_draft == nullptr) return {};
    return {draft_row(v), s.laws.laws[b * s.rows + p.nodes + v]};
  }
  __device__ Row draft_row(int64_t v) const {
    return s.wants_draft != nullptr ? SPECDEC_CPU_ISA::draft_row(p, b, v) : Row{};
  }
  // The token that wins the race at a node.
  __device__ int64_t winner(int64_t v) const {
    return s.winners != nullptr ? s.winners[b * p.nodes + v] : -1;
  }
};

__device__ bool is_reachable(const Tree& tree, int64_t v) {
  return v < tree.count && tree.inflow[v] != kUnreachable;
}

// All rows that are asked for, for row_laws.cuh.
struct TreeRows {
  VerifyTreeParams p;
  TreeScratch s;

  __device__ RowTask operator()(int64_t row) const {
    const auto [b, slot] = place_in(row, s.rows);
    const Request& r = s.requests[b];
    if (slot >= p.nodes) {
      const int64_t v = slot - p.nodes;
      if (s.wants_draft[b * p.nodes + v] == 0) return {};
      return {draft_row(p, b, v), r.draft_filters, {}};
    }
    if (!is_reachable(s.trees[b], slot)) return {};
    return {target_row(p, b, slot), r.target_filters, {}};
  }
};

// The target rows of emitted tokens without filters at T = 1: row (b, k) is that of the k-th one.
struct RawRows {
  VerifyTreeParams p;

  __device__ RowTask operator()(int64_t row) const {
    const auto [b, k] = place_in(row, p.nodes);
    if (k > p.num_accepted[b]) return {};
    return {target_row(p, b, k == 0 ? 0 : p.path[row - 1]), {}, {}};
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
#pragma unroll 1
  for (int v = static_cast<int>(threadIdx.x); v < p.nodes; v += kThreads) {
    given->kinds[v] = kind_at(p, b, v);
    given->states[v] = v > 0 ? node_state(p, b, v) : ColumnState::kUsable;
  }
  return load_tree(p, b, given->parents);
}

// Neighbouring threads that share a node's work, so that all have some: a power of 2 in a warp.
__device__ int lanes_of_node(int64_t nodes) {
  int lanes = kWarp;
#pragma unroll 1
  while (lanes > 1 && nodes * lanes > kThreads) lanes /= 2;
  return lanes;
}

// The same in each of `lanes` neighbours: what `op` makes of their values.
template <typename Op>
__device__ int reduce_lanes(int value, int lanes, Op op) {
#pragma unroll 1
  for (int k = lanes / 2; k > 0; k /= 2) value = op(value, __shfl_xor_sync(kAllLanes, value, k));
  return value;
}

// link_children and has_valid_kinds of core/tree.h: each node looks at all others for its own.
__device__ bool link_nodes(const NodesAsGiven& given, const Tree& tree) {
  const int count = static_cast<int>(tree.count);
  const auto smaller = [](int a, int b) { return a < b ? a : b; };
  const int lanes = lanes_of_node(count), lane = static_cast<int>(threadIdx.x) % lanes;
  bool valid = true;
#pragma unroll 1
  for (int base = 0; base < count; base += kThreads / lanes) {
    const int v = base + static_cast<int>(threadIdx.x) / lanes;
    const bool real = v < count;
    const int parent_of_v = real ? given.parents[v] : -1;
    const int8_t kind = real ? given.kinds[v] : int8_t{0};
    int first_child = kNoNode, next_sibling = kNoNode, first_slot = 0;
#pragma unroll 4
    for (int c = 1 + lane; real && c < count; c += lanes) {
      const int parent = given.parents[c];
      first_slot += parent < v;
      if (parent == v) first_child = c < first_child ? c : first_child;
      if (c <= v || parent != parent_of_v) continue;
      next_sibling = c < next_sibling ? c : next_sibling;
      valid = valid && !kinds_clash(kind, given.kinds[c]);
    }
    first_child = reduce_lanes(first_child, lanes, smaller);
    next_sibling = reduce_lanes(next_sibling, lanes, smaller);
    first_slot = reduce_lanes(first_slot, lanes, [](int a, int b) { return a + b; });
    if (!real || lane != 0) continue;
    tree.first_child[v] = first_child == kNoNode ? -1 : first_child;
    tree.next_sibling[v] = next_sibling == kNoNode ? -1 : next_sibling;
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
#pragma unroll 1
  for (int v = static_cast<int>(threadIdx.x); v < tree.count; v += kThreads) {
    bool above = true;
#pragma unroll 1
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

// Which draft rows are asked for, some of them by several threads. Collective over the block.
__device__ void ask_for_drafts(const VerifyTreeParams& p, const NodesAsGiven& given,
                               const Request& r, const Tree& tree, volatile uint8_t* wants_draft) {
#pragma unroll 1
  for (int v = static_cast<int>(threadIdx.x); v < p.nodes; v += kThreads) wants_draft[v] = 0;
  __syncthreads();
#pragma unroll 1
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
#pragma unroll 1
    for (int64_t v = threadIdx.x; v < p.nodes; v += kThreads) s.winners[b * p.nodes + v] = -1;
  }
  clear_team(s.teams, b);
#pragma unroll 1
  for (int64_t i = b * s.rows + threadIdx.x; i < (b + 1) * s.rows; i += kThreads) {
    s.laws.counters[i] = 0;
    if (s.laws.combines()) s.laws.laws[i] = RowLaw{};  // of a row that nobody asks for
  }
  if (threadIdx.x == 0) {
    s.trees[b] = tree;
    s.requests[b] = r;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace specdec
