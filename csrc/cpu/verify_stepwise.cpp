// Rules that stop at their first failure: all but block.
//
// Grid: step i takes row i of every request that is still accepting, so that a row after the first
// rejection is never read and all threads work even on a single request. Reads, with a dense draft,
// 2 (accepted + 1) rows for the laws and 4 for the residual draw.
#include "chain_rules.h"
#include "race.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

struct Step {
  LawTask* targets;
  LawTask* drafts;
};

Step step_tasks(const VerifyParams& p, const Request* requests, const int64_t* active, int64_t n,
                int64_t i, LawTask* tasks) {
  const Step step{tasks, tasks + n};
  for (int64_t k = 0; k < n; ++k) {
    const Request& r = requests[active[k]];
    LawTask& target = step.targets[k];
    target = LawTask(target_row(p, r.b, i), r.target_filters);
    if (target.row.data != nullptr) target.want = extra_task(p, r, i, target.row);
    step.drafts[k] = LawTask();
    if (wants_draft_row(p, r, i)) step.drafts[k] = LawTask(draft_row(p, r.b, i), r.draft_filters);
  }
  return step;
}

// Coupled: who wins at row i of each active request.
void find_winners(const VerifyParams& p, const ThreadPool& pool, const Request* requests,
                  const int64_t* active, int64_t n, int64_t i, LawTask* targets) {
  Buffer<RaceTask> races(n);
  for (int64_t k = 0; k < n; ++k) {
    const bool has_race = targets[k].want.kind == Extra::kWinner && targets[k].law.valid;
    races[k] = RaceTask(targets[k], race_of(p.randomness, requests[active[k]].b, i), has_race);
  }
  run_races(pool, races.data(), n);
  for (int64_t k = 0; k < n; ++k) targets[k].extra = static_cast<double>(races[k].winner);
}

}  // namespace

void verify_stepwise(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n) {
  Buffer<Progress> progress(n);
  Buffer<int64_t> active(n);
  Buffer<LawTask> tasks(2 * n);
  for (int64_t k = 0; k < n; ++k) progress[k] = Progress{};
  for (int64_t i = 0; i <= p.gamma; ++i) {
    int64_t num_active = 0;
    for (int64_t k = 0; k < n; ++k) {
      if (progress[k].active) active[num_active++] = k;
    }
    if (num_active == 0) break;
    const Step step = step_tasks(p, requests, active.data(), num_active, i, tasks.data());
    compute_laws(pool, tasks.data(), 2 * num_active);
    if (runs_races(p.rule)) {
      find_winners(p, pool, requests, active.data(), num_active, i, step.targets);
    }
    for (int64_t k = 0; k < num_active; ++k) {
      Request& r = requests[active[k]];
      const NodeFacts facts =
          node_facts(p, r, i, step.targets[k], step.drafts[k], step.targets[k].extra);
      visit(p, &r, &progress[active[k]], i, facts, step.targets[k], step.drafts[k]);
    }
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
