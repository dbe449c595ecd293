// Rules that stop at their first failure: token, greedy, lenient, top_beta, typical.
//
// Grid: step i takes row i of every request that is still accepting, so that a row after the first
// rejection is never read and all threads work even on a single request. Reads, with a dense draft,
// 2 (accepted + 1) rows for the laws and 4 for the residual draw.
#include "chain_rules.h"
#include "relaxed_pass.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

struct Step {
  LawTask* targets;
  LawTask* drafts;
  double* extra;  // rank (top_beta) or entropy (typical)
};

void measure_relaxed(const VerifyParams& p, const ThreadPool& pool, const Request* requests,
                     const int64_t* walkers, int64_t n, int64_t i, const Step& step) {
  if (p.rule != Rule::kTopBeta && p.rule != Rule::kTypical) return;
  Buffer<int64_t> tokens(n);
  Buffer<bool> active(n);
  for (int64_t k = 0; k < n; ++k) {
    const Request& r = requests[walkers[k]];
    active[k] = i < r.drafted;
    tokens[k] = active[k] ? load_id(p.draft_tokens, r.b, i) : -1;
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
      step.targets[k] = LawTask(target_row(p, r.b, i), r.target_filters);
      step.drafts[k] = LawTask();
      if (wants_draft_row(p, r, i)) {
        step.drafts[k] = LawTask(draft_row(p, r.b, i), r.draft_filters);
      }
    }
    compute_laws(pool, tasks.data(), 2 * walking);
    measure_relaxed(p, pool, requests, walkers.data(), walking, i, step);
    for (int64_t k = 0; k < walking; ++k) {
      Request& r = requests[walkers[k]];
      const NodeFacts facts = node_facts(p, r, i, step.targets[k], step.drafts[k], step.extra[k]);
      visit(p, &r, &walks[walkers[k]], i, facts, step.targets[k], step.drafts[k], true);
    }
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
