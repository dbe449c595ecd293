// One request of a verify call: its columns, coins, status and outcome, the same on every backend.
#pragma once

#include "draw_task.h"
#include "fixed_point.h"
#include "race.h"

namespace specdec {

// One draft position of one request.
struct Column {
  int64_t token;
  bool sampled;  // drawn from the draft's law; else deterministic
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

namespace SPECDEC_CPU_ISA {

SPECDEC_HD bool is_among(uint32_t rules, Rule rule) {
  return (rules >> static_cast<int>(rule) & 1) != 0;
}

SPECDEC_HD bool reads_draft_law(Rule rule) { return is_among(kRulesThatReadDraftLaw, rule); }
SPECDEC_HD bool takes_coins(Rule rule) { return is_among(kRulesThatTakeCoins, rule); }
SPECDEC_HD bool runs_races(Rule rule) { return is_among(kRulesThatRace, rule); }
SPECDEC_HD bool ignores_sampling(Rule rule) { return !takes_coins(rule) && !runs_races(rule); }

// Whether a law that the rule reads may have a filter.
template <typename Params>
SPECDEC_HD bool any_filters(const Params& p) {
  if (ignores_sampling(p.rule)) return false;
  return has_filter_arrays(p.target_sampling) ||
         (reads_draft_law(p.rule) && has_filter_arrays(p.draft_sampling));
}

// A kind as the caller gave it; by default sampled (1) where there is a draft law.
template <typename Params>
SPECDEC_HD int8_t given_kind(const Params& p, const Array<int8_t>& kinds, int64_t b, int64_t i) {
  if (kinds.data == nullptr) return p.draft.data != nullptr ? 1 : 0;
  return kinds.data[b * kinds.stride[0] + i * kinds.stride[1]];
}

SPECDEC_HD int8_t kind_at(const VerifyParams& p, int64_t b, int64_t i) {
  return given_kind(p, p.draft_kinds, b, i);
}

SPECDEC_HD Column column_at(const VerifyParams& p, int64_t b, int64_t i) {
  return {load_id(p.draft_tokens, b, i), kind_at(p, b, i) != 0};
}

SPECDEC_HD Row target_row(const VerifyParams& p, int64_t b, int64_t i) {
  return masked(row_at(p.target, b, i), p.mask, b, i);
}

SPECDEC_HD Row draft_row(const VerifyParams& p, int64_t b, int64_t i) {
  if (p.draft.data == nullptr) return Row{};
  if (kLists && p.lists.ids.data != nullptr) {
    return masked(listed_row(p.lists, b * p.gamma + i, p.draft.vocab), p.mask, b, i);
  }
  return mapped(masked(row_at(p.draft, b, i, p.draft_is_probs), p.mask, b, i), p.map);
}

// Whether the law of draft row i of a request is asked for at all.
SPECDEC_HD bool wants_draft_row(const VerifyParams& p, const Request& r, int64_t i) {
  return reads_draft_law(p.rule) && !r.greedy && i < r.drafted && column_at(p, r.b, i).sampled;
}

SPECDEC_HD double given_uniform(const Randomness& r, int64_t b, int64_t slot, bool* out_of_range) {
  const Array<double>& uniforms = r.uniforms;
  return clamp_uniform(uniforms.data[b * uniforms.stride[0] + slot * uniforms.stride[1]],
                       out_of_range);
}

// Uniform of a slot: the coin of draft token slot + 1, or the final draw (slot last).
SPECDEC_HD double slot_uniform(const Randomness& r, int64_t b, int64_t slot, int64_t last) {
  if (r.uniforms.data != nullptr) {
    bool ignored = false;
    return given_uniform(r, b, slot, &ignored);
  }
  return verify_uniform(r.seeds.data[b * r.seeds.stride[0]],
                        r.positions.data[b * r.positions.stride[0]], slot, last, r.stream);
}

SPECDEC_HD double uniform_at(const VerifyParams& p, int64_t b, int64_t slot) {
  return slot_uniform(p.randomness, b, slot, p.gamma);
}

// ---- opening ---

// What a column's id and kind alone say: usable, the end of the draft, or the end by an error.
enum class ColumnState : int8_t { kUsable, kEnd, kInvalid };

// `kinds`: how many there are, from 0 on.
template <typename Params>
SPECDEC_HD ColumnState token_state(const Params& p, int64_t token, int8_t kind, int8_t kinds) {
  const bool wider = p.map.ids.data == nullptr && p.draft.vocab > p.target.vocab;
  const int64_t ids = wider ? p.draft.vocab : p.target.vocab;
  if (token == -1) return ColumnState::kEnd;
  const bool known = token >= 0 && token < ids && kind >= 0 && kind < kinds;
  return known ? ColumnState::kUsable : ColumnState::kInvalid;
}

SPECDEC_HD ColumnState column_state(const VerifyParams& p, int64_t b, int64_t i) {
  return token_state(p, load_id(p.draft_tokens, b, i), kind_at(p, b, i), 2);
}

// The request's draft length, clamped.
SPECDEC_HD int64_t draft_length(const VerifyParams& p, int64_t b, int32_t* status) {
  if (p.draft_lengths.data == nullptr) return p.gamma;
  const int64_t given = load_id(p.draft_lengths, b, 0);
  const int64_t length = given < 0 ? 0 : given > p.gamma ? p.gamma : given;
  if (given != length) *status |= kParameterOutOfRange;
  return length;
}

template <typename Params>
SPECDEC_HD Filters target_filters_of(const Params& p, int64_t b) {
  if (!ignores_sampling(p.rule)) return filters_at(p.target_sampling, b, p.target.vocab);
  Filters greedy;
  greedy.temperature = 0.0;
  return greedy;
}

template <typename Params>
SPECDEC_HD Filters draft_filters_of(const Params& p, int64_t b) {
  if (p.draft.data == nullptr || p.draft_is_probs) return Filters{};
  return filters_at(p.draft_sampling, b, p.draft.vocab);
}

// A request before its columns are counted.
template <typename Params>
SPECDEC_HD Request begin_request(const Params& p, int64_t b) {
  Request r;
  r.b = b;
  r.target_filters = target_filters_of(p, b);
  r.greedy = is_greedy(r.target_filters);
  if (ignores_sampling(p.rule)) return r;
  r.draft_filters = draft_filters_of(p, b);
  const bool out_of_range = r.target_filters.out_of_range || r.draft_filters.out_of_range ||
                            (reads_draft_law(p.rule) && is_broken(p.map));
  if (out_of_range) r.status |= kParameterOutOfRange;
  return r;
}

// Whether the uniform of a slot, if given at all, lies in [0, 1).
SPECDEC_HD bool is_uniform_in_range(const Randomness& r, int64_t b, int64_t slot) {
  bool out_of_range = false;
  if (r.uniforms.data != nullptr) given_uniform(r, b, slot, &out_of_range);
  return !out_of_range;
}

// Takes the uniform of the final draw.
SPECDEC_HD void take_final_uniform(const VerifyParams& p, Request* r) {
  r->draw.u = r->greedy || !takes_coins(p.rule) ? 0.0 : uniform_at(p, r->b, p.gamma);
}

SPECDEC_HD Request open_request(const VerifyParams& p, int64_t b) {
  Request r = begin_request(p, b);
  const int64_t length = draft_length(p, b, &r.status);
  for (; r.drafted < length; ++r.drafted) {
    const ColumnState state = column_state(p, b, r.drafted);
    if (state == ColumnState::kInvalid) r.status |= kInvalidDraftToken;
    if (state != ColumnState::kUsable) break;
  }
  bool in_range = r.greedy || is_uniform_in_range(p.randomness, b, p.gamma);
  for (int64_t slot = 0; slot < r.drafted && !r.greedy; ++slot) {
    in_range &= is_uniform_in_range(p.randomness, b, slot);
  }
  if (!in_range) r.status |= kParameterOutOfRange;
  take_final_uniform(p, &r);
  return r;
}

// ---- probabilities of draft tokens ---

SPECDEC_HD Proposal proposal_of(const Column& column, const LawRow& draft) {
  if (!column.sampled) return {true, false, 1.0};
  const int64_t entry = entry_of_token(draft.row, column.token);
  if (!draft.law.valid || entry < 0) return {false, true, 0.0};
  const double q = law_probability(draft.law, row_value(draft.row, entry), entry);
  return {q > 0.0, !draft.law.point_mass, q};
}

SPECDEC_HD float target_log_probability(const LawRow& target, int64_t token) {
  return static_cast<float>(law_log_probability(target.law, row_value(target.row, token)));
}

// ---- the extra token ---

// It comes from the target's own law: bonus, or no draft token was tried here.
SPECDEC_HD void draw_from_target(Request* r, const LawRow& target) {
  r->has_target_law = target.law.valid;
  if (!target.law.valid) r->status |= kNoTargetLaw;
  r->draw.target = target.row;
  r->draw.target_law = target.law;
  r->draw.residual = false;
  r->draw.active = true;
}

// It replaces `column`'s, which was rejected at a node with this inflow.
SPECDEC_HD void draw_from_residual(Request* r, const LawRow& target, const LawRow& draft,
                                   const Column& column, bool sampled, double inflow) {
  draw_from_target(r, target);
  Node node;
  node.inflow = inflow;
  r->draw.residual = true;
  r->draw.draft = sampled ? in_token_order(draft.row) : Row{};
  r->draw.draft_law = draft.law;
  r->draw.coefficients = residual_after_child(node, 1.0, sampled);
  r->draw.excluded = column.token;
}

// ---- outputs ---

// Threads that share the work take every `step`-th place from `first` on.
SPECDEC_HD void clear_outputs(const VerifyParams& p, int64_t b, int64_t first = 0,
                              int64_t step = 1) {
  for (int64_t i = first; i <= p.gamma; i += step) {
    p.tokens[b * (p.gamma + 1) + i] = -1;
    p.logprobs[b * (p.gamma + 1) + i] = NAN;
    if (i < p.gamma) p.accept_probs[b * p.gamma + i] = NAN;
  }
}

// Everything that is known before the extra token is drawn.
SPECDEC_HD void write_accepted(const VerifyParams& p, const Request& r, int64_t first = 0,
                               int64_t step = 1) {
  int64_t* tokens = p.tokens + r.b * (p.gamma + 1);
  for (int64_t i = first; i < r.accepted; i += step) tokens[i] = load_id(p.draft_tokens, r.b, i);
  if (first != 0) return;
  p.num_accepted[r.b] = static_cast<int32_t>(r.accepted);
  p.status[r.b] = r.status;
  if (!r.has_target_law) tokens[r.accepted] = 0;
}

SPECDEC_HD void write_extra_token(const VerifyParams& p, int64_t b, int64_t accepted, int64_t token,
                                  double log_probability) {
  const int64_t place = b * (p.gamma + 1) + accepted;
  p.tokens[place] = token;
  p.logprobs[place] = static_cast<float>(log_probability);
}

SPECDEC_HD void write_extra_token(const VerifyParams& p, int64_t b, int64_t accepted,
                                  const DrawTask& draw) {
  write_extra_token(p, b, accepted, draw.token,
                    target_log_probability({draw.target, draw.target_law}, draw.token));
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
