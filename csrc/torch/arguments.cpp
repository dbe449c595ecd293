#include "arguments.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "../core/rows.h"
#include "checker.h"
#include "outputs.h"

namespace specdec {
namespace {

// Philox counters hold 16 bits of index and 8 of stream (docs/design.md, "Randomness").
constexpr int64_t kMaxGamma = 65534;
constexpr int64_t kMaxStream = 256;

// Ids of a reduced vocabulary are kept in 32 bits.
constexpr int64_t kMaxTokens = int64_t{1} << 31;

// A null pointer means "absent" in params.h, and empty tensors have one too.
const char kEmpty[8] = {};

RowBatch dense_rows(const Tensor& t) {
  RowBatch rows;
  rows.data = t.numel() > 0 ? t.const_data_ptr() : kEmpty;
  rows.element = element_of(t);
  rows.vocab = t.size(t.dim() - 1);
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows.stride[d] = t.stride(d);
  return rows;
}

// Rows [B, S, V], or packed [R, V] where `index` [B, S] says which.
RowBatch check_rows(const Checker& check, const Tensor& t, const char* name, const char* dense,
                    const char* packed, const std::optional<Tensor>& index, const char* index_name,
                    const char* index_symbols, int64_t batch, int64_t steps) {
  if (!index.has_value()) {
    check.vocabulary_rows(t, name, dense, {batch, steps, -1});
    return dense_rows(t);
  }
  const std::string with_index = std::string(packed) + " because " + index_name + " is given";
  check.vocabulary_rows(t, name, with_index.c_str(), {-1, -1});
  RowBatch rows = dense_rows(t);
  rows.num_rows = t.size(0);
  rows.index = check.ids(index, index_name, index_symbols, {batch, steps});
  if (rows.index.data == nullptr) rows.index.data = kEmpty;
  return rows;
}

// A bit mask over the tokens of the first argument's vocabulary, `symbols` is its shape.
TokenMask check_mask(const Checker& check, const OptionalTensor& t, const char* symbols,
                     Shape shape, int64_t num_tokens) {
  TokenMask mask;
  if (!t.has_value()) return mask;
  const char* name = "allowed_mask";
  check.words(*t, name, symbols, shape);
  mask.words = reinterpret_cast<const uint32_t*>(t->numel() > 0 ? t->const_data_ptr() : kEmpty);
  for (int64_t d = 0; d + 1 < t->dim(); ++d) mask.stride[d] = t->stride(d);
  mask.num_tokens = num_tokens;
  return mask;
}

int64_t words_for(int64_t vocab) { return (vocab + 31) / 32; }

// The map of a draft's `num_entries` entries into `num_tokens` tokens.
TokenMap check_map(const Checker& check, const OptionalTensor& t, int64_t num_entries,
                   int64_t num_tokens) {
  TokenMap map;
  if (!t.has_value()) return map;
  map.ids = check.ids(t, "draft_token_ids", "[Vd]", {num_entries});
  map.num_entries = num_entries;
  map.num_tokens = num_tokens;
  check.require(num_entries <= num_tokens,
                "draft_token_ids must map a draft vocabulary into the target's, got Vd = " +
                    std::to_string(num_entries) + " > V = " + std::to_string(num_tokens));
  return map;
}

// Parameters of the target's law, or of the draft's: the target's where those are not given.
SamplingParams check_sampling(const Checker& check, const SamplingArguments& given, int64_t batch,
                              const SamplingParams* target = nullptr) {
  SamplingParams p = target != nullptr ? *target : SamplingParams{};
#define SPECDEC_NAME(name) (target != nullptr ? "draft_" #name : #name)
#define SPECDEC_FLOATS(name) \
  if (given.name.has_value()) p.name = check.floats(given.name, SPECDEC_NAME(name), {batch});
#define SPECDEC_IDS(name) \
  if (given.name.has_value()) p.name = check.ids(given.name, SPECDEC_NAME(name), "[B]", {batch});
  SPECDEC_SAMPLING(SPECDEC_FLOATS, SPECDEC_IDS)
#undef SPECDEC_NAME
#undef SPECDEC_FLOATS
#undef SPECDEC_IDS
  return p;
}

// Exactly one source of randomness; `symbols` is the shape of uniforms.
Randomness check_randomness(const Checker& check, const RandomnessArguments& given, int64_t batch,
                            const char* symbols, Shape shape, bool required) {
  check.in_range("stream", given.stream, 0, kMaxStream);
  check.require(given.seeds.has_value() == given.positions.has_value(),
                std::string("seeds and positions belong together, got only ") +
                    (given.seeds.has_value() ? "seeds" : "positions"));
  check.require(!given.uniforms.has_value() || !given.seeds.has_value(),
                "expected either uniforms or seeds and positions, got both");
  check.require(given.uniforms.has_value() || given.seeds.has_value() || !required,
                "expected uniforms, or seeds and positions, got neither");
  Randomness r;
  r.uniforms = check.doubles(given.uniforms, "uniforms", symbols, shape);
  r.seeds = check.longs(given.seeds, "seeds", {batch});
  r.positions = check.longs(given.positions, "positions", {batch});
  r.stream = static_cast<uint32_t>(given.stream);
  return r;
}

// `family`: kChains or kTrees.
const NamedRule& check_rule(const Checker& check, Trait family, const std::string& name) {
  std::string known;
  for (const NamedRule& r : kRules) {
    if ((r.traits & family) == 0) continue;
    if (name == r.name) return r;
    known += std::string(known.empty() ? "" : ", ") + "\"" + r.name + "\"";
  }
  check.fail("rule must be one of " + known + ", got \"" + name + "\"");
}

void check_number(const Checker& check, const char* name, double value, bool fits,
                  const char* expected) {
  std::ostringstream out;
  out << name << " must be " << expected << ", got " << value;
  check.require(fits && std::isfinite(value), out.str());
}

RelaxedParams check_relaxed(const Checker& check, double lenience, int64_t beta, double tau,
                            double epsilon, double delta) {
  check_number(check, "lenience", lenience, lenience > 0.0 && lenience <= 1.0, "in (0, 1]");
  check.require(beta >= 1, "beta must be at least 1, got " + std::to_string(beta));
  check_number(check, "tau", tau, tau >= 0.0, "finite and >= 0");
  check_number(check, "epsilon", epsilon, epsilon > 0.0, "finite and > 0");
  check_number(check, "delta", delta, delta > 0.0, "finite and > 0");
  return {lenience, beta, tau, epsilon, delta};
}

// Which of the arguments about the draft's law may be given together. `index_name`: that of
// draft_row_index.
void check_draft_law(const Checker& check, const RowArguments& rows,
                     const SamplingArguments& sampling, const std::string& index_name) {
  const bool logits = rows.draft_logits.has_value(), probs = rows.draft_probs.has_value();
  check.require(!logits || !probs,
                "expected at most one of draft_logits and draft_probs, got both");
  check.require(
      !probs || !sampling.any(),
      "draft_temperature, draft_top_k, draft_top_p and draft_min_p apply to draft_logits, "
      "got draft_probs");
  check.require(logits || probs || (!sampling.any() && !rows.draft_row_index.has_value()),
                index_name +
                    " and draft_ sampling parameters need draft_logits or draft_probs, "
                    "got neither");
  check.require(logits || probs || !rows.draft_token_ids.has_value(),
                "draft_token_ids needs draft_logits or draft_probs, got neither");
  if (!rows.draft_probs_ids.has_value()) return;
  check.require(probs, std::string("draft_probs_ids needs draft_probs, got ") +
                           (logits ? "draft_logits" : "neither draft_probs nor draft_logits"));
  check.require(!rows.draft_token_ids.has_value(),
                "draft_probs_ids are ids of the target's tokens: expected no draft_token_ids, got "
                "both");
}

// The rows of a chain's draft.
void check_draft_rows(const Checker& check, const Tensor& draft, const char* name,
                      const OptionalTensor& index, const char* index_name, VerifyParams* p) {
  p->draft = check_rows(check, draft, name, "[B, G, Vd]", "[Rd, Vd]", index, index_name, "[B, G]",
                        p->batch, p->gamma);
}

// Those of a tree's; without `index`, row v belongs to node v.
void check_draft_rows(const Checker& check, const Tensor& draft, const char* name,
                      const OptionalTensor& index, const char* index_name, VerifyTreeParams* p) {
  const bool has_index = index.has_value();
  check.vocabulary_rows(draft, name, has_index ? "[B, R, Vd]" : "[B, N, Vd]",
                        {p->batch, has_index ? -1 : p->nodes, -1});
  p->draft = dense_rows(draft);
  p->num_draft_rows = draft.size(1);
  p->children_rows = check.ids(index, index_name, "[B, N]", {p->batch, p->nodes});
}

// How many lists of tokens a request has, and how messages write the shape of their ids.
struct ListPlaces {
  int64_t rows;
  const char* symbols;
};

ListPlaces list_places(const VerifyParams& p) { return {p.gamma, "[B, G, K]"}; }
ListPlaces list_places(const VerifyTreeParams& p) { return {p.num_draft_rows, "[B, R, K]"}; }

// The tokens that the draft's rows name.
TokenLists check_lists(const Checker& check, const Tensor& probs, const Tensor& ids,
                       const ListPlaces& places) {
  const int64_t width = probs.size(probs.dim() - 1);
  check.require(width <= kMaxListed,
                "draft_probs must name at most 1024 tokens a row where draft_probs_ids is given, "
                "got " +
                    describe(probs));
  TokenLists lists;
  const char* name = "draft_probs_ids";
  lists.ids = probs.dim() == 3 ? check.listed_ids(ids, name, places.symbols,
                                                  {probs.size(0), probs.size(1), width})
                               : check.listed_ids(ids, name, "[Rd, K]", {probs.size(0), width});
  if (lists.ids.data == nullptr) lists.ids.data = kEmpty;
  lists.width = width;
  lists.rows = places.rows;
  return lists;
}

// What the verifiers take beside what was drafted.
struct VerifierArguments {
  const Tensor& target_logits;
  const RowArguments& rows;
  const RandomnessArguments& randomness;
  const SamplingArguments& sampling;
  const SamplingArguments& draft_sampling;
  const NamedRule& rule;
  bool raw_logprobs;
};

// Where a request has a target row, a mask and a uniform each: [B, G+1] or [B, N]. And how messages
// write the shapes of these, and name the argument that says which of the draft's rows are read.
struct Places {
  int64_t batch, number;
  const char* symbols;
  const char* logits;
  const char* mask;
  const char* draft_row_index;
};

// Checks what both verifiers take. Who drafted how many tokens is in the parameters already.
template <typename Params>
void check_verifier(const Checker& check, const VerifierArguments& given, const Places& places,
                    Params* p) {
  const RowArguments& rows = given.rows;
  const int64_t batch = places.batch, number = places.number;
  p->rule = given.rule.rule;
  p->raw_logprobs = given.raw_logprobs || (given.rule.traits & kRawLogprobs) != 0;
  p->target = check_rows(check, given.target_logits, "target_logits", places.logits, "[R, V]",
                         rows.target_rows, "target_rows", places.symbols, batch, number);
  const int64_t vocab = p->target.vocab;
  check_draft_law(check, rows, given.draft_sampling, places.draft_row_index);
  p->mask =
      check_mask(check, rows.allowed_mask, places.mask, {batch, number, words_for(vocab)}, vocab);
  p->draft_is_probs = rows.draft_probs.has_value();
  if (rows.draft_logits.has_value() || p->draft_is_probs) {
    check_draft_rows(check, p->draft_is_probs ? *rows.draft_probs : *rows.draft_logits,
                     p->draft_is_probs ? "draft_probs" : "draft_logits", rows.draft_row_index,
                     places.draft_row_index, p);
    p->map = check_map(check, rows.draft_token_ids, p->draft.vocab, vocab);
    if (rows.draft_probs_ids.has_value()) {
      p->lists = check_lists(check, *rows.draft_probs, *rows.draft_probs_ids, list_places(*p));
      p->draft.vocab = vocab;
    }
    if ((given.rule.traits & kReadsDraftLaw) == 0) {
      p->map = TokenMap{};
      p->lists = TokenLists{};
    }
  }
  p->target_sampling = check_sampling(check, given.sampling, batch);
  p->draft_sampling = check_sampling(check, given.draft_sampling, batch, &p->target_sampling);
  check.require(
      (given.rule.traits & kRaces) == 0 || !given.randomness.uniforms.has_value(),
      std::string("rule \"") + given.rule.name + "\" needs seeds and positions, got uniforms");
  p->randomness = check_randomness(check, given.randomness, batch, places.symbols, {batch, number},
                                   (given.rule.traits & (kTakesCoins | kRaces)) != 0);
}

// Makes a rank's part of some rows the rows of a vocabulary of `vocab` entries, that begin where
// entry 0 would lie.
void take_part(const Checker& check, const std::string& name, int64_t rank,
               const VerifyShardedParams& p, int64_t vocab, const OptionalTensor& tail,
               RowBatch* rows, RowBatch* tails) {
  const int64_t begin = std::min(p.bounds[rank], vocab);
  const int64_t end = rank + 1 == p.count ? vocab : std::min(p.bounds[rank + 1], vocab);
  // No operator takes rows without entries: a rank that has none brings one that nobody reads.
  check.require(rows->vocab == std::max(end - begin, int64_t{1}),
                name + " must have " + std::to_string(end - begin) + " columns on rank " +
                    std::to_string(rank) + ", got " + std::to_string(rows->vocab));
  const int64_t bytes = rows->element == Element::kFloat32 ? 4 : 2;
  rows->vocab = vocab;
  const uintptr_t address = reinterpret_cast<uintptr_t>(rows->data);
  rows->data = reinterpret_cast<const void*>(address - static_cast<uintptr_t>(begin * bytes));
  const int64_t tile = end / kTile * kTile;
  const bool wanted = end > begin && tile >= begin && tile < end && end < vocab;
  check.require(tail.has_value() == wanted, "the tail of " + name +
                                                " must be given where a tile "
                                                "begins here and ends elsewhere, and only there");
  if (!wanted) return;
  const int64_t width = std::min(vocab - tile, kTile);
  check.require(tail->dim() >= 2 && tail->is_contiguous() && tail->size(tail->dim() - 1) == width &&
                    element_of(*tail) == rows->element,
                "the tail of " + name + " must be contiguous rows of " + std::to_string(width) +
                    " entries, got " + describe(*tail));
  *tails = dense_rows(*tail);
  tails->index = rows->index;
  tails->num_rows = rows->num_rows;
}

}  // namespace

RowLawCall check_row_law(const Tensor& logits, const OptionalTensor& allowed_mask,
                         const SamplingArguments& sampling) {
  const Checker check("row_law", logits);
  check.vocabulary_rows(logits, "logits", "[R, V]", {-1, -1});
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  RowLawParams p;
  p.rows = rows;
  p.logits = dense_rows(logits);
  p.mask = check_mask(check, allowed_mask, "[R, ceil(V/32)]", {rows, words_for(vocab)}, vocab);
  p.sampling = check_sampling(check, sampling, rows);
  std::tuple outputs{new_output(logits, {rows}, &p.max), new_output(logits, {rows}, &p.scale),
                     new_output(logits, {rows}, &p.cutoff), new_output(logits, {rows}, &p.log_z),
                     new_output(logits, {rows}, &p.argmax)};
  return {p, std::move(outputs)};
}

SampleCall check_sample(const Tensor& logits, const OptionalTensor& uniforms,
                        const OptionalTensor& allowed_mask, const OptionalTensor& draft_token_ids,
                        const OptionalTensor& seeds, const OptionalTensor& positions,
                        int64_t draft_index, int64_t domain, int64_t stream,
                        const SamplingArguments& sampling) {
  const Checker check("sample", logits);
  check.vocabulary_rows(logits, "logits", "[B, V]", {-1, -1});
  const int64_t batch = logits.size(0), vocab = logits.size(1);
  check.in_range("draft_index", draft_index, 0, kMaxGamma + 2);
  // ACCEPT counters belong to verify's coins: a token drawn with one would bias the test of it.
  check.require(
      domain >= 1 && domain <= 3,
      "domain must be 1 (RESIDUAL), 2 (DRAFT) or 3 (COUPLED), got " + std::to_string(domain));
  check.require(domain != 3 || !uniforms.has_value(),
                "domain 3 (COUPLED) needs seeds and positions, got uniforms");
  SampleParams p;
  p.batch = batch;
  p.logits = dense_rows(logits);
  const bool is_mapped = draft_token_ids.has_value();
  p.mask = check_mask(check, allowed_mask, is_mapped ? "[B, W]" : "[B, ceil(V/32)]",
                      {batch, is_mapped ? -1 : words_for(vocab)}, vocab);
  if (is_mapped && allowed_mask.has_value()) p.mask.num_tokens = 32 * allowed_mask->size(1);
  p.map = check_map(check, draft_token_ids, vocab, kMaxTokens);
  p.sampling = check_sampling(check, sampling, batch);
  p.randomness =
      check_randomness(check, {uniforms, seeds, positions, stream}, batch, "[B]", {batch}, true);
  p.domain = static_cast<uint32_t>(domain);
  p.draft_index = static_cast<uint32_t>(draft_index);
  std::tuple outputs{new_output(logits, {batch}, &p.tokens),
                     new_output(logits, {batch}, &p.logprobs)};
  return {p, std::move(outputs)};
}

VerifyCall check_verify(const Tensor& target_logits, const Tensor& draft_tokens,
                        const RowArguments& rows, const OptionalTensor& draft_kinds,
                        const OptionalTensor& draft_lengths, const RandomnessArguments& randomness,
                        const SamplingArguments& sampling, const SamplingArguments& draft_sampling,
                        const std::string& rule, double lenience, int64_t beta, double tau,
                        double epsilon, double delta, bool full_accept_probs, bool raw_logprobs) {
  const Checker check("verify", target_logits);
  const NamedRule& named = check_rule(check, kChains, rule);
  VerifyParams p;
  p.relaxed = check_relaxed(check, lenience, beta, tau, epsilon, delta);
  p.draft_tokens = check.ids(draft_tokens, "draft_tokens", "[B, G]", {-1, -1});
  const int64_t batch = p.batch = draft_tokens.size(0);
  const int64_t gamma = p.gamma = draft_tokens.size(1);
  check.require(gamma <= kMaxGamma,
                "draft_tokens must have at most 65534 columns, got " + describe(draft_tokens));
  p.draft_kinds = check.bytes(draft_kinds, "draft_kinds", "[B, G]", {batch, gamma});
  p.draft_lengths = check.ids(draft_lengths, "draft_lengths", "[B]", {batch});
  p.full_accept_probs = full_accept_probs;
  check_verifier(
      check, {target_logits, rows, randomness, sampling, draft_sampling, named, raw_logprobs},
      {batch, gamma + 1, "[B, G+1]", "[B, G+1, V]", "[B, G+1, ceil(V/32)]", "draft_rows"}, &p);
  std::tuple outputs{new_output(target_logits, {batch, gamma + 1}, &p.tokens),
                     new_output(target_logits, {batch}, &p.num_accepted),
                     new_output(target_logits, {batch, gamma + 1}, &p.logprobs),
                     new_output(target_logits, {batch, gamma}, &p.accept_probs),
                     new_output(target_logits, {batch}, &p.status)};
  return {p, std::move(outputs)};
}

VerifyShardedCall check_verify_sharded(
    const Tensor& target_logits, const Tensor& draft_tokens, const RowArguments& rows,
    const OptionalTensor& draft_kinds, const OptionalTensor& draft_lengths,
    const RandomnessArguments& randomness, const SamplingArguments& sampling,
    const SamplingArguments& draft_sampling, const std::string& rule, double lenience, int64_t beta,
    double tau, double epsilon, double delta, bool full_accept_probs, bool raw_logprobs,
    const OptionalTensor& target_tail, const OptionalTensor& draft_tail, const Tensor& bounds,
    int64_t rank, int64_t draft_vocab, int64_t exchange) {
  const Checker check("verify_sharded", target_logits);
  check.require(!rows.draft_token_ids.has_value(),
                "draft_token_ids needs all of a vocabulary in one place: it is none of a shard's");
  check.require(!rows.draft_probs_ids.has_value(),
                "draft_probs_ids needs all of a vocabulary in one place: it is none of a shard's");
  RowArguments parts = rows;
  parts.allowed_mask = std::nullopt;  // that of the whole vocabulary
  VerifyCall local = check_verify(target_logits, draft_tokens, parts, draft_kinds, draft_lengths,
                                  randomness, sampling, draft_sampling, rule, lenience, beta, tau,
                                  epsilon, delta, full_accept_probs, raw_logprobs);
  VerifyShardedParams p;
  p.verify = local.params;
  p.exchange = exchange;
  p.rank = rank;
  p.bounds = check.longs(bounds, "bounds", {-1}).data;
  p.count = bounds.size(0) - 1;
  check.require(p.count >= 1 && bounds.stride(0) == 1 && p.bounds[0] == 0,
                "bounds must be [W + 1] without gaps, from 0 on, got " + describe(bounds));
  check.in_range("rank", rank, 0, p.count);
  for (int64_t r = 0; r < p.count; ++r) {
    check.require(p.bounds[r] <= p.bounds[r + 1], "bounds must not decrease");
  }
  const int64_t vocab = p.bounds[p.count];
  check.vocabulary(vocab, "all ranks together", std::to_string(vocab));
  take_part(check, "target_logits", rank, p, vocab, target_tail, &p.verify.target, &p.target_tail);
  if (p.verify.draft.data != nullptr) {
    take_part(check, "the draft's rows", rank, p, draft_vocab, draft_tail, &p.verify.draft,
              &p.draft_tail);
  }
  p.verify.mask = check_mask(check, rows.allowed_mask, "[B, G+1, ceil(V/32)]",
                             {p.verify.batch, p.verify.gamma + 1, words_for(vocab)}, vocab);
  return {p, std::move(local.outputs)};
}

VerifyTreeCall check_verify_tree(const Tensor& target_logits, const Tensor& tokens,
                                 const Tensor& parents, const RowArguments& rows,
                                 const OptionalTensor& kinds, const RandomnessArguments& randomness,
                                 const SamplingArguments& sampling,
                                 const SamplingArguments& draft_sampling, const std::string& rule,
                                 bool raw_logprobs) {
  const Checker check("verify_tree", target_logits);
  const NamedRule& named = check_rule(check, kTrees, rule);
  VerifyTreeParams p;
  p.tokens = check.ids(tokens, "tokens", "[B, N]", {-1, -1});
  const int64_t batch = p.batch = tokens.size(0);
  const int64_t nodes = p.nodes = tokens.size(1);
  check.require(nodes >= 1 && nodes <= kMaxNodes,
                "tokens must have 1 to 1024 nodes, the root included, got " + describe(tokens));
  p.parents = check.ids(parents, "parents", "[B, N]", {batch, nodes});
  p.kinds = check.bytes(kinds, "kinds", "[B, N]", {batch, nodes});
  check_verifier(check,
                 {target_logits, rows, randomness, sampling, draft_sampling, named, raw_logprobs},
                 {batch, nodes, "[B, N]", "[B, N, V]", "[B, N, ceil(V/32)]", "children_rows"}, &p);
  std::tuple outputs{new_output(target_logits, {batch, nodes}, &p.out_tokens),
                     new_output(target_logits, {batch, nodes}, &p.path),
                     new_output(target_logits, {batch}, &p.num_accepted),
                     new_output(target_logits, {batch, nodes}, &p.logprobs),
                     new_output(target_logits, {batch, nodes}, &p.accept_probs),
                     new_output(target_logits, {batch}, &p.status)};
  return {p, std::move(outputs)};
}

AcceptanceCall check_acceptance(const Tensor& target_logits, const Tensor& draft_logits,
                                const OptionalTensor& allowed_mask,
                                const OptionalTensor& draft_token_ids,
                                const SamplingArguments& sampling,
                                const SamplingArguments& draft_sampling) {
  const Checker check("acceptance", target_logits);
  check.vocabulary_rows(target_logits, "target_logits", "[R, V]", {-1, -1});
  const int64_t rows = target_logits.size(0);
  check.vocabulary_rows(draft_logits, "draft_logits", "[R, Vd]", {rows, -1});
  AcceptanceParams p;
  p.rows = rows;
  p.target = dense_rows(target_logits);
  p.draft = dense_rows(draft_logits);
  const int64_t vocab = p.target.vocab;
  p.mask = check_mask(check, allowed_mask, "[R, ceil(V/32)]", {rows, words_for(vocab)}, vocab);
  p.map = check_map(check, draft_token_ids, p.draft.vocab, vocab);
  p.target_sampling = check_sampling(check, sampling, rows);
  p.draft_sampling = check_sampling(check, draft_sampling, rows, &p.target_sampling);
  Tensor acceptance = new_output(target_logits, {rows}, &p.acceptance);
  return {p, std::move(acceptance)};
}

UniformsCall check_uniforms(const Tensor& seeds, const Tensor& positions, int64_t n,
                            int64_t stream) {
  const Checker check("uniforms", seeds);
  check.in_range("n", n, 1, kMaxGamma + 2);
  check.in_range("stream", stream, 0, kMaxStream);
  check.longs(seeds, "seeds", {-1});
  const int64_t batch = seeds.size(0);
  UniformsParams p;
  p.batch = batch;
  p.n = n;
  p.randomness.seeds = check.longs(seeds, "seeds", {batch});
  p.randomness.positions = check.longs(positions, "positions", {batch});
  p.randomness.stream = static_cast<uint32_t>(stream);
  Tensor uniforms = new_output(seeds, {batch, n}, &p.uniforms);
  return {p, std::move(uniforms)};
}

BeamVerifyCall check_beam_verify(const Tensor& target_logits, const Tensor& scores,
                                 const Tensor& tokens, const Tensor& parents, int64_t gamma,
                                 const OptionalTensor& eos_token_ids, const std::string& rule,
                                 bool log_probs) {
  const Checker check("beam_verify", target_logits);
  check.vocabulary_rows(target_logits, "target_logits", "[B, N, V]", {-1, -1, -1});
  const int64_t batch = target_logits.size(0), nodes = target_logits.size(1);
  BeamVerifyParams p;
  p.scores = check.floats(scores, "scores", "[B, W]", {batch, -1});
  const int64_t width = scores.size(1);
  check.in_range("W, the beams of scores,", width, 1, kMaxBeams + 1);
  check.in_range("N, the nodes of target_logits,", nodes, width, kMaxNodes + 1);
  check.in_range("gamma", gamma, 0, kMaxNodes);
  check.require(rule == "bound" || rule == "subset",
                "rule must be one of \"bound\", \"subset\", got \"" + rule + "\"");
  p.batch = batch;
  p.nodes = nodes;
  p.width = width;
  p.levels = gamma + 1;
  p.target = dense_rows(target_logits);
  p.tokens = check.ids(tokens, "tokens", "[B, N]", {batch, nodes});
  p.parents = check.ids(parents, "parents", "[B, N]", {batch, nodes});
  p.eos = check.ids(eos_token_ids, "eos_token_ids", "[E]", {-1});
  if (eos_token_ids.has_value()) p.num_eos = eos_token_ids->size(0);
  p.bound = rule == "bound";
  p.log_probs = log_probs;
  const auto output = [&](auto** data) {
    return new_output(target_logits, {batch, p.levels, width}, data);
  };
  std::tuple outputs{output(&p.out_tokens),
                     output(&p.out_parents),
                     output(&p.out_nodes),
                     output(&p.out_scores),
                     output(&p.finished_tokens),
                     output(&p.finished_parents),
                     output(&p.finished_scores),
                     new_output(target_logits, {batch}, &p.num_levels),
                     new_output(target_logits, {batch}, &p.status)};
  return {p, std::move(outputs)};
}

}  // namespace specdec
