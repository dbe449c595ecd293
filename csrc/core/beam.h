// Beam search (docs/design.md, "Beam search"): how offers are scored and ordered, which of them
// live on, and when a level is decided.
#pragma once

#include "topology.h"

namespace specdec {
namespace SPECDEC_CPU_ISA {

// A token behind the live beam at a place.
struct Offer {
  float score;
  int64_t place;
  int64_t token;
};

// A live beam, or none: score -inf.
struct Beam {
  float score;
  int64_t node;  // kMissing: not in the tree, so that its row is not known
};

constexpr int64_t kMissing = -1;

SPECDEC_HD bool is_live(const Beam& beam) { return beam.score > -INFINITY; }
SPECDEC_HD bool is_missing(const Beam& beam) { return is_live(beam) && beam.node == kMissing; }

// The order of the flattened [places, V] table, best first.
SPECDEC_HD bool goes_before(const Offer& a, const Offer& b) {
  if (a.score != b.score) return a.score > b.score;
  return a.place != b.place ? a.place < b.place : a.token < b.token;
}

// What float32 log-probabilities are made of, of one row.
struct LogSoftmax {
  float max = 0.0f;
  float log_z = 0.0f;
};

// As transformers computes it: log_softmax, then a sum. For log-probabilities, which are added as
// they are, max and log_z are 0.
SPECDEC_HD float offer_score(const LogSoftmax& law, float logit, float score) {
  return ((logit - law.max) - law.log_z) + score;
}

// A logit such that whatever is below it has a lower score than `logit`: distinct logits may round
// to one score, and then the lower token goes first. Each of two scores is rounded three times, by
// 2^-24 of `size` at most; the difference here is 8 such units.
SPECDEC_HD float tied_from(const LogSoftmax& law, float logit, float score) {
  const double size = fabs(static_cast<double>(logit) - law.max) +
                      fabs(static_cast<double>(law.log_z)) + fabs(static_cast<double>(score));
  return static_cast<float>(logit - 0x1p-21 * size);
}

// The best `limit` offers of those that came, in order.
struct OfferList {
  Offer* offers;
  int64_t limit;
  int64_t count = 0;

  SPECDEC_HD bool takes(const Offer& offer) const {
    return count < limit || (limit > 0 && goes_before(offer, offers[limit - 1]));
  }

  // False: it is not among the best.
  SPECDEC_HD bool add(const Offer& offer) {
    if (!takes(offer)) return false;
    int64_t i = count < limit ? count++ : limit - 1;
    for (; i > 0 && goes_before(offer, offers[i - 1]); --i) offers[i] = offers[i - 1];
    offers[i] = offer;
    return true;
  }
};

// How many of the offers that end are among the first `width` of all: both lists are in order, and
// `live` has the first `width` of those that do not end.
SPECDEC_HD int64_t count_finished(const OfferList& live, const OfferList& ends, int64_t width) {
  int64_t before = 0;
  for (int64_t i = 0; i < ends.count; ++i) {
    while (before < live.count && goes_before(live.offers[before], ends.offers[i])) ++before;
    if (before + i >= width) return i;
  }
  return ends.count;
}

// The highest score of a missing beam; -inf: none is missing.
SPECDEC_HD float best_missing(const Beam* beams, int64_t width) {
  float best = -INFINITY;
  for (int64_t i = 0; i < width; ++i) {
    if (is_missing(beams[i]) && beams[i].score > best) best = beams[i].score;
  }
  return best;
}

// Whether the offers of missing beams cannot matter: no descendant has a score above its beam's.
SPECDEC_HD bool is_decided(const OfferList& live, float missing) {
  if (missing == -INFINITY) return true;
  return live.count == live.limit && live.offers[live.limit - 1].score > missing;
}

// Whether a level is looked at: some row is known, and by the subset rule all are.
SPECDEC_HD bool may_decide(const BeamVerifyParams& p, const Beam* beams) {
  bool known = false;
  for (int64_t i = 0; i < p.width; ++i) known |= is_live(beams[i]) && !is_missing(beams[i]);
  return known && (p.bound || best_missing(beams, p.width) == -INFINITY);
}

// ---- the tree ---

// The bit of `status` that a node's token or parent sets. In an invalid tree nobody has a child,
// and its tokens are not reported.
SPECDEC_HD int32_t beam_node_status(const BeamVerifyParams& p, int64_t b, int64_t v) {
  const int64_t parent = load_id(p.parents, b, v);
  if (v < p.width ? parent != -1 : !is_legal_node(v, parent)) return kInvalidTree;
  if (parent < 0) return 0;
  const int64_t token = load_id(p.tokens, b, v);
  return token < -1 || token >= p.target.vocab ? kInvalidDraftToken : 0;
}

// The lowest child of a node that has this token.
SPECDEC_HD int64_t child_of(const BeamVerifyParams& p, int64_t b, int64_t node, int64_t token) {
  for (int64_t v = node < p.width ? p.width : node + 1; v < p.nodes; ++v) {
    if (load_id(p.parents, b, v) == node && load_id(p.tokens, b, v) == token) return v;
  }
  return kMissing;
}

SPECDEC_HD bool is_eos(const BeamVerifyParams& p, int64_t token) {
  for (int64_t j = 0; j < p.num_eos; ++j) {
    if (load_id(p.eos, j, 0) == token) return true;
  }
  return false;
}

// Whether EOS id j is a token that is not listed before.
SPECDEC_HD bool is_first_eos(const BeamVerifyParams& p, int64_t j) {
  const int64_t token = load_id(p.eos, j, 0);
  for (int64_t i = 0; i < j; ++i) {
    if (load_id(p.eos, i, 0) == token) return false;
  }
  return token >= 0 && token < p.target.vocab;
}

}  // namespace SPECDEC_CPU_ISA
}  // namespace specdec
