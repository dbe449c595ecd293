// What the chain rules share: one request of a verify call, its columns, coins and outcome.
#pragma once

#include <cmath>

#include "../core/philox.h"
#include "../core/relaxed.h"
#include "draw.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// One draft position of one request.
struct Column {
  int64_t token;
  bool sampled;  // drawn from the draft's law, as opposed to put there
};

// How a draft token was proposed, once its law is known.
struct Proposal {
  bool usable;   // false: nothing can have been sampled from q here, the draft ends
  bool sampled;  // a sample of a point mass counts as deterministic
  double q;
};

struct Request {
  int64_t b = 0;
  bool greedy = false;  // T = 0, or a rule that only asks for the arg max
  Filters target_filters;
  Filters draft_filters;
  int64_t drafted = 0;  // usable columns by their ids alone; columns after are never read
  int64_t accepted = 0;
  int32_t status = 0;
  bool has_target_law = true;  // of the row that decided
  DrawTask draw;
};

inline bool reads_draft_law(Rule rule) {
  return rule == Rule::kBlock || rule == Rule::kToken || rule == Rule::kLenient;
}

inline bool ignores_sampling(Rule rule) { return rule == Rule::kGreedy || rule == Rule::kTopBeta; }

inline Column column_at(const VerifyParams& p, int64_t b, int64_t i) {
  const bool has_law = p.draft.data != nullptr;
  const int8_t kind =
      p.draft_kinds.data != nullptr
          ? p.draft_kinds.data[b * p.draft_kinds.stride[0] + i * p.draft_kinds.stride[1]]
          : static_cast<int8_t>(has_law);
  return {load_id(p.draft_tokens, b, i), kind != 0};
}

inline bool is_known_kind(const VerifyParams& p, int64_t b, int64_t i) {
  if (p.draft_kinds.data == nullptr) return true;
  const int8_t kind = p.draft_kinds.data[b * p.draft_kinds.stride[0] + i * p.draft_kinds.stride[1]];
  return kind == 0 || kind == 1;
}

inline Row target_row(const VerifyParams& p, int64_t b, int64_t i) {
  return row_at(p.target, b, i);
}

inline Row draft_row(const VerifyParams& p, int64_t b, int64_t i) {
  return p.draft.data != nullptr ? row_at(p.draft, b, i, p.draft_is_probs) : Row{};
}

// Uniform of a slot: the coin of draft token slot + 1, or the final draw (slot gamma).
inline double uniform_at(const VerifyParams& p, int64_t b, int64_t slot) {
  const Randomness& r = p.randomness;
  if (r.uniforms.data != nullptr) {
    bool ignored = false;
    return clamp_uniform(r.uniforms.data[b * r.uniforms.stride[0] + slot * r.uniforms.stride[1]],
                         &ignored);
  }
  return verify_uniform(r.seeds.data[b * r.seeds.stride[0]],
                        r.positions.data[b * r.positions.stride[0]], slot, p.gamma, r.stream);
}

inline Proposal proposal_of(const Column& column, const LawTask& draft) {
  if (!column.sampled) return {true, false, 1.0};
  if (!draft.law.valid || column.token >= draft.row.vocab) return {false, true, 0.0};
  const double q = law_probability(draft.law, row_value(draft.row, column.token), column.token);
  return {q > 0.0, !draft.law.point_mass, q};
}

// p(x) of a draft token, 0 for an id the target does not have.
inline double target_probability(const LawTask& target, int64_t token) {
  if (token >= target.row.vocab) return 0.0;
  return law_probability(target.law, row_value(target.row, token), token);
}

inline float target_log_probability(const LawTask& target, int64_t token) {
  return static_cast<float>(law_log_probability(target.law, row_value(target.row, token)));
}

// The extra token comes from the target's own law: bonus, or no draft token was tried here.
inline void draw_from_target(Request* r, const LawTask& target) {
  r->has_target_law = target.law.valid;
  if (!target.law.valid) r->status |= kNoTargetLaw;
  r->draw.target = target.row;
  r->draw.target_law = target.law;
  r->draw.residual = false;
  r->draw.active = true;
}

// The extra token replaces `column`'s, which was rejected at a node with this inflow.
inline void draw_from_residual(Request* r, const LawTask& target, const LawTask& draft,
                               const Column& column, bool sampled, double inflow) {
  draw_from_target(r, target);
  Node node;
  node.inflow = inflow;
  r->draw.residual = true;
  r->draw.draft = sampled ? draft.row : Row{};
  r->draw.draft_law = draft.law;
  r->draw.coefficients = residual_after_child(node, 1.0, sampled);
  r->draw.excluded = column.token;
}

// The rules. Each decides `accepted` and `draw` of every request, and writes accept_probs and the
// logprobs of accepted tokens.
void verify_stepwise(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n);
void verify_block(const VerifyParams& p, const ThreadPool& pool, Request* requests, int64_t n);

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
