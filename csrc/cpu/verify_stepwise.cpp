// Rules that stop at their first failure: all but block.
//
// Grid: step i takes row i of every request that is still accepting, so that a row after the first
// rejection is never read and all threads work even on a single request. Reads, with a dense draft,
// 2 (accepted + 1) rows for the laws and 4 for the residual draw. Ranks that hold parts of the rows
// take them all at once: looking at one costs them an exchange, and looking at all no more.
#include "chain_rules.h"
#include "held_rows.h"
#include "race.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

struct Step {
  LawTask* targets;
  LawTask* drafts;
};

Step step_tasks(const VerifyParams& p, const ThreadPool& pool, const Request* requests,
                const int64_t* active, int64_t n, int64_t i, LawTask* tasks) {
  const Step step{tasks, tasks + n};
  for (int64_t k = 0; k < n; ++k) {
    const Request& r = requests[active[k]];
    LawTask& target = step.targets[k];
    target = LawTask();
    step.drafts[k] = LawTask();
    if (i > r.drafted) continue;
    target = LawTask(target_entries(p, pool, r.b, i), r.target_filters);
    if (target.row.data != nullptr) target.want = extra_task(p, r, i, target.row);
    if (wants_draft_row(p, r, i)) {
      step.drafts[k] = LawTask(draft_entries(p, pool, r.b, i), r.draft_filters);
    }
  }
  return step;
}

// Coupled: who wins at the rows of `targets`, n for each of some steps from i on.
void find_winners(const VerifyParams& p, const ThreadPool& pool, const Request* requests,
                  const int64_t* active, int64_t n, int64_t i, int64_t steps, LawTask* targets) {
  if (!runs_races(p.rule)) return;
  // Targets and drafts of a step lie one after the other.
  const auto task_of = [&](int64_t j) -> LawTask& { return targets[j / n * 2 * n + j % n]; };
  Buffer<RaceTask> races(n * steps);
  for (int64_t j = 0; j < n * steps; ++j) {
    const LawTask& task = task_of(j);
    const bool has_race = task.want.kind == Extra::kWinner && task.law.valid;
    const Race race = race_of(p.randomness, requests[active[j % n]].b, i + j / n);
    races[j] = RaceTask(task, race, has_race);
  }
  run_races(pool, races.data(), n * steps);
  for (int64_t j = 0; j < n * steps; ++j) task_of(j).extra = static_cast<double>(races[j].winner);
}

// Takes a request through node i.
void visit_node(const VerifyParams& p, Request* r, Progress* progress, int64_t i,
                const LawTask& target, const LawTask& draft) {
  const NodeFacts facts = node_facts(p, *r, i, target, draft, target.extra);
  visit(p, r, progress, i, facts, target, draft);
}

// All nodes of all requests at once.
void verify_side_by_side(const VerifyParams& p, const ThreadPool& pool, Request* requests,
                         int64_t n) {
  const int64_t nodes = p.gamma + 1;
  Buffer<LawTask> tasks(2 * n * nodes);
  Buffer<int64_t> everyone(n);
  for (int64_t k = 0; k < n; ++k) everyone[k] = k;
  for (int64_t i = 0; i < nodes; ++i) {
    step_tasks(p, pool, requests, everyone.data(), n, i, tasks.data() + 2 * n * i);
  }
  compute_laws(pool, tasks.data(), 2 * n * nodes);
  find_winners(p, pool, requests, everyone.data(), n, 0, nodes, tasks.data());
  for (int64_t k = 0; k < n; ++k) {
    Progress progress;
    for (int64_t i = 0; progress.active; ++i) {
      const LawTask* target = tasks.data() + 2 * n * i + k;
      visit_node(p, &requests[k], &progress, i, target[0], target[n]);
    }
  }
}

}  // namespace

void verify_stepwise(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n) {
  if (pool.ranks != nullptr) return verify_side_by_side(p, pool, requests, n);
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
    const Step step = step_tasks(p, pool, requests, active.data(), num_active, i, tasks.data());
    compute_laws(pool, tasks.data(), 2 * num_active);
    find_winners(p, pool, requests, active.data(), num_active, i, 1, step.targets);
    for (int64_t k = 0; k < num_active; ++k) {
      visit_node(p, &requests[active[k]], &progress[active[k]], i, step.targets[k], step.drafts[k]);
    }
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
