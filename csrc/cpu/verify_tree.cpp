// Tree verification: every node's law, then the recursion of core/tree.h over the nodes.
//
// Traversal. Grid: all rows of a slice of requests at once over threads, then wave after wave of
// the sums that nodes wait for; a node's children go on while it waits. Reads every row once for
// its law, and the rows of a node once more for each child that was drawn (none for the last one
// where nothing can be lost). Stepwise (all other rules). Grid: step by step, a node of every
// request; only rows on the path are read. Scratch is O(rows of a slice x tiles). Numerics: as
// verify.cpp.
#include "../core/tree.h"
#include "draw.h"
#include "kernels.h"
#include "race.h"
#include "token_lists.h"
#include "token_map.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// One request while its tree is verified. Laws and visits are those of its nodes.
struct Job {
  Request request;
  Tree tree;
  LawTask* targets;   // [N]
  LawTask* drafts;    // [N] of a node's children
  NodeVisit* visits;  // [N]
  int64_t winner;
};

// Everything that the jobs of a slice point into.
class Slice {
 public:
  Slice(const VerifyTreeParams& p, int64_t begin, int64_t n)
      : count(n),
        jobs(n),
        laws_(2 * n * p.nodes),
        visits_(n * p.nodes),
        links_(TreeMemory::kLinks * n * p.nodes),
        tokens_(TreeMemory::kTokens * n * p.nodes),
        numbers_(TreeMemory::kNumbers * n * p.nodes),
        log_p_(n * p.nodes) {
    const TreeMemory memory{links_.data(), tokens_.data(), numbers_.data(), log_p_.data()};
    for (int64_t k = 0; k < n; ++k) {
      Job& job = jobs[k];
      const int64_t first = k * p.nodes;
      job.tree = tree_in(memory, p.nodes, k);
      job.targets = laws_.data() + 2 * first;
      job.drafts = job.targets + p.nodes;
      job.visits = visits_.data() + first;
      job.winner = 0;
      job.request = open_tree(p, begin + k, &job.tree);
    }
  }
  int64_t count;
  Buffer<Job> jobs;

 private:
  Buffer<LawTask> laws_;
  Buffer<NodeVisit> visits_;
  Buffer<int32_t> links_;
  Buffer<int64_t> tokens_;
  Buffer<double> numbers_;
  Buffer<float> log_p_;
};

// A node of a job.
struct Place {
  int64_t job;
  int64_t node;
};

// Laws of some nodes.
void find_laws(const VerifyTreeParams& p, const ThreadPool& pool, const Slice& slice,
               const Place* places, int64_t n) {
  Buffer<LawTask> tasks(2 * n);
  for (int64_t i = 0; i < n; ++i) {
    const Job& job = slice.jobs[places[i].job];
    const Request& r = job.request;
    const int64_t v = places[i].node;
    tasks[2 * i] = LawTask(target_row(p, r.b, v), r.target_filters);
    tasks[2 * i + 1] = LawTask();
    if (wants_draft_row(p, r, job.tree, v)) {
      tasks[2 * i + 1] = LawTask(draft_row(p, r.b, v), r.draft_filters);
    }
  }
  compute_laws(pool, tasks.data(), 2 * n);
  for (int64_t i = 0; i < n; ++i) {
    const Job& job = slice.jobs[places[i].job];
    job.targets[places[i].node] = tasks[2 * i];
    job.drafts[places[i].node] = tasks[2 * i + 1];
  }
}

// A visit to a node of a job whose laws are known.
NodeVisit begin_at(const VerifyTreeParams& p, const Job& job, int64_t v, double inflow,
                   int64_t winner) {
  const Tree& tree = job.tree;
  for (int32_t c = tree.first_child[v]; c >= 0; c = tree.next_sibling[c]) {
    if (tree.inflow[c] != kUnreachable) {
      read_entries(p, tree, c, job.targets[v].row, job.drafts[v].row);
      look_at_token(p, tree, c, job.targets[v], job.drafts[v]);
      find_log_probability(p, tree, c, job.targets[v]);
    }
  }
  return begin_visit(p, job.request, tree, v, inflow, job.targets[v], job.drafts[v], winner);
}

// A visit that waits for a sum.
struct Waiting {
  Place place;
  Pending pending;
};

void find_sums(const ThreadPool& pool, const Slice& slice, const Waiting* waiting, int64_t n) {
  Buffer<DrawTask> tasks(n);
  Buffer<double> sums(n);
  for (int64_t i = 0; i < n; ++i) {
    const Job& job = slice.jobs[waiting[i].place.job];
    const int64_t v = waiting[i].place.node;
    tasks[i] =
        pending_sum(job.tree, job.visits[v], waiting[i].pending, job.targets[v], job.drafts[v]);
  }
  residual_masses(pool, tasks.data(), n, sums.data());
  for (int64_t i = 0; i < n; ++i) {
    const Job& job = slice.jobs[waiting[i].place.job];
    NodeVisit* visit = &job.visits[waiting[i].place.node];
    if (waiting[i].pending == Pending::kMass) {
      take_mass(job.tree, sums[i], visit);
    } else {
      visit->rest_mass = sums[i];
    }
  }
}

// ---- traversal ---

// The nodes of a job while they flow down; lists the visits that wait.
struct Flow {
  const VerifyTreeParams& p;
  const Job& job;
  int64_t k;  // the job's number
  Waiting* waiting;
  NodeVisit* visits;
  int64_t num_waiting = 0;

  void begin(int64_t v, double inflow) { visits[v] = begin_at(p, job, v, inflow, -1); }
  void wait(int64_t v, Pending pending) { waiting[num_waiting++] = {{k, v}, pending}; }
};

// Returns how many visits wait afterwards.
int64_t flow_on(const VerifyTreeParams& p, Job* job, int64_t k, int64_t node, Waiting* waiting) {
  Flow flow{p, *job, k, waiting, job->visits};
  flow_down(p, &job->request, job->tree, &flow, node);
  return flow.num_waiting;
}

void traverse(const VerifyTreeParams& p, const ThreadPool& pool, Slice* slice) {
  const int64_t n = slice->count;
  Buffer<Place> places(n * p.nodes);
  int64_t num_places = 0;
  for (int64_t k = 0; k < n; ++k) {
    for (int64_t v = 0; v < slice->jobs[k].tree.count; ++v) {
      if (slice->jobs[k].tree.inflow[v] != kUnreachable) places[num_places++] = {k, v};
    }
  }
  find_laws(p, pool, *slice, places.data(), num_places);

  Buffer<Waiting> waiting(n * p.nodes), next(n * p.nodes);
  int64_t num_waiting = 0;
  for (int64_t k = 0; k < n; ++k) {
    Job& job = slice->jobs[k];
    job.visits[0] = begin_at(p, job, 0, 1.0, -1);
    num_waiting += flow_on(p, &job, k, 0, waiting.data() + num_waiting);
  }
  while (num_waiting > 0) {
    find_sums(pool, *slice, waiting.data(), num_waiting);
    int64_t still = 0;
    for (int64_t i = 0; i < num_waiting; ++i) {
      const Place place = waiting[i].place;
      still += flow_on(p, &slice->jobs[place.job], place.job, place.node, next.data() + still);
    }
    for (int64_t i = 0; i < still; ++i) waiting[i] = next[i];
    num_waiting = still;
  }
  for (int64_t k = 0; k < n; ++k) {
    Job& job = slice->jobs[k];
    for (int64_t v = 1; v < job.tree.count; ++v) {
      if (accepts_node(p, job.request, job.tree, v)) mark_path(p, job.tree, v);
    }
    job.winner = find_winner(job.tree);
  }
}

// ---- stepwise rules ---

// Coupled: the tokens that the target emits at the nodes where the jobs stand.
void find_winners(const VerifyTreeParams& p, const ThreadPool& pool, const Slice& slice,
                  const Place* places, int64_t n, int64_t* winners) {
  Buffer<RaceTask> races(n);
  for (int64_t i = 0; i < n; ++i) {
    const Job& job = slice.jobs[places[i].job];
    const int64_t v = places[i].node;
    const RowLaw& law = job.targets[v].law;
    const Race race = race_of(p.randomness, job.request.b, depth_of(p, job.request.b, v));
    races[i] = RaceTask(job.targets[v], race, law.valid && !law.point_mass);
  }
  run_races(pool, races.data(), n);
  for (int64_t i = 0; i < n; ++i) winners[i] = races[i].winner;
}

// Stands at new nodes: finds their laws.
void arrive(const VerifyTreeParams& p, const ThreadPool& pool, Slice* slice, const Place* places,
            int64_t n) {
  find_laws(p, pool, *slice, places, n);
  Buffer<int64_t> winners(n);
  for (int64_t i = 0; i < n; ++i) winners[i] = -1;
  if (runs_races(p.rule)) {
    find_winners(p, pool, *slice, places, n, winners.data());
  }
  for (int64_t i = 0; i < n; ++i) {
    const Job& job = slice->jobs[places[i].job];
    const int64_t v = places[i].node;
    job.visits[v] = begin_at(p, job, v, 1.0, winners[i]);
  }
}

void descend(const VerifyTreeParams& p, const ThreadPool& pool, Slice* slice) {
  const int64_t n = slice->count;
  Buffer<Place> arriving(n);
  Buffer<int64_t> active(n);
  Buffer<Waiting> waiting(n);
  int64_t num_arriving = n, num_active = n;
  for (int64_t k = 0; k < n; ++k) {
    arriving[k] = {k, 0};
    active[k] = k;
  }
  while (num_active > 0) {
    arrive(p, pool, slice, arriving.data(), num_arriving);
    num_arriving = 0;
    int64_t num_waiting = 0, still = 0;
    for (int64_t i = 0; i < num_active; ++i) {
      Job& job = slice->jobs[active[i]];
      const int64_t v = job.winner;
      const Pending pending = advance(p, &job.request, job.tree, true, &job.visits[v]);
      if (pending == Pending::kNothing) continue;
      if (pending == Pending::kDescend) {
        job.winner = job.visits[v].child;
        arriving[num_arriving++] = {active[i], job.winner};
      } else {
        waiting[num_waiting++] = {{active[i], v}, pending};
      }
      active[still++] = active[i];
    }
    num_active = still;
    find_sums(pool, *slice, waiting.data(), num_waiting);
  }
  for (int64_t k = 0; k < n; ++k) mark_path(p, slice->jobs[k].tree, slice->jobs[k].winner);
}

// ---- outputs ---

// log softmax of the raw rows at T = 1, for everything emitted.
void write_raw_logprobs(const VerifyTreeParams& p, const ThreadPool& pool, const Slice& slice) {
  Buffer<LawTask> tasks(slice.count * p.nodes);
  Buffer<int64_t> places(slice.count * p.nodes);
  int64_t n = 0;
  for (int64_t k = 0; k < slice.count; ++k) {
    const Job& job = slice.jobs[k];
    const int64_t b = job.request.b;
    for (int64_t i = 0; i <= p.num_accepted[b]; ++i) {
      const int64_t v = i == 0 ? 0 : p.path[b * p.nodes + i - 1];
      tasks[n] = LawTask(target_row(p, b, v), Filters{});
      places[n++] = b * p.nodes + i;
    }
  }
  compute_laws(pool, tasks.data(), n);
  for (int64_t j = 0; j < n; ++j) {
    if (!tasks[j].law.valid) continue;
    p.logprobs[places[j]] = target_log_probability(tasks[j], p.out_tokens[places[j]]);
  }
}

void verify_slice(const VerifyTreeParams& p, const ThreadPool& pool, int64_t begin, int64_t n) {
  Slice slice(p, begin, n);
  if (p.rule == Rule::kTraversal) {
    traverse(p, pool, &slice);
  } else {
    descend(p, pool, &slice);
  }
  Buffer<DrawTask> draws(n);
  for (int64_t k = 0; k < n; ++k) {
    Job& job = slice.jobs[k];
    const int64_t v = job.winner;
    finish_tree(job.tree, job.visits[v], job.targets[v], job.drafts[v], &job.request);
    draws[k] = job.request.draw;
  }
  draw_tokens(pool, draws.data(), n);
  for (int64_t k = 0; k < n; ++k) {
    Request& r = slice.jobs[k].request;
    write_nodes(p, slice.jobs[k].tree);
    r.accepted = write_path(p, slice.jobs[k].tree);
    write_outcome(p, r);
    if (r.has_target_law) write_tree_token(p, r.b, r.accepted, draws[k]);
  }
  if (p.raw_logprobs) write_raw_logprobs(p, pool, slice);
}

}  // namespace

void verify_tree(const VerifyTreeParams& given, const ThreadPool& pool) {
  VerifyTreeParams p = given;
  const MapStorage map(&p.map);
  const ListStorage lists(&p.lists, p.draft, p.batch, pool);
  const int64_t slice = requests_per_slice(p.target, 2 * p.nodes);
  for (int64_t begin = 0; begin < p.batch; begin += slice) {
    verify_slice(p, pool, begin, begin + slice < p.batch ? slice : p.batch - begin);
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
