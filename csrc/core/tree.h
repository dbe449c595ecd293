// Trees of draft tokens, one request: its topology, and the walk over the children of a node that
// all rules share (DESIGN section 4).
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

// Scratch memory of one request, all arrays by node.
struct Tree {
  int64_t b = 0;
  bool valid = true;
  int64_t count = 0;  // real nodes; padding comes after them
  int32_t* first_child = nullptr;
  int32_t* next_sibling = nullptr;  // both -1 where there is none
  int32_t* first_slot = nullptr;    // of a node's children in the two lists below
  int64_t* tried = nullptr;         // tokens of children that have been looked at
  int64_t* aside = nullptr;         // tokens that a child cannot have been drawn from
  double* inflow = nullptr;
  double* acceptance = nullptr;  // h of a node, or the chance that a walk went down to it
  float* log_p = nullptr;        // of the node's token, under its parent's law
};

// What a visit needs before it goes on.
enum class Pending : int8_t {
  kNothing,   // it has seen all children
  kDescend,   // a walk goes down to `child`
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
  double mass = -1.0;                   // what the residual with `last` sums to; negative: unknown
  double taken = 0.0;       // q that cannot be drawn: earlier siblings', or that of fixed tokens
  double rest_mass = -1.0;  // 1 - taken as a sum, where the difference would cancel
  int64_t num_tried = 0;
  int64_t num_aside = 0;
  int64_t winner = -1;  // coupled: the token that the target emits here
  bool has_rest = false;
  bool exhausted = false;  // no residual mass is left: no further child is accepted
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

// Where the draft law plays no part, a child is what was put there.
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
  const int64_t s = p.draft_row_of.data != nullptr ? load_id(p.draft_row_of, b, v) : v;
  if (s < 0 || s >= p.draft_rows) return Row{};
  return mapped(masked(row_at(p.draft, b, s, p.draft_is_probs), p.mask, b, v), p.map);
}

// Coins count as 0 where nothing is left to chance.
SPECDEC_HD double tree_coin(const VerifyTreeParams& p, const Request& r, int64_t v) {
  if (r.greedy || p.rule == TreeRule::kCoupled) return 0.0;
  return slot_uniform(p.randomness, r.b, v - 1, p.nodes - 1);
}

// ---- topology ---

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

// Sampled children of one node share their kind, and only one is drawn from the rest.
SPECDEC_HD bool has_fine_kinds(const VerifyTreeParams& p, const Tree& tree) {
  for (int64_t v = 0; v < tree.count; ++v) {
    int8_t shared = 0;
    for (int32_t c = tree.first_child[v]; c >= 0; c = tree.next_sibling[c]) {
      const int8_t kind = kind_at(p, tree.b, c);
      if (kind == 0 || !is_known_kind(kind)) continue;
      const bool rest = kind == static_cast<int8_t>(ChildKind::kRest);
      if (shared != 0 && (kind != shared || rest)) return false;
      shared = kind;
    }
  }
  return true;
}

// Marks the nodes that tokens can lead to; what is below an id that is no token is never read.
SPECDEC_HD void find_reachable(const VerifyTreeParams& p, Tree* tree, Request* r) {
  bool fine = r->greedy || is_uniform_fine(p.randomness, r->b, p.nodes - 1);
  tree->inflow[0] = kNotLookedAt;
  for (int64_t v = 1; v < tree->count; ++v) {
    tree->inflow[v] = kUnreachable;
    if (tree->inflow[tree_parent(p, r->b, v)] == kUnreachable) continue;
    const ColumnState state = node_state(p, r->b, v);
    if (state == ColumnState::kInvalid) r->status |= kInvalidDraftToken;
    if (state != ColumnState::kUsable) continue;
    tree->inflow[v] = kNotLookedAt;
    fine = fine && (r->greedy || is_uniform_fine(p.randomness, r->b, v - 1));
  }
  if (!fine) r->status |= kParameterOutOfRange;
}

SPECDEC_HD Request open_tree(const VerifyTreeParams& p, int64_t b, Tree* tree) {
  Request r = begin_request(p, b);
  tree->b = b;
  tree->count = tree_size(p.parents, b, p.nodes);
  tree->valid = tree->count > 0;
  if (!tree->valid) tree->count = 1;
  link_children(p, tree);
  if (tree->valid && !has_fine_kinds(p, *tree)) {
    tree->valid = false;
    tree->count = 1;
    tree->first_child[0] = -1;
  }
  if (!tree->valid) r.status |= kInvalidTree;
  for (int64_t v = 0; v < tree->count; ++v) tree->acceptance[v] = kNotLookedAt;
  find_reachable(p, tree, &r);
  const bool races = p.rule == TreeRule::kCoupled;
  r.draw.u = r.greedy || races ? 0.0 : slot_uniform(p.randomness, b, p.nodes - 1, p.nodes - 1);
  return r;
}

SPECDEC_HD int64_t depth_of(const VerifyTreeParams& p, int64_t b, int64_t v) {
  int64_t depth = 0;
  for (; v > 0; v = tree_parent(p, b, v)) ++depth;
  return depth;
}

// Whether some child of v asks for the draft law.
SPECDEC_HD bool wants_draft_row(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                                int64_t v) {
  for (int32_t c = tree.first_child[v]; c >= 0; c = tree.next_sibling[c]) {
    if (tree.inflow[c] != kUnreachable && kind_of(p, r, c) != ChildKind::kDeterministic)
      return true;
  }
  return false;
}

// ---- a node's children ---

SPECDEC_HD bool is_in(const TokenList& list, int64_t token) {
  for (int64_t i = 0; i < list.count; ++i) {
    if (list.tokens[i] == token) return true;
  }
  return false;
}

SPECDEC_HD TokenList tried_tokens(const Tree& tree, const NodeVisit& v) {
  return {tree.tried + tree.first_slot[v.node], v.num_tried};
}

// Earlier siblings drawn without replacement; or, beside a rest child, the deterministic ones.
SPECDEC_HD TokenList tokens_aside(const Tree& tree, const NodeVisit& v) {
  return {tree.aside + tree.first_slot[v.node], v.num_aside};
}

// Tokens that the draft law of a node with a rest child does not have.
SPECDEC_HD TokenList fixed_tokens(const Tree& tree, const NodeVisit& v) {
  return v.has_rest ? tokens_aside(tree, v) : TokenList{};
}

SPECDEC_HD void set_aside(const Tree& tree, int64_t token, double q, NodeVisit* v) {
  tree.aside[tree.first_slot[v->node] + v->num_aside++] = token;
  v->taken += q;
  v->rest_mass = -1.0;
}

// q of a token, as the children that were drawn saw it: beside a rest child, fixed tokens have
// none. 0 without a law.
SPECDEC_HD double draft_probability(const Tree& tree, const NodeVisit& v, const LawRow& draft,
                                    int64_t token) {
  if (draft.row.data == nullptr || !draft.law.valid) return 0.0;
  const int64_t entry = entry_of_token(draft.row, token);
  if (entry < 0 || is_in(fixed_tokens(tree, v), token)) return 0.0;
  return law_probability(draft.law, row_value(draft.row, entry), entry);
}

// Lists the deterministic children of a node that has a rest child, and what of q they take.
SPECDEC_HD void list_fixed(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                           const LawRow& draft, NodeVisit* v) {
  for (int32_t c = tree.first_child[v->node]; c >= 0; c = tree.next_sibling[c]) {
    v->has_rest |= tree.inflow[c] != kUnreachable && kind_of(p, r, c) == ChildKind::kRest;
  }
  if (!v->has_rest) return;
  for (int32_t c = tree.first_child[v->node]; c >= 0; c = tree.next_sibling[c]) {
    if (tree.inflow[c] == kUnreachable || kind_of(p, r, c) == ChildKind::kRest) continue;
    const int64_t token = tree_token(p, r.b, c);
    if (is_in(fixed_tokens(tree, *v), token)) continue;
    set_aside(tree, token, draft_probability(tree, *v, draft, token), v);
  }
}

// A visit with this inflow. Without a law of its own, a node is a leaf.
SPECDEC_HD NodeVisit begin_visit(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                                 int64_t node, double inflow, const LawRow& target,
                                 const LawRow& draft, int64_t winner) {
  NodeVisit v;
  v.node = static_cast<int32_t>(node);
  v.state.inflow = inflow;
  v.winner = winner;
  if (!target.law.valid) return v;
  v.child = tree.first_child[node];
  list_fixed(p, r, tree, draft, &v);
  return v;
}

SPECDEC_HD double target_probability(const NodeVisit& v, const LawRow& target, int64_t token) {
  if (v.winner >= 0) return token == v.winner ? 1.0 : 0.0;
  if (token >= target.row.vocab) return 0.0;
  return law_probability(target.law, row_value(target.row, token), token);
}

// Above this, 1 - taken has lost too many digits.
constexpr double kMaxTaken = 0.9375;

// Of the law that a child was drawn from, relative to q: 1 / kappa.
SPECDEC_HD double proposal_mass(ChildKind kind, const NodeVisit& v) {
  if (kind == ChildKind::kIid || kind == ChildKind::kDeterministic) return 1.0;
  return v.rest_mass >= 0.0 ? v.rest_mass : 1.0 - v.taken;
}

SPECDEC_HD bool needs_rest_mass(ChildKind kind, const NodeVisit& v, const LawRow& draft) {
  const bool reduced = kind == ChildKind::kWithoutReplacement || kind == ChildKind::kRest;
  return reduced && v.rest_mass < 0.0 && v.taken > kMaxTaken && !draft.law.point_mass;
}

// Takes a state; without residual mass or inflow it is the last one.
SPECDEC_HD void set_state(const Node& state, NodeVisit* v) {
  v->state = state;
  v->exhausted = !(state.mass > 0.0) || !(state.inflow > 0.0);
}

// After a child that was put there: the residual loses its token alone.
SPECDEC_HD void close_deterministic(double lost, NodeVisit* v) {
  const double left = v->state.mass - lost;
  v->last = residual_after_child(v->state, 1.0, false);
  v->mass = -1.0;
  set_state(close_child(v->state, v->last, v->last.target * (left > 0.0 ? left : 0.0)), v);
}

// After a child that was drawn, once the residual has been summed.
SPECDEC_HD void take_mass(const Tree& tree, double mass, NodeVisit* v) {
  v->mass = mass;
  set_state(close_child(v->state, v->last, mass), v);
  v->child = tree.next_sibling[v->child];
}

// Looks at the children of a node until all are done or something is needed. `walk`: flip each
// child's coin at once, and go down where it accepts.
SPECDEC_HD Pending advance(const VerifyTreeParams& p, Request* r, const Tree& tree, bool walk,
                           const LawRow& target, const LawRow& draft, NodeVisit* v) {
  for (; v->child >= 0; v->child = tree.next_sibling[v->child]) {
    const int32_t c = v->child;
    if (tree.inflow[c] == kUnreachable) continue;
    const ChildKind kind = kind_of(p, *r, c);
    const int64_t token = tree_token(p, r->b, c);
    bool sampled = kind != ChildKind::kDeterministic;
    const bool q_matters = sampled || v->state.lambda > 0.0;
    const double q = q_matters ? draft_probability(tree, *v, draft, token) : 0.0;
    if (q > 0.0 && needs_rest_mass(kind, *v, draft)) return Pending::kRestMass;
    const double drawn_from = proposal_mass(kind, *v);
    if (sampled && !(q > 0.0 && drawn_from > 0.0)) {
      r->status |= kNoDraftLaw;
      continue;
    }
    if (kind == ChildKind::kWithoutReplacement) set_aside(tree, token, q, v);
    sampled = sampled && !draft.law.point_mass;

    const double kappa = 1.0 / drawn_from;
    const double probability = target_probability(*v, target, token);
    const bool repeated = is_in(tried_tokens(tree, *v), token);
    const double inflow =
        repeated || v->exhausted ? 0.0 : child_inflow(v->state, probability, q, kappa, sampled);
    tree.inflow[c] = inflow;
    tree.log_p[c] = token < target.row.vocab ? target_log_probability(target, token) : NAN;
    tree.tried[tree.first_slot[v->node] + v->num_tried++] = token;
    if (walk) {
      tree.acceptance[c] = inflow;
      if (tree_coin(p, *r, c) < inflow) return Pending::kDescend;
    }
    if (v->exhausted) continue;
    if (!sampled) {
      const double residual = probability - v->state.lambda * q;
      close_deterministic(repeated || !(residual > 0.0) ? 0.0 : residual, v);
      continue;
    }
    v->last = residual_after_child(v->state, kappa, true);
    v->mass = -1.0;
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
    task.tried = tokens_aside(tree, v);
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

// ---- the end ---

// What is below a node that nothing flows into has nothing either.
SPECDEC_HD void drain(const VerifyTreeParams& p, const Tree& tree) {
  for (int64_t v = 1; v < tree.count; ++v) {
    const bool below = tree.inflow[tree_parent(p, tree.b, v)] == 0.0;
    if (below && tree.inflow[v] == kNotLookedAt) tree.inflow[v] = 0.0;
    if (tree.inflow[v] == 0.0) tree.acceptance[v] = 0.0;
  }
}

SPECDEC_HD int64_t first_leaf(const Tree& tree, int64_t v) {
  while (tree.first_child[v] >= 0) v = tree.first_child[v];
  return v;
}

// The first node in post-order whose coin accepts; the root always does.
SPECDEC_HD int64_t find_winner(const VerifyTreeParams& p, const Request& r, const Tree& tree) {
  int64_t v = first_leaf(tree, 0);
  while (v > 0) {
    if (tree.acceptance[v] >= 0.0 && tree_coin(p, r, v) < tree.acceptance[v]) return v;
    v = tree.next_sibling[v] >= 0 ? first_leaf(tree, tree.next_sibling[v]) : tree_parent(p, r.b, v);
  }
  return 0;
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
  r->draw.mass = v.mass;
}

// Everything but the extra token.
SPECDEC_HD void write_tree(const VerifyTreeParams& p, const Request& r, const Tree& tree,
                           int64_t winner) {
  const int64_t first = r.b * p.nodes;
  const int64_t depth = depth_of(p, r.b, winner);
  for (int64_t v = 0; v < p.nodes; ++v) {
    p.out_tokens[first + v] = p.path[first + v] = -1;
    p.logprobs[first + v] = NAN;
    const bool known = tree.valid && v > 0 && v < tree.count && tree.acceptance[v] >= 0.0;
    p.accept_probs[first + v] = known ? static_cast<float>(tree.acceptance[v]) : NAN;
  }
  if (tree.valid) p.accept_probs[first] = 1.0f;
  int64_t v = winner;
  for (int64_t k = depth - 1; k >= 0; --k) {
    p.path[first + k] = v;
    p.out_tokens[first + k] = tree_token(p, r.b, v);
    p.logprobs[first + k] = tree.log_p[v];
    v = tree_parent(p, r.b, v);
  }
  p.num_accepted[r.b] = static_cast<int32_t>(depth);
  p.status[r.b] = r.status;
  if (!r.has_target_law) p.out_tokens[first + depth] = 0;
}

SPECDEC_HD void write_tree_token(const VerifyTreeParams& p, int64_t b, int64_t accepted,
                                 const DrawTask& draw) {
  const int64_t place = b * p.nodes + accepted;
  p.out_tokens[place] = draw.token;
  p.logprobs[place] = target_log_probability({draw.target, draw.target_law}, draw.token);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
