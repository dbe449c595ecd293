// The recursion over the nodes of a tree, by each block of the request's team (team.cuh).
//
// A mass is asked of the team, or found by each block for itself where the target's filters have
// left a shortlist. Under traversal several nodes wait for their sums at once, and a warp takes
// each of them on (its lanes would go different ways): what a node's visit writes belongs to the
// node or its children, so warps do not meet. A stepwise rule waits for one sum at a time. When no
// node waits any more, all threads end the request. What takes no law is done while the rows are
// still scanned: the tree is copied, and its tokens' entries are read.
//
// Each block has its own copy of what changes, in shared memory if a tree has at most
// kNodesInShared nodes. Included by verify_tree.cu alone.
#pragma once

#include "tree.cuh"

namespace specdec {
namespace cuda {
namespace {

using namespace SPECDEC_CPU_ISA;

// What a block knows of its request, in shared memory.
struct TreeLedger {
  Request request;
  int32_t status;  // that nodes have added to the request's
  Tree tree;
  int32_t sums;                // of this round
  int16_t nodes[kSumsAtOnce];  // whose sums they are
  DrawTask tasks[kWarps];      // the team's is the first one
  LawRow target, draft;        // of its node
  Pending waits[kMaxNodes];    // what a node waits for; kNothing: it does not wait
  // Of small trees:
  NodeVisit visits[kNodesInShared];
  int32_t links[TreeMemory::kLinks * kNodesInShared];
  int64_t tokens[TreeMemory::kTokens * kNodesInShared];
  double numbers[TreeMemory::kNumbers * kNodesInShared];
  float log_p[kNodesInShared];
};

// Its public functions are collective over the block, but for those that flow_down calls.
class TreeWalk {
 public:
  NodeVisit* visits;  // for flow_down of core/tree.h

  __device__ TreeWalk(const VerifyTreeParams& p, const TreeScratch& s, int64_t b,
                      TreeLedger* ledger)
      : visits(is_small(p) ? ledger->visits : s.visits + blockIdx.x * p.nodes),
        p_(p),
        s_(s),
        nodes_{p, s, b},
        ledger_(*ledger) {}

  // ---- for team.cuh ---

  template <typename Act>
  __device__ __forceinline__ void begin(const Act& act) {
    if (!is_small(p_)) wait_for_launch_before();  // its own copy is in scratch memory
    if (threadIdx.x == 0) see_finished_launches();
    copy_tree();
    read_tokens_entries();
    wait_for_launch_before();
    act();
    open_visits();
  }

  __device__ __forceinline__ int32_t next(const double* masses, bool first) {
    int32_t sums = first ? 1 : ledger_.sums;
    if (first) find_log_probabilities();
#pragma unroll 1
    for (bool listed = false;; first = false, listed = true) {
#pragma unroll 1
      for (int32_t k = threadIdx.x / kWarp; k < sums; k += kWarps) {
        const int64_t v = first ? 0 : ledger_.nodes[k];
        const double mass = first ? 0.0 : listed ? listed_mass(v) : masses[k];
        if (threadIdx.x % kWarp != 0) continue;
        if (!first) take_mass_of(v, mass);
        take_on(v);
      }
      sums = s_.laws.shortlists != nullptr ? ask(true) : 0;
      if (sums == 0) break;
    }
    sums = ask(false);
    return sums > 0 ? sums : end();
  }

  __device__ int64_t tiles(int32_t k) const {
    const int64_t v = ledger_.nodes[k];
    const bool of_draft = ledger_.waits[v] == Pending::kRestMass;
    return num_tiles(of_draft ? in_token_order(draft_row(p_, nodes_.b, v)).vocab : p_.target.vocab);
  }

  __device__ const DrawTask& task(int32_t k) {
    const int64_t v = ledger_.nodes[k];
    // Rows take long to find: two threads find them side by side.
    if (threadIdx.x == 0) ledger_.target = nodes_.target(v);
    if (threadIdx.x == kThreads / 2) ledger_.draft = nodes_.draft(v);
    __syncthreads();
    if (threadIdx.x == 0) {
      ledger_.tasks[0] =
          pending_sum(ledger_.tree, visits[v], ledger_.waits[v], ledger_.target, ledger_.draft);
    }
    __syncthreads();
    return ledger_.tasks[0];
  }

  // ---- for flow_down ---

  // All visits have begun when the request was opened, with an inflow of 1.
  __device__ void begin(int64_t v, double inflow) { visits[v].state.inflow = inflow; }
  __device__ void wait(int64_t v, Pending pending) { ledger_.waits[v] = pending; }

 private:
  // ---- opening ---

  // Copies what open_trees has found.
  __device__ void copy_tree() {
    const int64_t b = nodes_.b;
    __syncthreads();
    copy_words(&ledger_.request, s_.requests[b]);
    copy_words(&ledger_.tree, s_.trees[b]);
    const TreeMemory own =
        is_small(p_) ? TreeMemory{ledger_.links, ledger_.tokens, ledger_.numbers, ledger_.log_p}
                     : memory_of(s_.own, p_.nodes, blockIdx.x);
    const TreeMemory given = memory_of(s_.memory, p_.nodes, b);
#pragma unroll 1
    for (int64_t k = threadIdx.x; k < TreeMemory::kLinks * p_.nodes; k += kThreads) {
      own.links[k] = given.links[k];
    }
#pragma unroll 1
    for (int64_t k = threadIdx.x; k < TreeMemory::kNumbers * p_.nodes; k += kThreads) {
      own.numbers[k] = given.numbers[k];
    }
#pragma unroll 1
    for (int64_t v = threadIdx.x; v < p_.nodes; v += kThreads) {
      ledger_.waits[v] = Pending::kNothing;
      own.log_p[v] = NAN;  // of a node that no token leads to
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const Tree& from = ledger_.tree;
      Tree tree = tree_in(own, p_.nodes, 0);
      tree.b = from.b;
      tree.valid = from.valid;
      tree.count = from.count;
      ledger_.tree = tree;
      ledger_.status = 0;
    }
    __syncthreads();
  }

  // look(v, parent) for all nodes but the root that tokens lead to.
  template <typename Look>
  __device__ __forceinline__ void for_tokens(const Look& look) {
    const Tree& tree = ledger_.tree;
#pragma unroll 1
    for (int64_t v = 1 + threadIdx.x; v < tree.count; v += kThreads) {
      if (is_reachable(tree, v)) look(v, tree_parent(p_, tree.b, v));
    }
  }

  // What can be read before the rows' laws are there.
  __device__ void read_tokens_entries() {
    for_tokens([&](int64_t v, int64_t parent) {
      read_entries(p_, ledger_.tree, v, nodes_.target_row(parent), nodes_.draft_row(parent));
    });
  }

  // Looks at all tokens of the request and begins all visits.
  __device__ void open_visits() {
    for_tokens([&](int64_t v, int64_t parent) {
      look_at_token(p_, ledger_.tree, v, nodes_.target(parent), nodes_.draft(parent));
    });
    __syncthreads();
    const Tree& tree = ledger_.tree;
#pragma unroll 1
    for (int64_t v = threadIdx.x; v < tree.count; v += kThreads) {
      if (!is_reachable(tree, v)) continue;
      visits[v] = begin_visit(p_, ledger_.request, tree, v, 1.0, nodes_.target(v), nodes_.draft(v),
                              nodes_.winner(v));
    }
    __syncthreads();
  }

  // Threads of all warps but the first one, which has enough to do, if there are others; a thread's
  // place among them, negative in the first warp.
  static constexpr int32_t kBesideFirstWarp = kThreads > kWarp ? kThreads - kWarp : kThreads;
  __device__ static int32_t place_beside_first_warp() {
    return static_cast<int32_t>(threadIdx.x) - (kThreads - kBesideFirstWarp);
  }

  // By whoever does not go down from the root. Reads nothing that the one who does may write.
  __device__ void find_log_probabilities() {
    const Tree& tree = ledger_.tree;
    const int32_t place = place_beside_first_warp();
#pragma unroll 1
    for (int64_t v = 1 + place; place >= 0 && v < tree.count; v += kBesideFirstWarp) {
      if (std::isnan(tree.log_p[v])) continue;
      find_log_probability(p_, tree, v, nodes_.target(tree_parent(p_, tree.b, v)));
    }
  }

  // ---- going on, a thread a node ---

  __device__ void take_mass_of(int64_t v, double mass) {
    if (ledger_.waits[v] == Pending::kMass) {
      take_mass(ledger_.tree, mass, &visits[v]);
    } else {
      visits[v].rest_mass = mass;
    }
    ledger_.waits[v] = Pending::kNothing;
  }

  // Takes the request on from a node that waits for nothing.
  __device__ void take_on(int64_t v) {
    const Tree tree = ledger_.tree;  // in registers
    Request r = ledger_.request;
    r.status = 0;
    if (p_.rule == Rule::kTraversal) {
      flow_down(p_, &r, tree, this, v);
    } else {
      descend(&r, tree, v);
    }
    if (r.status != 0) atomicOr(&ledger_.status, r.status);
  }

  // Goes down until the request waits, or ends and has its winner: a stepwise rule.
  __device__ void descend(Request* r, const Tree& tree, int64_t v) {
    for (;;) {
      NodeVisit visit = visits[v];
      const Pending pending = advance(p_, r, tree, true, &visit);
      visits[v] = visit;
      if (pending == Pending::kNothing) return mark_path(p_, tree, v);
      if (pending != Pending::kDescend) return wait(v, pending);
      v = visit.child;
    }
  }

  // ---- asking for sums ---

  // Lists those that nodes wait for, in their order, as many as a round takes: those that this
  // block finds by itself (`listed`), or any. Gives their number.
  __device__ int32_t ask(bool listed) {
    __syncthreads();
    if (threadIdx.x < kWarp) {
      list_sums(
          0, static_cast<int32_t>(ledger_.tree.count),
          [&](int32_t v) {
            const Pending wait = ledger_.waits[v];
            return listed ? wait == Pending::kMass && s_.laws.is_listed(row_of(v))
                          : wait != Pending::kNothing;
          },
          ledger_.nodes, &ledger_.sums);
    }
    __syncthreads();
    return ledger_.sums;
  }

  // Of a node's target among all rows.
  __device__ int64_t row_of(int64_t v) const { return nodes_.b * s_.rows + v; }

  // The mass that a node waits for, by its target's shortlist. By a full warp.
  __device__ double listed_mass(int64_t v) {
    DrawTask& task = ledger_.tasks[threadIdx.x / kWarp];
    __syncwarp();  // all lanes have read the one before
    if (threadIdx.x % kWarp == 0) {
      task =
          pending_sum(ledger_.tree, visits[v], Pending::kMass, nodes_.target(v), nodes_.draft(v));
    }
    __syncwarp();
    return residual_mass(s_.laws.shortlists[row_of(v)], task);
  }

  // ---- the end ---

  // Writes what is known but for the extra token. All blocks of a team know it; its first one does.
  __device__ int32_t end() {
    if (blockIdx.x >= static_cast<uint32_t>(p_.batch)) return 0;
    const Tree& tree = ledger_.tree;
    Request& r = ledger_.request;
    const int32_t writer = place_beside_first_warp();
    if (writer >= 0) write_nodes(p_, tree, writer, kBesideFirstWarp);
    if (p_.rule == Rule::kTraversal) {
#pragma unroll 1
      for (int64_t v = 1 + threadIdx.x; v < tree.count; v += kThreads) {
        if (accepts_node(p_, r, tree, v)) mark_path(p_, tree, v);
      }
    }
    __syncthreads();
    if (threadIdx.x == kThreads / 2) r.accepted = write_path(p_, tree);
    if (threadIdx.x == 0) {
      r.status |= ledger_.status;
      const int64_t winner = find_winner(tree);
      finish_tree(tree, visits[winner], nodes_.target(winner), nodes_.draft(winner), &r);
      s_.ends[nodes_.b] = static_cast<int32_t>(winner);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      write_outcome(p_, r);
      if (knows_token(&r.draw)) write_tree_token(p_, r.b, r.accepted, r.draw);
    }
    return give_result();
  }

  // Hands the request to the draw, its lists of tokens with it.
  __device__ int32_t give_result() {
    Request& r = ledger_.request;
    int64_t* tokens = memory_of(s_.memory, p_.nodes, nodes_.b).tokens;
    const int64_t* own = ledger_.tree.tried;
    for (TokenList* list : {&r.draw.tried, &r.draw.no_draft}) {
      const int64_t first = list->tokens - own;
#pragma unroll 1
      for (int64_t i = threadIdx.x; i < list->count; i += kThreads) {
        tokens[first + i] = own[first + i];
      }
      __syncthreads();
      if (threadIdx.x == 0 && list->count > 0) list->tokens = tokens + first;
    }
    copy_by_block(&s_.results[nodes_.b], r);
    return 0;
  }

  const VerifyTreeParams& p_;
  const TreeScratch& s_;
  Nodes nodes_;
  TreeLedger& ledger_;
};

}  // namespace
}  // namespace cuda
}  // namespace specdec
