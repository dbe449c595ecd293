// Rules that stop at their first failure: token, greedy, lenient, top_beta, typical.
//
// Grid: step i takes row i of every request that is still accepting, so that a row after the first
// rejection is never read and all threads work even on a single request. Reads, with a dense draft,
// 2 (accepted + 1) rows for the laws and 4 for the residual draw.
#include "chain.h"
#include "relaxed_pass.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// A request on its way down the chain.
struct Walk {
  bool walking = true;
  bool decided = false;  // still walking only to report the remaining accept_probs
};

struct Step {
  LawTask* targets;
  LawTask* drafts;
  double* extra;  // rank (top_beta) or entropy (typical)
};

bool wants_draft_row(const VerifyParams& p, const Request& r, int64_t i) {
  return reads_draft_law(p.rule) && !r.greedy && i < r.drafted && column_at(p, r.b, i).sampled;
}

struct Verdict {
  bool accepted;
  double probability;
};

Verdict certain(bool accepted) { return {accepted, accepted ? 1.0 : 0.0}; }

Verdict judge(const VerifyParams& p, const Request& r, int64_t i, int64_t token,
              const LawTask& target, const Proposal& proposal, double extra) {
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

// Takes one request through node i; sets walk->walking to whether it goes on to node i + 1.
void visit(const VerifyParams& p, Request* r, Walk* walk, int64_t i, const LawTask& target,
           const LawTask& draft, double extra) {
  walk->walking = false;
  const bool reporting = walk->decided;
  if (i >= r->drafted || !target.law.valid) {
    if (!reporting) draw_from_target(r, target);
    return;
  }
  const Column column = column_at(p, r->b, i);
  const bool q_matters = reads_draft_law(p.rule) && !r->greedy;
  const Proposal proposal = q_matters ? proposal_of(column, draft) : Proposal{true, false, 1.0};
  if (!proposal.usable) {
    r->status |= kNoDraftLaw;
    if (!reporting) draw_from_target(r, target);
    return;
  }
  const Verdict verdict = judge(p, *r, i, column.token, target, proposal, extra);
  p.accept_probs[r->b * p.gamma + i] = static_cast<float>(verdict.probability);
  if (reporting) {
    walk->walking = true;
  } else if (verdict.accepted) {
    p.logprobs[r->b * (p.gamma + 1) + i] = target_log_probability(target, column.token);
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

void measure_relaxed(const VerifyParams& p, const ThreadPool& pool, const Request* requests,
                     const int64_t* walkers, int64_t n, int64_t i, const Step& step) {
  if (p.rule != Rule::kTopBeta && p.rule != Rule::kTypical) return;
  Buffer<int64_t> tokens(n);
  Buffer<bool> active(n);
  for (int64_t k = 0; k < n; ++k) {
    const Request& r = requests[walkers[k]];
    active[k] = i < r.drafted;
    tokens[k] = active[k] ? column_at(p, r.b, i).token : -1;
  }
  if (p.rule == Rule::kTopBeta) {
    count_greater(pool, step.targets, tokens.data(), n, step.extra);
  } else {
    entropies(pool, step.targets, active.data(), n, step.extra);
  }
}

}  // namespace

void verify_stepwise(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n) {
  Buffer<Walk> walks(n);
  Buffer<int64_t> walkers(n);
  Buffer<LawTask> tasks(2 * n);
  Buffer<double> extra(n);
  for (int64_t k = 0; k < n; ++k) walks[k] = Walk{};
  for (int64_t i = 0; i <= p.gamma; ++i) {
    int64_t walking = 0;
    for (int64_t k = 0; k < n; ++k) {
      if (walks[k].walking) walkers[walking++] = k;
    }
    if (walking == 0) break;
    const Step step{tasks.data(), tasks.data() + walking, extra.data()};
    for (int64_t k = 0; k < walking; ++k) {
      const Request& r = requests[walkers[k]];
      step.targets[k] = LawTask{target_row(p, r.b, i), r.target_filters, false, {}};
      step.drafts[k] = LawTask{};
      if (wants_draft_row(p, r, i)) {
        step.drafts[k] = LawTask{draft_row(p, r.b, i), r.draft_filters, false, {}};
      }
    }
    compute_laws(pool, tasks.data(), 2 * walking);
    measure_relaxed(p, pool, requests, walkers.data(), walking, i, step);
    for (int64_t k = 0; k < walking; ++k) {
      visit(p, &requests[walkers[k]], &walks[walkers[k]], i, step.targets[k], step.drafts[k],
            step.extra[k]);
    }
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
