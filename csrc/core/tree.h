// Trees of draft tokens, one request: its topology, and the visit to the children of a node that
// all rules share (docs/design.md, "Acceptance").
//
// A backend finds laws, sums over the vocabulary and the winners of races; a NodeVisit says what it
// needs next. Nothing in here reads more of a row than a token's own logit.
#pragma once

#include "request.h"
#include "topology.h"

namespace specdec {

enum class ChildKind : int8_t { kDeterministic, kIid, kWithoutReplacement, kRest };
constexpr int8_t kChildKinds = 4;

// Instead of an inflow, of nodes that have none.
constexpr double kNotLookedAt = -1.0;
constexpr double kUnreachable = -2.0;  // it, or a node above it, is no token

constexpr int32_t kNoNode = INT32_MAX;  // above every node, for atomic minima

// Scratch memory of one request, all arrays by node.
struct Tree {
  int64_t b = 0;
  bool valid = true;
  int64_t count = 0;  // real nodes; padding comes after them
  int32_t* first_child = nullptr;
  int32_t* next_sibling = nullptr;        // both -1 where there is none
  int32_t* first_slot = nullptr;          // of a node's children in the two lists below
  int32_t* below_on_stack = nullptr;      // while a node is on a stack: the next one there
  int32_t* next_toward_winner = nullptr;  // first child on a path to a possible winner, or kNoNode
  int64_t* tried = nullptr;               // tokens of children that have been looked at
  int64_t* excluded = nullptr;            // tokens that a child cannot have been drawn from
  double* inflow = nullptr;
  double* acceptance = nullptr;  // h of a node, or the chance that a stepwise rule went down to it
  double* p = nullptr;           // of the node's token, under its parent's law
  double* q = nullptr;           // and under the law that its parent's children were drawn from
  float* log_p = nullptr;        // of p; before that is asked for, the token's logit
};

// Scratch memory of many trees of so many nodes: how many numbers of each type a node takes.
struct TreeMemory {
  static constexpr int64_t kLinks = 5, kTokens = 2, kNumbers = 4;
  int32_t* links = nullptr;
  int64_t* tokens = nullptr;
  double* numbers = nullptr;
  float* log_p = nullptr;
};

// What a visit needs before it goes on.
enum class Pending : int8_t {
  kNothing,   // it has seen all children
  kDescend,   // a stepwise rule goes down to `child`
  kMass,      // that of the residual after `child`
  kRestMass,  // that of the draft law which `child` was drawn from
};

namespace SPECDEC_CPU_ISA {

// A node between two of its children.
struct NodeVisit {
  int32_t node = 0;
  int32_t child = -1;  // the next one to look at; -1: none is left
  Node state;
  ResidualCoefficients last{1.0, 0.0};  // after the last child that was tried
  double taken = 0.0;       // q that cannot be drawn: earlier siblings', or that of fixed tokens
  double rest_mass = -1.0;  // 1 - taken as a sum, where the difference would cancel
  int64_t num_tried = 0;
  int64_t num_excluded = 0;
  int64_t winner = -1;  // coupled: the token that the target emits here
  int64_t kept = -1;    // the token of the last drawn child, while the state's mass still has it
  bool has_rest = false;
  bool drawn_at_random = true;  // sampled children: their law is no point mass
  bool exhausted = false;       // no residual mass is left: no further child is accepted
};

// ---- what the caller gave ---

SPECDEC_HD int64_t tree_token(const VerifyTreeParams& p, int64_t b, int64_t v) {
  return load_id(p.tokens, b, v);
}

SPECDEC_HD int64_t tree_parent(const VerifyTreeParams& p, int64_t b, int64_t v) {
  return load_id(p.parents, b, v);
}

SPECDEC_HD int8_t kind_at(const VerifyTreeParams& p, int64_t b, int64_t v) {
  return given_kind(p, p.kinds, b, v);
}

SPECDEC_HD bool is_known_kind(int8_t kind) { return kind >= 0 && kind < kChildKinds; }

// Where the draft law plays no part, every child is deterministic.
SPECDEC_HD ChildKind kind_of(const VerifyTreeParams& p, const Request& r, int64_t v) {
  if (!reads_draft_law(p.rule) || r.greedy) return ChildKind::kDeterministic;
  return static_cast<ChildKind>(kind_at(p, r.b, v));
}

SPECDEC_HD ColumnState node_state(const VerifyTreeParams& p, int64_t b, int64_t v) {
  return token_state(p, tree_token(p, b, v), kind_at(p, b, v), kChildKinds);
}

SPECDEC_HD Row target_row(const VerifyTreeParams& p, int64_t b, int64_t v) {
  return masked(row_at(p.target, b, v), p.mask, b, v);
}

// The row that v's children were drawn from.
SPECDEC_HD Row draft_row(const VerifyTreeParams& p, int64_t b, int64_t v) {
  if (p.draft.data == nullptr) return Row{};
  const int64_t s = p.children_rows.data != nullptr ? load_id(p.children_rows, b, v) : v;
  if (s < 0 || s >= p.num_draft_rows) return Row{};
  if (kLists && p.lists.ids.data != nullptr) {
    return masked(listed_row(p.lists, b * p.num_draft_rows + s, p.draft.vocab), p.mask, b, v);
  }
  return mapped(masked(row_at(p.draft, b, s, p.draft_is_probs), p.mask, b, v), p.map);
}

// Coins count as 0 where nothing is left to chance.
SPECDEC_HD double tree_coin(const VerifyTreeParams& p, const Request& r, int64_t v) {
  if (r.greedy || !takes_coins(p.rule)) return 0.0;
  return slot_uniform(p.randomness, r.b, v - 1, p.nodes - 1);
}

// ---- topology ---

// The memory of the k-th tree.
SPECDEC_HD TreeMemory memory_of(const TreeMemory& memory, int64_t nodes, int64_t k) {
  const int64_t first = k * nodes;
  return {memory.links + TreeMemory::kLinks * first, memory.tokens + TreeMemory::kTokens * first,
          memory.numbers + TreeMemory::kNumbers * first, memory.log_p + first};
}

// The k-th tree in that memory, still without anything in it.
SPECDEC_HD Tree tree_in(const TreeMemory& memory, int64_t nodes, int64_t k) {
  const TreeMemory own = memory_of(memory, nodes, k);
  Tree tree;
  tree.first_child = own.links;
  tree.next_sibling = tree.first_child + nodes;
  tree.first_slot = tree.next_sibling + nodes;
  tree.below_on_stack = tree.first_slot + nodes;
  tree.next_toward_winner = tree.below_on_stack + nodes;
  tree.tried = own.tokens;
  tree.excluded = tree.tried + nodes;
  tree.inflow = own.numbers;
  tree.acceptance = tree.inflow + nodes;
  tree.p = tree.acceptance + nodes;
  tree.q = tree.p + nodes;
  tree.log_p = own.log_p;
  return tree;
}

SPECDEC_HD void link_children(const VerifyTreeParams& p, Tree* tree) {
  for (int64_t v = 0; v < tree->count; ++v) {
    tree->first_child[v] = tree->next_sibling[v] = -1;
    tree->first_slot[v] = 0;
  }
  for (int64_t v = tree->count - 1; v > 0; --v) {
    const int64_t parent = tree_parent(p, tree->b, v);
    tree->next_sibling[v] = tree->first_child[parent];
    tree->first_child[parent] = static_cast<int32_t>(v);
    ++tree->first_slot[parent];
  }
  int32_t slot = 0;
  for (int64_t v = 0; v < tree->count; ++v) {
    const int32_t children = tree->first_slot[v];
    tree->first_slot[v] = slot;
    slot += children;
  }
}

// Sampled children of one node share their kind, and only one is drawn from the rest: whether two
// siblings break that rule.
SPECDEC_HD bool kinds_clash(int8_t a, int8_t b) {
  const bool drawn = a > 0 && b > 0 && is_known_kind(a) && is_known_kind(b);
  return drawn && (a != b || a == static_cast<int8_t>(ChildKind::kRest));
}

SPECDEC_HD bool has_valid_kinds(const VerifyTreeParams& p, const Tree& tree) {
  for (int64_t v = 0; v < tree.count; ++v) {
    int8_t shared = 0;
    for (int32_t c = tree.first_child[v]; c >= 0; c = tree.next_sibling[c]) {
      const int8_t kind = kind_at(p, tree.b, c);
      if (kinds_clash(shared, kind)) return false;
      if (is_known_kind(kind) && kind != 0) shared = kind;
    }
  }
  return true;
}

// Before anything is known of a node that tokens can lead to, or cannot.
SPECDEC_HD void clear_node(const Tree& tree, int64_t v, bool reachable) {
  tree.inflow[v] = reachable ? kNotLookedAt : kUnreachable;
  tree.acceptance[v] = kNotLookedAt;
  tree.next_toward_winner[v] = kNoNode;
}

// Marks the nodes that tokens can lead to; what is below an id that is no token is never read.
SPECDEC_HD void find_reachable(const VerifyTreeParams& p, Tree* tree, Request* r) {
  bool in_range = r->greedy || is_uniform_in_range(p.randomness, r->b, p.nodes - 1);
  clear_node(*tree, 0, true);
  for (int64_t v = 1; v < tree->count; ++v) {
    clear_node(*tree, v, false);
    if (tree->inflow[tree_parent(p, r->b, v)] == kUnreachable) continue;
    const ColumnState state = node_state(p, r->b, v);
    if (state == ColumnState::kInvalid) r->status |= kInvalidDraftToken;
    if (state != ColumnState::kUsable) continue;
    clear_node(*tree, v, true);
    in_range = in_range && (r->greedy || is_uniform_in_range(p.randomness, r->b, v - 1));
  }
  if (!in_range) r->status |= kParameterOutOfRange;
}

// Takes the uniform of the final draw.
SPECDEC_HD void take_final_uniform(const VerifyTreeParams& p, Request* r) {
  const int64_t last = p.nodes - 1;
  const bool takes = !r->greedy && takes_coins(p.rule);
  r->draw.u = takes ? slot_uniform(p.randomness, r->b, last, last) : 0.0;
}

SPECDEC_HD Request open_tree(const VerifyTreeParams& p, int64_t b, Tree* tree) {
  Request r = begin_request(p, b);
  tree->b = b;
  tree->count = tree_size(p.parents, b, p.nodes);
  tree->valid = tree->count > 0;
  if (!tree->valid) tree->count = 1;
  link_children(p, tree);
  if (tree->valid && !has_valid_kinds(p, *tree)) {
    tree->valid = false;
    tree->count = 1;
    tree->first_child[0] = -1;
  }
  if (!tree->valid) r.status |= kInvalidTree;
  find_reachable(p, tree, &r);
  take_final_uniform(p, &r);
  return r;
}

SPECDEC_HD int64_t depth_of(const VerifyTreeParams& p, int64_t b, int64_t v) {
  int64_t depth = 0;
  for (; v > 0; v = tree_parent(p, b, v)) ++depth;
  return depth;
}

// Whether a child asks for the law that it was drawn from.
SPECDEC_HD bool asks_for_draft_law(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                                   int64_t c) {
  return tree.inflow[c] != kUnreachable && kind_of(p, r, c) != ChildKind::kDeterministic;
}

// Whether some child of v does.
SPECDEC_HD bool wants_draft_row(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                                int64_t v) {
  for (int32_t c = tree.first_child[v]; c >= 0; c = tree.next_sibling[c]) {
    if (asks_for_draft_law(p, r, tree, c)) return true;
  }
  return false;
}

// ---- a node's children ---

SPECDEC_HD TokenList tried_tokens(const Tree& tree, const NodeVisit& v) {
  return {tree.tried + tree.first_slot[v.node], v.num_tried};
}

// Earlier siblings drawn without replacement; or, beside a rest child, the deterministic ones.
SPECDEC_HD TokenList excluded_tokens(const Tree& tree, const NodeVisit& v) {
  return {tree.excluded + tree.first_slot[v.node], v.num_excluded};
}

// Tokens that the draft law of a node with a rest child does not have.
SPECDEC_HD TokenList fixed_tokens(const Tree& tree, const NodeVisit& v) {
  return v.has_rest ? excluded_tokens(tree, v) : TokenList{};
}

SPECDEC_HD void exclude(const Tree& tree, int64_t token, double q, NodeVisit* v) {
  tree.excluded[tree.first_slot[v->node] + v->num_excluded++] = token;
  v->taken += q;
  v->rest_mass = -1.0;
}

// What the rows of its parent hold for the token of a node that tokens lead to, in the place of
// what look_at_token makes of it: a row's law need not be known yet.
SPECDEC_HD void read_entries(const VerifyTreeParams& p, const Tree& tree, int64_t v,
                             const Row& target, const Row& draft) {
  const int64_t token = tree_token(p, tree.b, v);
  const int64_t entry = draft.data != nullptr ? entry_of_token(draft, token) : -1;
  const bool known = target.data != nullptr && token < target.vocab;
  tree.log_p[v] = known ? row_value(target, token) : NAN;
  tree.q[v] = entry >= 0 ? row_value(draft, entry) : NAN;
}

// What the laws of its parent say of the token of a node whose entries have been read, whatever
// happens before: nodes can be looked at side by side. Without a law of the draft q is 0.
SPECDEC_HD void look_at_token(const VerifyTreeParams& p, const Tree& tree, int64_t v,
                              const LawRow& target, const LawRow& draft) {
  const int64_t token = tree_token(p, tree.b, v);
  const bool has_law = draft.row.data != nullptr && draft.law.valid;
  const int64_t entry = has_law ? entry_of_token(draft.row, token) : -1;
  const float of_draft = static_cast<float>(tree.q[v]);
  tree.q[v] = entry >= 0 ? law_probability(draft.law, of_draft, entry) : 0.0;
  const bool known = target.law.valid && token < target.row.vocab;
  tree.p[v] = known ? law_probability(target.law, tree.log_p[v], token) : 0.0;
}

// The log-probability of a node's token under its parent's law, in the place of its logit: when
// that has been looked at, and before the path is written.
SPECDEC_HD void find_log_probability(const VerifyTreeParams& p, const Tree& tree, int64_t v,
                                     const LawRow& target) {
  const bool known = target.law.valid && tree_token(p, tree.b, v) < target.row.vocab;
  const double log_p = known ? law_log_probability(target.law, tree.log_p[v]) : NAN;
  tree.log_p[v] = static_cast<float>(log_p);
}

// q of a node's token, as the siblings that were drawn saw it: beside a rest child, fixed tokens
// have none.
SPECDEC_HD double proposal_probability(const Tree& tree, const NodeVisit& v, int32_t child,
                                       int64_t token) {
  return is_in(fixed_tokens(tree, v), token) ? 0.0 : tree.q[child];
}

// Lists the deterministic children of a node that has a rest child, and what of q they take.
SPECDEC_HD void list_fixed(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                           NodeVisit* v) {
  for (int32_t c = tree.first_child[v->node]; c >= 0; c = tree.next_sibling[c]) {
    v->has_rest |= tree.inflow[c] != kUnreachable && kind_of(p, r, c) == ChildKind::kRest;
  }
  if (!v->has_rest) return;
  for (int32_t c = tree.first_child[v->node]; c >= 0; c = tree.next_sibling[c]) {
    if (tree.inflow[c] == kUnreachable || kind_of(p, r, c) == ChildKind::kRest) continue;
    const int64_t token = tree_token(p, r.b, c);
    if (is_in(fixed_tokens(tree, *v), token)) continue;
    exclude(tree, token, tree.q[c], v);
  }
}

// A visit with this inflow, once its children's tokens have been looked at. Without a law of its
// own, a node is a leaf.
SPECDEC_HD NodeVisit begin_visit(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                                 int64_t node, double inflow, const LawRow& target,
                                 const LawRow& draft, int64_t winner) {
  NodeVisit v;
  v.node = static_cast<int32_t>(node);
  v.state.inflow = inflow;
  v.winner = winner;
  if (!target.law.valid) return v;
  v.child = tree.first_child[node];
  v.drawn_at_random = !draft.law.point_mass;
  list_fixed(p, r, tree, &v);
  return v;
}

// Above this, 1 - taken has lost too many digits.
constexpr double kMaxTaken = 0.9375;

// Of the law that a child was drawn from, relative to q: 1 / kappa.
SPECDEC_HD double proposal_mass(ChildKind kind, const NodeVisit& v) {
  if (kind == ChildKind::kIid || kind == ChildKind::kDeterministic) return 1.0;
  return v.rest_mass >= 0.0 ? v.rest_mass : 1.0 - v.taken;
}

SPECDEC_HD bool needs_rest_mass(ChildKind kind, const NodeVisit& v) {
  const bool reduced = kind == ChildKind::kWithoutReplacement || kind == ChildKind::kRest;
  return reduced && v.rest_mass < 0.0 && v.taken > kMaxTaken && v.drawn_at_random;
}

// Takes a state; without residual mass or inflow it is the last one.
SPECDEC_HD void set_state(const Node& state, NodeVisit* v) {
  v->state = state;
  v->exhausted = !(state.mass > 0.0) || !(state.inflow > 0.0);
}

// After a deterministic child: the residual loses its token alone.
SPECDEC_HD void close_deterministic(double lost, NodeVisit* v) {
  const double left = v->state.mass - lost;
  v->last = residual_after_child(v->state, 1.0, false);
  set_state(close_child(v->state, v->last, v->last.target * (left > 0.0 ? left : 0.0)), v);
}

// After a child that was drawn, once the residual has been summed.
SPECDEC_HD void take_mass(const Tree& tree, double mass, NodeVisit* v) {
  set_state(close_child(v->state, v->last, mass), v);
  v->child = tree.next_sibling[v->child];
}

// Looks at the children of a node until all are done or something is needed. `stepwise`: flip each
// child's coin at once, and go down where it accepts.
SPECDEC_HD Pending advance(const VerifyTreeParams& p, Request* r, const Tree& tree, bool stepwise,
                           NodeVisit* v) {
  for (; v->child >= 0; v->child = tree.next_sibling[v->child]) {
    const int32_t c = v->child;
    if (tree.inflow[c] == kUnreachable) continue;
    const ChildKind kind = kind_of(p, *r, c);
    const int64_t token = tree_token(p, r->b, c);
    bool sampled = kind != ChildKind::kDeterministic;
    const bool q_matters = sampled || v->state.lambda > 0.0;
    const double q = q_matters ? proposal_probability(tree, *v, c, token) : 0.0;
    if (q > 0.0 && needs_rest_mass(kind, *v)) return Pending::kRestMass;
    const double drawn_from = proposal_mass(kind, *v);
    if (sampled && !(q > 0.0 && drawn_from > 0.0)) {
      r->status |= kNoDraftLaw;
      continue;
    }
    if (kind == ChildKind::kWithoutReplacement) exclude(tree, token, q, v);
    sampled = sampled && v->drawn_at_random;

    const double kappa = ratio(1.0, drawn_from);
    const bool raced = v->winner >= 0;  // then the law is a point mass
    const double probability = raced ? (token == v->winner ? 1.0 : 0.0) : tree.p[c];
    const bool repeated = is_in(tried_tokens(tree, *v), token);
    const double inflow =
        repeated || v->exhausted ? 0.0 : child_inflow(v->state, probability, q, kappa, sampled);
    tree.inflow[c] = inflow;
    tree.tried[tree.first_slot[v->node] + v->num_tried++] = token;
    if (stepwise) {
      tree.acceptance[c] = inflow;
      if (tree_coin(p, *r, c) < inflow) return Pending::kDescend;
    }
    if (v->exhausted) continue;
    if (!sampled) {
      const double residual = probability - v->state.lambda * q;
      const bool in_mass = (!repeated || token == v->kept) && residual > 0.0;
      close_deterministic(in_mass ? residual : 0.0, v);
      if (token == v->kept) v->kept = -1;
      continue;
    }
    v->kept = repeated ? -1 : token;
    v->last = residual_after_child(v->state, kappa, true);
    // An inflow of 1 stays 1, and nobody asks for the residual of the last child.
    if (v->state.inflow < 1.0 || tree.next_sibling[c] >= 0) return Pending::kMass;
  }
  return Pending::kNothing;
}

// The sum over the vocabulary that a visit waits for.
SPECDEC_HD DrawTask pending_sum(const Tree& tree, const NodeVisit& v, Pending pending,
                                const LawRow& target, const LawRow& draft) {
  DrawTask task;
  task.residual = true;
  task.active = true;
  if (pending == Pending::kRestMass) {  // of the draft law alone
    task.target = in_token_order(draft.row);
    task.target_law = draft.law;
    task.coefficients = {1.0, 0.0};
    task.tried = excluded_tokens(tree, v);
    return task;
  }
  task.target = target.row;
  task.target_law = target.law;
  task.draft = in_token_order(draft.row);
  task.draft_law = draft.law;
  task.coefficients = v.last;
  // The last child drew its own token's residual down to 0, unless it was accepted anyway.
  task.tried = tried_tokens(tree, v);
  task.tried.count -= 1;
  task.no_draft = fixed_tokens(tree, v);
  return task;
}

// ---- traversal ---

// Takes a node as far as it goes without a sum over the vocabulary, and with it whatever is below
// it that something flows into. `nodes` has the visits; begin(v, inflow) makes one, and after
// wait(v, pending), which asks for a sum, that node's visit is in other hands.
template <typename Nodes>
SPECDEC_HD void flow_down(const VerifyTreeParams& p, Request* r, const Tree& tree, Nodes* nodes,
                          int64_t node) {
  int32_t top = static_cast<int32_t>(node);
  tree.below_on_stack[top] = -1;
  while (top >= 0) {
    const int32_t v = top;
    top = tree.below_on_stack[v];
    NodeVisit visit = nodes->visits[v];
    const int32_t from = visit.child;
    const Pending pending = advance(p, r, tree, false, &visit);
    nodes->visits[v] = visit;
    if (pending == Pending::kNothing) {
      tree.acceptance[v] = visit.state.inflow;
    } else {
      nodes->wait(v, pending);
    }
    // The child that waits for its own law has no inflow yet.
    const int32_t end = pending == Pending::kMass ? tree.next_sibling[visit.child] : visit.child;
    for (int32_t c = from; c != end; c = tree.next_sibling[c]) {
      if (!(tree.inflow[c] > 0.0)) continue;
      nodes->begin(c, tree.inflow[c]);
      tree.below_on_stack[c] = top;
      top = c;
    }
  }
}

// ---- the end ---

// Whether the coin of a node v > 0 accepts. The root always does.
SPECDEC_HD bool accepts_node(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                             int64_t v) {
  return tree.acceptance[v] >= 0.0 && tree_coin(p, r, v) < tree.acceptance[v];
}

// Marks the path from the root to a node that may win. Threads may mark paths side by side: whoever
// finds a part marked leaves the rest to the one who did.
SPECDEC_HD void mark_path(const VerifyTreeParams& p, const Tree& tree, int64_t v) {
  while (v > 0) {
    const int64_t parent = tree_parent(p, tree.b, v);
    if (lower(&tree.next_toward_winner[parent], static_cast<int32_t>(v)) != kNoNode) return;
    v = parent;
  }
}

// Of the nodes that paths were marked to, the first in post-order.
SPECDEC_HD int64_t find_winner(const Tree& tree) {
  int64_t v = 0;
  while (tree.next_toward_winner[v] != kNoNode) v = tree.next_toward_winner[v];
  return v;
}

// The extra token comes from the winner's residual, or its law where no child was tried.
SPECDEC_HD void finish_tree(const Tree& tree, const NodeVisit& v, const LawRow& target,
                            const LawRow& draft, Request* r) {
  draw_from_target(r, target);
  r->draw.token = v.winner;
  if (v.num_tried == 0 || v.winner >= 0) return;
  r->draw.residual = true;
  r->draw.draft = v.last.draft > 0.0 ? in_token_order(draft.row) : Row{};
  r->draw.draft_law = draft.law;
  r->draw.coefficients = v.last;
  r->draw.tried = tried_tokens(tree, v);
  r->draw.no_draft = fixed_tokens(tree, v);
}

// What accept_probs say of a node. Under traversal, what is below a node that nothing flows into
// has nothing either.
SPECDEC_HD float reported_acceptance(const VerifyTreeParams& p, const Tree& tree, int64_t v) {
  if (!tree.valid || v >= tree.count) return NAN;
  if (v == 0) return 1.0f;
  if (tree.acceptance[v] >= 0.0) return static_cast<float>(tree.acceptance[v]);
  if (p.rule != Rule::kTraversal) return NAN;
  while (v > 0 && tree.inflow[v] == kNotLookedAt) v = tree_parent(p, tree.b, v);
  return tree.inflow[v] == 0.0 ? 0.0f : NAN;
}

// What is said of all nodes, and of what is not accepted. Threads that share the work take every
// `step`-th place from `first` on.
SPECDEC_HD void write_nodes(const VerifyTreeParams& p, const Tree& tree, int64_t first = 0,
                            int64_t step = 1) {
  for (int64_t v = first; v < p.nodes; v += step) {
    const int64_t place = tree.b * p.nodes + v;
    p.out_tokens[place] = p.path[place] = -1;
    p.logprobs[place] = NAN;
    p.accept_probs[place] = reported_acceptance(p, tree, v);
  }
}

// After write_nodes: what is accepted. Returns how many tokens are.
SPECDEC_HD int64_t write_path(const VerifyTreeParams& p, const Tree& tree) {
  const int64_t first = tree.b * p.nodes;
  int64_t depth = 0;
  for (int32_t v = tree.next_toward_winner[0]; v != kNoNode; v = tree.next_toward_winner[v]) {
    p.path[first + depth] = v;
    p.out_tokens[first + depth] = tree_token(p, tree.b, v);
    p.logprobs[first + depth] = tree.log_p[v];
    ++depth;
  }
  p.num_accepted[tree.b] = static_cast<int32_t>(depth);
  return depth;
}

// After both: everything else but the extra token.
SPECDEC_HD void write_outcome(const VerifyTreeParams& p, const Request& r) {
  p.status[r.b] = r.status;
  if (!r.has_target_law) p.out_tokens[r.b * p.nodes + r.accepted] = 0;
}

SPECDEC_HD void write_tree_token(const VerifyTreeParams& p, int64_t b, int64_t accepted,
                                 int64_t token, double log_probability) {
  const int64_t place = b * p.nodes + accepted;
  p.out_tokens[place] = token;
  p.logprobs[place] = static_cast<float>(log_probability);
}

SPECDEC_HD void write_tree_token(const VerifyTreeParams& p, int64_t b, int64_t accepted,
                                 const DrawTask& draw) {
  write_tree_token(p, b, accepted, draw.token,
                   target_log_probability({draw.target, draw.target_law}, draw.token));
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
