// The chain rules on one request whose laws are known: node i is the law after i draft tokens.
//
// Stepwise rules (token, greedy, lenient, top_beta, typical) stop at their first failure. The block
// rule (Sun et al., arXiv 2403.10444) is the recursion of recursion.h: inflows down the chain, then
// an acceptance probability for each node from its residual mass.
#pragma once

#include "relaxed.h"
#include "request.h"

namespace specdec {

// A request on its way down the chain, under a stepwise rule.
struct Walk {
  bool walking = true;
  bool decided = false;  // still walking only to report the remaining accept_probs
};

struct Verdict {
  bool accepted;
  double probability;
};

// What the block rule finds at a node on its way down.
struct BlockStep {
  bool leaf;  // the draft ends here, or the row has no law, or nothing flows in
  bool sampled;
  double outgoing;  // inflow of the next node
};

namespace SPECDEC_CPU_ISA {

// ---- stepwise rules
// -------------------------------------------------------------------------------

SPECDEC_HD Verdict certain(bool accepted) { return {accepted, accepted ? 1.0 : 0.0}; }

// `extra` is the rank of the token less one (top_beta) or the entropy of the row (typical).
SPECDEC_HD Verdict judge(const VerifyParams& p, const Request& r, int64_t i, int64_t token,
                         const LawRow& target, const Proposal& proposal, double extra) {
  const bool in_vocab = token < target.row.vocab;
  const float logit = in_vocab ? row_value(target.row, token) : -INFINITY;
  if (p.rule == Rule::kTopBeta) {
    return certain(in_vocab && accepts_top_beta(static_cast<int64_t>(extra), logit, target.law.max,
                                                p.relaxed.beta, p.relaxed.tau));
  }
  if (r.greedy && p.rule == Rule::kLenient) {
    return certain(in_vocab && accepts_lenient_greedy(logit, target.law.max, p.relaxed.lenience));
  }
  const double probability = target_probability(target, token);
  if (r.greedy) return certain(probability > 0.0);
  if (p.rule == Rule::kTypical) {
    return certain(accepts_typical(probability, extra, p.relaxed.epsilon, p.relaxed.delta));
  }
  const double q = p.rule == Rule::kLenient ? p.relaxed.lenience * proposal.q : proposal.q;
  return {accepts_token(uniform_at(p, r.b, i), probability, q),
          token_accept_probability(probability, q)};
}

// Takes a request through node i; sets walk->walking to whether it goes on to node i + 1. `report`:
// write accept_probs and logprobs too.
SPECDEC_HD void visit(const VerifyParams& p, Request* r, Walk* walk, int64_t i,
                      const LawRow& target, const LawRow& draft, double extra, bool report) {
  walk->walking = false;
  if (i >= r->drafted || !target.law.valid) {
    if (!walk->decided) draw_from_target(r, target);
    return;
  }
  const Column column = column_at(p, r->b, i);
  const bool q_matters = reads_draft_law(p.rule) && !r->greedy;
  const Proposal proposal = q_matters ? proposal_of(column, draft) : Proposal{true, false, 1.0};
  if (!proposal.usable) {
    r->status |= kNoDraftLaw;
    if (!walk->decided) draw_from_target(r, target);
    return;
  }
  const Verdict verdict = judge(p, *r, i, column.token, target, proposal, extra);
  if (report) p.accept_probs[r->b * p.gamma + i] = static_cast<float>(verdict.probability);
  if (walk->decided) {
    walk->walking = true;
  } else if (verdict.accepted) {
    if (report) {
      p.logprobs[r->b * (p.gamma + 1) + i] = target_log_probability(target, column.token);
    }
    r->accepted = i + 1;
    walk->walking = true;
  } else {
    if (q_matters) {
      draw_from_residual(r, target, draft, column, proposal.sampled, 1.0);
    } else {
      draw_from_target(r, target);  // typical draws from p; a point mass has nothing else
    }
    walk->decided = true;
    walk->walking = p.full_accept_probs;
  }
}

// ---- block rule
// -----------------------------------------------------------------------------------

SPECDEC_HD Node node_with(double inflow) {
  Node node;
  node.inflow = inflow;
  return node;
}

SPECDEC_HD BlockStep block_step(const VerifyParams& p, Request* r, int64_t i, double inflow,
                                const LawRow& target, const LawRow& draft) {
  if (i >= r->drafted || !target.law.valid || inflow == 0.0) return {true, false, 0.0};
  const Column column = column_at(p, r->b, i);
  const Proposal proposal = r->greedy ? Proposal{true, false, 1.0} : proposal_of(column, draft);
  if (!proposal.usable) {
    r->status |= kNoDraftLaw;
    return {true, false, 0.0};
  }
  return {false, proposal.sampled,
          child_inflow(node_with(inflow), target_probability(target, column.token), proposal.q, 1.0,
                       proposal.sampled)};
}

// Whether the residual mass at node i (no leaf) takes a pass over the vocabulary. The root always
// accepts and an inflow of 1 stays 1: neither asks for its mass.
SPECDEC_HD bool needs_mass(int64_t i, double inflow, bool sampled) {
  return i > 0 && inflow < 1.0 && sampled;
}

// The residual whose mass decides at node i.
SPECDEC_HD DrawTask block_residual(double inflow, const LawRow& target, const LawRow& draft) {
  DrawTask task;
  task.target = target.row;
  task.target_law = target.law;
  task.draft = draft.row;
  task.draft_law = draft.law;
  task.residual = true;
  task.coefficients = residual_after_child(node_with(inflow), 1.0, true);
  task.active = true;
  return task;
}

// h_i at a node that is no leaf (h of a leaf is its inflow). `mass` counts for a sampled child.
SPECDEC_HD double block_acceptance(const VerifyParams& p, const Request& r, int64_t i,
                                   double inflow, bool sampled, double mass, const LawRow& target) {
  if (!sampled) {
    mass = inflow * (1.0 - target_probability(target, load_id(p.draft_tokens, r.b, i)));
  }
  const Node node = node_with(inflow);
  return close_child(node, residual_after_child(node, 1.0, sampled), mass).inflow;
}

// Flips the coin of node i > 0; the deepest node that accepts wins.
SPECDEC_HD void block_flip(const VerifyParams& p, Request* r, int64_t i, double acceptance,
                           bool report) {
  if (report) p.accept_probs[r->b * p.gamma + i - 1] = static_cast<float>(acceptance);
  const double u = r->greedy ? 0.0 : uniform_at(p, r->b, i - 1);
  if (u < acceptance) r->accepted = i;
}

// Below a leaf that nothing flows into, acceptance probabilities are 0.
SPECDEC_HD void report_below_leaf(const VerifyParams& p, const Request& r, int64_t leaf,
                                  double inflow) {
  if (inflow != 0.0) return;
  for (int64_t i = leaf; i < r.drafted; ++i) p.accept_probs[r.b * p.gamma + i] = 0.0f;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
