// Block verification (Sun et al., arXiv 2403.10444): the recursion of core/recursion.h on a chain.
//
// Grid: all rows of a slice of requests at once, over threads. Reads every row for its law, target
// and draft rows of undecided nodes again for the residual mass, and the winner's for the draw.
#include "chain.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {
namespace {

// The chain of one request while its nodes are judged.
struct Chain {
  LawTask* targets;    // [gamma + 1]
  LawTask* drafts;     // [gamma]
  double* inflow;      // [gamma + 1], w of the paper
  double* acceptance;  // [gamma + 1], h of the paper
  bool* sampled;       // [gamma]
  int64_t length = 0;  // the leaf
};

// Inflows from the root to the leaf. The leaf is where the draft ends, where a row has no law, or
// where the inflow is 0: below, nothing can be accepted.
void flow_down(const VerifyParams& p, Request* r, Chain* chain) {
  chain->inflow[0] = 1.0;
  int64_t i = 0;
  for (; i < r->drafted; ++i) {
    if (!chain->targets[i].law.valid || chain->inflow[i] == 0.0) break;
    const Column column = column_at(p, r->b, i);
    const Proposal proposal =
        r->greedy ? Proposal{true, false, 1.0} : proposal_of(column, chain->drafts[i]);
    if (!proposal.usable) {
      r->status |= kNoDraftLaw;
      break;
    }
    Node node;
    node.inflow = chain->inflow[i];
    chain->sampled[i] = proposal.sampled;
    chain->inflow[i + 1] = child_inflow(node, target_probability(chain->targets[i], column.token),
                                        proposal.q, 1.0, proposal.sampled);
  }
  chain->length = i;
}

// Whether the residual mass at node i takes a pass over the vocabulary. The root always accepts and
// an inflow of 1 stays 1: neither asks for its mass.
bool needs_mass(const Chain& chain, int64_t i) {
  return i > 0 && i < chain.length && chain.inflow[i] < 1.0 && chain.sampled[i];
}

DrawTask residual_at(const Chain& chain, int64_t i) {
  Node node;
  node.inflow = chain.inflow[i];
  DrawTask task;
  task.target = chain.targets[i].row;
  task.target_law = chain.targets[i].law;
  task.draft = chain.drafts[i].row;
  task.draft_law = chain.drafts[i].law;
  task.residual = true;
  task.coefficients = residual_after_child(node, 1.0, true);
  task.active = true;
  return task;
}

void flow_up(const VerifyParams& p, const Request& r, Chain* chain, const double* masses) {
  for (int64_t i = 1; i < chain->length; ++i) {
    double mass = masses[i];
    if (!chain->sampled[i]) {
      const int64_t token = column_at(p, r.b, i).token;
      mass = chain->inflow[i] * (1.0 - target_probability(chain->targets[i], token));
    }
    Node node;
    node.inflow = chain->inflow[i];
    const ResidualCoefficients residual = residual_after_child(node, 1.0, chain->sampled[i]);
    chain->acceptance[i] = close_child(node, residual, mass).inflow;
  }
  chain->acceptance[chain->length] = chain->inflow[chain->length];
}

void decide(const VerifyParams& p, Request* r, const Chain& chain, const double* masses) {
  for (int64_t i = 1; i <= chain.length; ++i) {
    p.accept_probs[r->b * p.gamma + i - 1] = static_cast<float>(chain.acceptance[i]);
    const double u = r->greedy ? 0.0 : uniform_at(p, r->b, i - 1);
    if (u < chain.acceptance[i]) r->accepted = i;
  }
  if (chain.inflow[chain.length] == 0.0) {
    for (int64_t i = chain.length; i < r->drafted; ++i) p.accept_probs[r->b * p.gamma + i] = 0.0f;
  }
  for (int64_t i = 0; i < r->accepted; ++i) {
    p.logprobs[r->b * (p.gamma + 1) + i] =
        target_log_probability(chain.targets[i], column_at(p, r->b, i).token);
  }
  const int64_t winner = r->accepted;
  if (winner == chain.length) {
    draw_from_target(r, chain.targets[winner]);
  } else {
    draw_from_residual(r, chain.targets[winner], chain.drafts[winner], column_at(p, r->b, winner),
                       chain.sampled[winner], chain.inflow[winner]);
    // The rejected token was part of the sum, but has no residual: its inflow came out below 1.
    if (needs_mass(chain, winner)) r->draw.mass = masses[winner];
  }
}

}  // namespace

void verify_block(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n) {
  const int64_t nodes = p.gamma + 1;
  Buffer<LawTask> tasks(2 * n * nodes);
  Buffer<double> inflow(n * nodes), acceptance(n * nodes), masses(n * nodes);
  Buffer<bool> sampled(n * nodes);
  Buffer<Chain> chains(n);
  for (int64_t k = 0; k < n; ++k) {
    const Request& r = requests[k];
    Chain& chain = chains[k];
    chain =
        Chain{tasks.data() + 2 * k * nodes, tasks.data() + (2 * k + 1) * nodes,
              inflow.data() + k * nodes, acceptance.data() + k * nodes, sampled.data() + k * nodes};
    for (int64_t i = 0; i < nodes; ++i) {
      chain.targets[i] = LawTask{};
      chain.drafts[i] = LawTask{};
      if (i <= r.drafted) {
        chain.targets[i] = LawTask{target_row(p, r.b, i), r.target_filters, false, {}};
      }
      if (i < r.drafted && !r.greedy && column_at(p, r.b, i).sampled) {
        chain.drafts[i] = LawTask{draft_row(p, r.b, i), r.draft_filters, false, {}};
      }
    }
  }
  compute_laws(pool, tasks.data(), 2 * n * nodes);

  Buffer<DrawTask> residuals(n * nodes);
  Buffer<int64_t> places(n * nodes);
  int64_t num_residuals = 0;
  for (int64_t k = 0; k < n; ++k) {
    flow_down(p, &requests[k], &chains[k]);
    for (int64_t i = 0; i < nodes; ++i) {
      if (!needs_mass(chains[k], i)) continue;
      places[num_residuals] = k * nodes + i;
      residuals[num_residuals++] = residual_at(chains[k], i);
    }
  }
  Buffer<double> found(num_residuals);
  residual_masses(pool, residuals.data(), num_residuals, found.data());
  for (int64_t j = 0; j < num_residuals; ++j) masses[places[j]] = found[j];

  for (int64_t k = 0; k < n; ++k) {
    flow_up(p, requests[k], &chains[k], masses.data() + k * nodes);
    decide(p, &requests[k], chains[k], masses.data() + k * nodes);
  }
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
