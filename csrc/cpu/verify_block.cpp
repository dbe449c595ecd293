// Block verification (Sun et al., arXiv 2403.10444): the recursion of core/recursion.h on a chain.
//
// Grid: all rows of a slice of requests at once, over threads. Reads every row for its law, target
// and draft rows of undecided nodes again for the residual mass, and the winner's for the draw.
#include "chain_rules.h"
#include "held_rows.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// The chain of one request while its nodes are decided.
struct Chain {
  LawTask* targets;  // [gamma + 1]
  LawTask* drafts;   // [gamma]
  NodeFacts* facts;  // [gamma + 1]
  double* inflow;    // [gamma + 1], w of the paper
  int64_t leaf = 0;
};

void flow_down(const VerifyParams& p, Request* r, Chain* chain) {
  chain->inflow[0] = 1.0;
  for (int64_t i = 0;; ++i) {
    chain->facts[i] = node_facts(p, *r, i, chain->targets[i], chain->drafts[i], 0.0);
    const BlockStep step = block_step(r, chain->inflow[i], chain->facts[i]);
    chain->leaf = i;
    if (step.leaf) break;
    chain->inflow[i + 1] = step.outgoing;
  }
}

void flip_coins(const VerifyParams& p, Request* r, const Chain& chain, const double* masses) {
  float* accept_probs = p.accept_probs + r->b * p.gamma;
  for (int64_t i = 1; i <= chain.leaf; ++i) {
    const NodeFacts& facts = chain.facts[i];
    const double acceptance =
        i == chain.leaf ? chain.inflow[i]
                        : block_acceptance(chain.inflow[i], facts.sampled, masses[i], facts.p);
    accept_probs[i - 1] = static_cast<float>(acceptance);
    if (block_accepts(p, *r, i, acceptance)) r->accepted = i;
  }
  // Nothing flows into a leaf because p was 0 before it: below, nothing can be accepted.
  for (int64_t i = chain.leaf; i < r->drafted && chain.inflow[chain.leaf] == 0.0; ++i) {
    accept_probs[i] = 0.0f;
  }
}

void decide(const VerifyParams& p, Request* r, const Chain& chain, const double* masses) {
  flip_coins(p, r, chain, masses);
  for (int64_t i = 0; i < r->accepted; ++i) {
    p.logprobs[r->b * (p.gamma + 1) + i] = chain.facts[i].log_p;
  }
  const int64_t winner = r->accepted;
  if (winner == chain.leaf) {
    draw_from_target(r, chain.targets[winner]);
  } else {
    const NodeFacts& facts = chain.facts[winner];
    draw_from_residual(r, chain.targets[winner], chain.drafts[winner], column_at(p, r->b, winner),
                       facts.sampled, chain.inflow[winner]);
  }
}

}  // namespace

void verify_block(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n) {
  const int64_t nodes = p.gamma + 1;
  Buffer<LawTask> tasks(2 * n * nodes);
  Buffer<double> inflow(n * nodes), masses(n * nodes);
  Buffer<NodeFacts> facts(n * nodes);
  Buffer<Chain> chains(n);
  for (int64_t k = 0; k < n; ++k) {
    const Request& r = requests[k];
    Chain& chain = chains[k];
    chain = Chain{tasks.data() + 2 * k * nodes, tasks.data() + (2 * k + 1) * nodes,
                  facts.data() + k * nodes, inflow.data() + k * nodes};
    for (int64_t i = 0; i < nodes; ++i) {
      chain.targets[i] = LawTask();
      chain.drafts[i] = LawTask();
      if (i <= r.drafted)
        chain.targets[i] = LawTask(target_entries(p, pool, r.b, i), r.target_filters);
      if (wants_draft_row(p, r, i)) {
        chain.drafts[i] = LawTask(draft_entries(p, pool, r.b, i), r.draft_filters);
      }
    }
  }
  compute_laws(pool, tasks.data(), 2 * n * nodes);

  Buffer<DrawTask> residuals(n * nodes);
  Buffer<int64_t> places(n * nodes);
  int64_t num_residuals = 0;
  for (int64_t k = 0; k < n; ++k) {
    flow_down(p, &requests[k], &chains[k]);
    const Chain& chain = chains[k];
    for (int64_t i = 0; i < chain.leaf; ++i) {
      if (!needs_mass(i, chain.inflow[i], chain.facts[i].sampled)) continue;
      places[num_residuals] = k * nodes + i;
      residuals[num_residuals++] =
          block_residual(chain.inflow[i], chain.targets[i], chain.drafts[i]);
    }
  }
  Buffer<double> found(num_residuals);
  residual_masses(pool, residuals.data(), num_residuals, found.data());
  for (int64_t j = 0; j < num_residuals; ++j) masses[places[j]] = found[j];

  for (int64_t k = 0; k < n; ++k) {
    decide(p, &requests[k], chains[k], masses.data() + k * nodes);
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
