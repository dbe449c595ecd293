// The chain rules on one request whose laws are known: node i is the law after i draft tokens.
//
// Stepwise rules (all but block) stop at their first failure. The block
// rule (Sun et al., arXiv 2403.10444) is the recursion of recursion.h: inflows down the chain, then
// an acceptance probability for each node from its residual mass.
#pragma once

#include "relaxed.h"
#include "request.h"

namespace specdec {

// A request on its way down the chain, under a stepwise rule.
struct Progress {
  bool active = true;
  bool decided = false;  // still active only to report the remaining accept_probs
};

struct Verdict {
  bool accepted;
  double probability;
};

// What one node says of the draft token after it, whatever happens before: nodes can be looked at
// side by side.
struct NodeFacts {
  bool ends;    // the draft is over here, or the row has no law
  bool usable;  // false: nothing can have been sampled from q here
  bool sampled;
  double p;
  double q;
  float log_p;
  Verdict verdict;  // under a stepwise rule
  int64_t winner;   // of the race, under the coupled rule, else -1
};

// What the block rule finds at a node on its way down.
struct BlockStep {
  bool leaf;  // the draft ends here, or the row has no law, or nothing flows in
  bool sampled;
  double outgoing;  // inflow of the next node
};

namespace SPECDEC_CPU_ISA {

// ---- stepwise rules ---

SPECDEC_HD Verdict certain(bool accepted) { return {accepted, accepted ? 1.0 : 0.0}; }

// What target row i (there is one) is asked for.
SPECDEC_HD ExtraTask extra_task(const VerifyParams& p, const Request& r, int64_t i,
                                const Row& target) {
  if (runs_races(p.rule) && !r.greedy) return {Extra::kWinner, 0.0f};
  if (i >= r.drafted) return {};
  const int64_t token = load_id(p.draft_tokens, r.b, i);
  if (p.rule == Rule::kTopBeta && token < target.vocab) {
    return {Extra::kRank, row_value(target, token)};
  }
  if (p.rule == Rule::kTypical && !r.greedy) return {Extra::kEntropy, 0.0f};
  return {};
}

// The test of the rules that read the draft's law, which take the coin that coin() gives, and of
// any rule at T = 0.
template <typename CoinOf>
SPECDEC_HD Verdict coin_test(const VerifyParams& p, const Request& r, float logit,
                             const RowLaw& target, const NodeFacts& facts, const CoinOf& coin) {
  if (r.greedy && p.rule == Rule::kLenient) {
    return certain(accepts_lenient_greedy(logit, target.max, p.relaxed.lenience));
  }
  if (r.greedy) return certain(facts.p > 0.0);
  const double q = p.rule == Rule::kLenient ? p.relaxed.lenience * facts.q : facts.q;
  return {accepts_token(coin(), facts.p, q), token_accept_probability(facts.p, q)};
}

// `extra` is what extra_task asked for.
SPECDEC_HD Verdict accept_test(const VerifyParams& p, const Request& r, int64_t i, float logit,
                               const LawRow& target, const NodeFacts& facts, double extra) {
  if (p.rule == Rule::kTopBeta) {
    return certain(accepts_top_beta(static_cast<int64_t>(extra), logit, target.law.max,
                                    p.relaxed.beta, p.relaxed.tau));
  }
  if (runs_races(p.rule) && !r.greedy) {
    return certain(load_id(p.draft_tokens, r.b, i) == facts.winner);
  }
  if (p.rule == Rule::kTypical && !r.greedy) {
    return certain(accepts_typical(facts.p, extra, p.relaxed.epsilon, p.relaxed.delta));
  }
  return coin_test(p, r, logit, target.law, facts, [&] { return uniform_at(p, r.b, i); });
}

SPECDEC_HD NodeFacts node_facts(const VerifyParams& p, const Request& r, int64_t i,
                                const LawRow& target, const LawRow& draft, double extra) {
  NodeFacts facts{true, true, false, 0.0, 1.0, NAN, {false, 0.0}, -1};
  if (runs_races(p.rule) && !r.greedy && target.law.valid) {
    facts.winner = static_cast<int64_t>(extra);
  }
  if (i >= r.drafted || !target.law.valid) return facts;
  facts.ends = false;
  const Column column = column_at(p, r.b, i);
  const bool q_matters = reads_draft_law(p.rule) && !r.greedy;
  const Proposal proposal = q_matters ? proposal_of(column, draft) : Proposal{true, false, 1.0};
  facts.usable = proposal.usable;
  facts.sampled = proposal.sampled;
  facts.q = proposal.q;
  // An id that the target does not have: p = 0, and no rule accepts it.
  if (column.token >= target.row.vocab) return facts;
  const float logit = row_value(target.row, column.token);
  facts.p = law_probability(target.law, logit, column.token);
  facts.log_p = static_cast<float>(law_log_probability(target.law, logit));
  if (p.rule != Rule::kBlock) facts.verdict = accept_test(p, r, i, logit, target, facts, extra);
  return facts;
}

// The extra token comes from the target's law, or has already won the race.
SPECDEC_HD void finish_with_target(Request* r, const LawRow& target, const NodeFacts& facts) {
  draw_from_target(r, target);
  r->draw.token = facts.winner;
}

// Whether there is no token after a node that could be tried.
SPECDEC_HD bool is_over(const NodeFacts& facts) { return facts.ends || !facts.usable; }

// Decides a request that goes down no further than node i.
SPECDEC_HD void stop_at(const VerifyParams& p, Request* r, int64_t i, const NodeFacts& facts,
                        const LawRow& target, const LawRow& draft) {
  r->accepted = i;
  if (is_over(facts) || !reads_draft_law(p.rule) || r->greedy) {
    finish_with_target(r, target, facts);  // typical draws from p; a point mass has nothing else
  } else {
    draw_from_residual(r, target, draft, column_at(p, r->b, i), facts.sampled, 1.0);
  }
}

SPECDEC_HD void report_probability(const VerifyParams& p, const Request& r, int64_t i,
                                   const NodeFacts& facts) {
  p.accept_probs[r.b * p.gamma + i] = static_cast<float>(facts.verdict.probability);
}

SPECDEC_HD void report_accepted(const VerifyParams& p, const Request& r, int64_t i,
                                const NodeFacts& facts) {
  p.logprobs[r.b * (p.gamma + 1) + i] = facts.log_p;
}

// Takes a request through node i; sets progress->active to whether it goes on to node i + 1.
SPECDEC_HD void visit(const VerifyParams& p, Request* r, Progress* progress, int64_t i,
                      const NodeFacts& facts, const LawRow& target, const LawRow& draft) {
  const bool over = is_over(facts);
  if (!facts.usable) r->status |= kNoDraftLaw;
  if (!over) report_probability(p, *r, i, facts);
  progress->active = !over;
  if (progress->decided) return;
  if (!over && facts.verdict.accepted) return report_accepted(p, *r, i, facts);
  stop_at(p, r, i, facts, target, draft);
  progress->decided = true;
  progress->active = !over && p.full_accept_probs;
}

// ---- block rule ---

SPECDEC_HD Node node_with(double inflow) {
  Node node;
  node.inflow = inflow;
  return node;
}

SPECDEC_HD BlockStep block_step(Request* r, double inflow, const NodeFacts& facts) {
  if (facts.ends || inflow == 0.0) return {true, false, 0.0};
  if (!facts.usable) {
    r->status |= kNoDraftLaw;
    return {true, false, 0.0};
  }
  return {false, facts.sampled,
          child_inflow(node_with(inflow), facts.p, facts.q, 1.0, facts.sampled)};
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
  task.draft = in_token_order(draft.row);
  task.draft_law = draft.law;
  task.residual = true;
  task.coefficients = residual_after_child(node_with(inflow), 1.0, true);
  task.active = true;
  return task;
}

// h_i at a node that is no leaf (h of a leaf is its inflow). `mass` counts for a sampled child;
// `p` is the probability of the child's token.
SPECDEC_HD double block_acceptance(double inflow, bool sampled, double mass, double p) {
  const Node node = node_with(inflow);
  return close_child(node, residual_after_child(node, 1.0, sampled),
                     sampled ? mass : inflow * (1.0 - p))
      .inflow;
}

// Whether the coin of node i > 0 accepts; the deepest node that accepts wins. At T = 0 there are no
// coins.
SPECDEC_HD bool block_accepts(const Request& r, double coin, double acceptance) {
  return (r.greedy ? 0.0 : coin) < acceptance;
}

SPECDEC_HD bool block_accepts(const VerifyParams& p, const Request& r, int64_t i,
                              double acceptance) {
  return block_accepts(r, r.greedy ? 0.0 : uniform_at(p, r.b, i - 1), acceptance);
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
