#include "arguments.h"

#include <cmath>
#include <sstream>

#include "../core/request.h"
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

struct SamplingTensors {
  const OptionalTensor& temperature;
  const OptionalTensor& top_k;
  const OptionalTensor& top_p;
  const OptionalTensor& min_p;
  const char* names[4];
};

SamplingParams check_sampling(const Checker& check, const SamplingTensors& t, int64_t batch) {
  SamplingParams p;
  p.temperature = check.floats(t.temperature, t.names[0], {batch});
  p.top_k = check.ids(t.top_k, t.names[1], "[B]", {batch});
  p.top_p = check.floats(t.top_p, t.names[2], {batch});
  p.min_p = check.floats(t.min_p, t.names[3], {batch});
  return p;
}

SamplingParams target_sampling(const Checker& check, const OptionalTensor& temperature,
                               const OptionalTensor& top_k, const OptionalTensor& top_p,
                               const OptionalTensor& min_p, int64_t batch) {
  return check_sampling(
      check, {temperature, top_k, top_p, min_p, {"temperature", "top_k", "top_p", "min_p"}}, batch);
}

// The draft's own parameters where given, the target's elsewhere.
SamplingParams draft_sampling(const Checker& check, const OptionalTensor& temperature,
                              const OptionalTensor& top_k, const OptionalTensor& top_p,
                              const OptionalTensor& min_p, const SamplingParams& target,
                              int64_t batch) {
  SamplingParams p =
      check_sampling(check,
                     {temperature,
                      top_k,
                      top_p,
                      min_p,
                      {"draft_temperature", "draft_top_k", "draft_top_p", "draft_min_p"}},
                     batch);
  if (!temperature.has_value()) p.temperature = target.temperature;
  if (!top_k.has_value()) p.top_k = target.top_k;
  if (!top_p.has_value()) p.top_p = target.top_p;
  if (!min_p.has_value()) p.min_p = target.min_p;
  return p;
}

// Exactly one source of randomness; `uniforms` has `n` slots a request (0: it is [B]).
Randomness check_randomness(const Checker& check, const OptionalTensor& uniforms,
                            const OptionalTensor& seeds, const OptionalTensor& positions,
                            int64_t stream, int64_t batch, int64_t n, bool required,
                            const char* symbols = "[B, G+1]") {
  check.in_range("stream", stream, 0, kMaxStream);
  check.require(seeds.has_value() == positions.has_value(),
                std::string("seeds and positions belong together, got only ") +
                    (seeds.has_value() ? "seeds" : "positions"));
  check.require(!uniforms.has_value() || !seeds.has_value(),
                "expected either uniforms or seeds and positions, got both");
  check.require(uniforms.has_value() || seeds.has_value() || !required,
                "expected uniforms, or seeds and positions, got neither");
  Randomness r;
  r.uniforms = n > 0 ? check.doubles(uniforms, "uniforms", symbols, {batch, n})
                     : check.doubles(uniforms, "uniforms", "[B]", {batch});
  r.seeds = check.longs(seeds, "seeds", {batch});
  r.positions = check.longs(positions, "positions", {batch});
  r.stream = static_cast<uint32_t>(stream);
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

// Which of the arguments about the draft's law may be given together.
void check_draft_law(const Checker& check, bool logits, bool probs, bool filters, bool rows,
                     bool map) {
  check.require(!logits || !probs,
                "expected at most one of draft_logits and draft_probs, got both");
  check.require(
      !probs || !filters,
      "draft_temperature, draft_top_k, draft_top_p and draft_min_p apply to draft_logits, "
      "got draft_probs");
  check.require(logits || probs || (!filters && !rows),
                "draft_rows and draft_ sampling parameters need draft_logits or draft_probs, got "
                "neither");
  check.require(logits || probs || !map,
                "draft_token_ids needs draft_logits or draft_probs, got neither");
}

}  // namespace

RowLawCall check_row_law(Tensor logits, OptionalTensor temperature, OptionalTensor top_k,
                         OptionalTensor top_p, OptionalTensor min_p, OptionalTensor allowed_mask) {
  const Checker check("row_law", logits);
  check.vocabulary_rows(logits, "logits", "[R, V]", {-1, -1});
  const int64_t rows = logits.size(0);
  RowLawCall call{{},
                  {new_tensor(logits, {rows}, ScalarType::Float),
                   new_tensor(logits, {rows}, ScalarType::Double),
                   new_tensor(logits, {rows}, ScalarType::Float),
                   new_tensor(logits, {rows}, ScalarType::Double),
                   new_tensor(logits, {rows}, ScalarType::Long)}};
  RowLawParams& p = call.params;
  p.rows = rows;
  p.logits = dense_rows(logits);
  const int64_t words = words_for(logits.size(1));
  p.mask = check_mask(check, allowed_mask, "[R, ceil(V/32)]", {rows, words}, logits.size(1));
  p.sampling = target_sampling(check, temperature, top_k, top_p, min_p, rows);
  p.max = data_of<float>(std::get<0>(call.outputs));
  p.scale = data_of<double>(std::get<1>(call.outputs));
  p.cutoff = data_of<float>(std::get<2>(call.outputs));
  p.log_z = data_of<double>(std::get<3>(call.outputs));
  p.argmax = data_of<int64_t>(std::get<4>(call.outputs));
  return call;
}

SampleCall check_sample(Tensor logits, OptionalTensor uniforms, OptionalTensor seeds,
                        OptionalTensor positions, int64_t draft_index, int64_t domain,
                        int64_t stream, OptionalTensor temperature, OptionalTensor top_k,
                        OptionalTensor top_p, OptionalTensor min_p, OptionalTensor allowed_mask,
                        OptionalTensor draft_token_ids) {
  const Checker check("sample", logits);
  check.vocabulary_rows(logits, "logits", "[B, V]", {-1, -1});
  const int64_t batch = logits.size(0);
  check.in_range("draft_index", draft_index, 0, kMaxGamma + 2);
  // ACCEPT counters belong to verify's coins: a token drawn with one would bias the test of it.
  check.require(
      domain >= 1 && domain <= 3,
      "domain must be 1 (RESIDUAL), 2 (DRAFT) or 3 (COUPLED), got " + std::to_string(domain));
  check.require(domain != 3 || !uniforms.has_value(),
                "domain 3 (COUPLED) needs seeds and positions, got uniforms");
  SampleCall call{{},
                  {new_tensor(logits, {batch}, ScalarType::Long),
                   new_tensor(logits, {batch}, ScalarType::Float)}};
  SampleParams& p = call.params;
  p.batch = batch;
  p.logits = dense_rows(logits);
  const int64_t vocab = logits.size(1);
  const bool is_mapped = draft_token_ids.has_value();
  p.mask = check_mask(check, allowed_mask, is_mapped ? "[B, W]" : "[B, ceil(V/32)]",
                      {batch, is_mapped ? -1 : words_for(vocab)}, vocab);
  if (is_mapped && allowed_mask.has_value()) p.mask.num_tokens = 32 * allowed_mask->size(1);
  p.map = check_map(check, draft_token_ids, vocab, kMaxTokens);
  p.sampling = target_sampling(check, temperature, top_k, top_p, min_p, batch);
  p.randomness = check_randomness(check, uniforms, seeds, positions, stream, batch, 0, true);
  p.domain = static_cast<uint32_t>(domain);
  p.draft_index = static_cast<uint32_t>(draft_index);
  p.tokens = data_of<int64_t>(std::get<0>(call.outputs));
  p.logprobs = data_of<float>(std::get<1>(call.outputs));
  return call;
}

VerifyCall check_verify(Tensor target_logits, Tensor draft_tokens, OptionalTensor draft_logits,
                        OptionalTensor draft_probs, OptionalTensor draft_kinds,
                        OptionalTensor draft_lengths, OptionalTensor target_rows,
                        OptionalTensor draft_rows, OptionalTensor uniforms, OptionalTensor seeds,
                        OptionalTensor positions, int64_t stream, OptionalTensor temperature,
                        OptionalTensor top_k, OptionalTensor top_p, OptionalTensor min_p,
                        OptionalTensor draft_temperature, OptionalTensor draft_top_k,
                        OptionalTensor draft_top_p, OptionalTensor draft_min_p, std::string rule,
                        double lenience, int64_t beta, double tau, double epsilon, double delta,
                        bool full_accept_probs, bool raw_logprobs, OptionalTensor allowed_mask,
                        OptionalTensor draft_token_ids) {
  const Checker check("verify", target_logits);
  VerifyParams p;
  const NamedRule& named = check_rule(check, kChains, rule);
  p.rule = named.rule;
  p.relaxed = check_relaxed(check, lenience, beta, tau, epsilon, delta);
  p.draft_tokens = check.ids(draft_tokens, "draft_tokens", "[B, G]", {-1, -1});
  const int64_t batch = draft_tokens.size(0);
  const int64_t gamma = draft_tokens.size(1);
  check.require(gamma <= kMaxGamma,
                "draft_tokens must have at most 65534 columns, got " + describe(draft_tokens));
  p.batch = batch;
  p.gamma = gamma;
  p.target = check_rows(check, target_logits, "target_logits", "[B, G+1, V]", "[R, V]", target_rows,
                        "target_rows", "[B, G+1]", batch, gamma + 1);

  const OptionalTensor& draft = draft_logits.has_value() ? draft_logits : draft_probs;
  const bool has_filters = draft_temperature.has_value() || draft_top_k.has_value() ||
                           draft_top_p.has_value() || draft_min_p.has_value();
  check_draft_law(check, draft_logits.has_value(), draft_probs.has_value(), has_filters,
                  draft_rows.has_value(), draft_token_ids.has_value());
  const int64_t vocab = p.target.vocab;
  p.mask = check_mask(check, allowed_mask, "[B, G+1, ceil(V/32)]",
                      {batch, gamma + 1, words_for(vocab)}, vocab);
  if (draft.has_value()) {
    p.draft =
        check_rows(check, *draft, draft_logits.has_value() ? "draft_logits" : "draft_probs",
                   "[B, G, Vd]", "[Rd, Vd]", draft_rows, "draft_rows", "[B, G]", batch, gamma);
    p.draft_is_probs = draft_probs.has_value();
    p.map = check_map(check, draft_token_ids, p.draft.vocab, vocab);
    if (!SPECDEC_CPU_ISA::reads_draft_law(p.rule)) p.map = TokenMap{};
  }
  p.draft_kinds = check.bytes(draft_kinds, "draft_kinds", "[B, G]", {batch, gamma});
  p.draft_lengths = check.ids(draft_lengths, "draft_lengths", "[B]", {batch});
  p.target_sampling = target_sampling(check, temperature, top_k, top_p, min_p, batch);
  p.draft_sampling = draft_sampling(check, draft_temperature, draft_top_k, draft_top_p, draft_min_p,
                                    p.target_sampling, batch);
  check.require((named.traits & kRaces) == 0 || !uniforms.has_value(),
                "rule \"" + rule + "\" needs seeds and positions, got uniforms");
  p.randomness = check_randomness(check, uniforms, seeds, positions, stream, batch, gamma + 1,
                                  !SPECDEC_CPU_ISA::ignores_sampling(p.rule));
  p.full_accept_probs = full_accept_probs;
  p.raw_logprobs = raw_logprobs || (named.traits & kRawLogprobs) != 0;

  VerifyCall call{p,
                  {new_tensor(target_logits, {batch, gamma + 1}, ScalarType::Long),
                   new_tensor(target_logits, {batch}, ScalarType::Int),
                   new_tensor(target_logits, {batch, gamma + 1}, ScalarType::Float),
                   new_tensor(target_logits, {batch, gamma}, ScalarType::Float),
                   new_tensor(target_logits, {batch}, ScalarType::Int)}};
  call.params.tokens = data_of<int64_t>(std::get<0>(call.outputs));
  call.params.num_accepted = data_of<int32_t>(std::get<1>(call.outputs));
  call.params.logprobs = data_of<float>(std::get<2>(call.outputs));
  call.params.accept_probs = data_of<float>(std::get<3>(call.outputs));
  call.params.status = data_of<int32_t>(std::get<4>(call.outputs));
  return call;
}

VerifyTreeCall check_verify_tree(Tensor target_logits, Tensor tokens, Tensor parents,
                                 OptionalTensor draft_logits, OptionalTensor draft_probs,
                                 OptionalTensor kinds, OptionalTensor draft_rows,
                                 OptionalTensor target_rows, OptionalTensor uniforms,
                                 OptionalTensor seeds, OptionalTensor positions, int64_t stream,
                                 OptionalTensor temperature, OptionalTensor top_k,
                                 OptionalTensor top_p, OptionalTensor min_p,
                                 OptionalTensor draft_temperature, OptionalTensor draft_top_k,
                                 OptionalTensor draft_top_p, OptionalTensor draft_min_p,
                                 std::string rule, bool raw_logprobs, OptionalTensor allowed_mask,
                                 OptionalTensor draft_token_ids) {
  const Checker check("verify_tree", target_logits);
  VerifyTreeParams p;
  const NamedRule& named = check_rule(check, kTrees, rule);
  p.rule = named.rule;
  p.tokens = check.ids(tokens, "tokens", "[B, N]", {-1, -1});
  const int64_t batch = tokens.size(0);
  const int64_t nodes = tokens.size(1);
  check.require(nodes >= 1 && nodes <= kMaxNodes,
                "tokens must have 1 to 1024 nodes, the root included, got " + describe(tokens));
  p.batch = batch;
  p.nodes = nodes;
  p.parents = check.ids(parents, "parents", "[B, N]", {batch, nodes});
  p.target = check_rows(check, target_logits, "target_logits", "[B, N, V]", "[R, V]", target_rows,
                        "target_rows", "[B, N]", batch, nodes);
  const int64_t vocab = p.target.vocab;

  const OptionalTensor& draft = draft_logits.has_value() ? draft_logits : draft_probs;
  const bool has_filters = draft_temperature.has_value() || draft_top_k.has_value() ||
                           draft_top_p.has_value() || draft_min_p.has_value();
  check_draft_law(check, draft_logits.has_value(), draft_probs.has_value(), has_filters,
                  draft_rows.has_value(), draft_token_ids.has_value());
  p.mask = check_mask(check, allowed_mask, "[B, N, ceil(V/32)]", {batch, nodes, words_for(vocab)},
                      vocab);
  if (draft.has_value()) {
    const char* name = draft_logits.has_value() ? "draft_logits" : "draft_probs";
    // Without draft_rows, row v belongs to node v.
    const bool has_rows = draft_rows.has_value();
    check.vocabulary_rows(*draft, name, has_rows ? "[B, R, Vd]" : "[B, N, Vd]",
                          {batch, has_rows ? -1 : nodes, -1});
    p.draft = dense_rows(*draft);
    p.draft_rows = draft->size(1);
    p.draft_is_probs = draft_probs.has_value();
    p.draft_row_of = check.ids(draft_rows, "draft_rows", "[B, N]", {batch, nodes});
    p.map = check_map(check, draft_token_ids, p.draft.vocab, vocab);
    if (!SPECDEC_CPU_ISA::reads_draft_law(p.rule)) p.map = TokenMap{};
  }
  p.kinds = check.bytes(kinds, "kinds", "[B, N]", {batch, nodes});
  p.target_sampling = target_sampling(check, temperature, top_k, top_p, min_p, batch);
  p.draft_sampling = draft_sampling(check, draft_temperature, draft_top_k, draft_top_p, draft_min_p,
                                    p.target_sampling, batch);
  check.require((named.traits & kRaces) == 0 || !uniforms.has_value(),
                "rule \"" + rule + "\" needs seeds and positions, got uniforms");
  p.randomness = check_randomness(check, uniforms, seeds, positions, stream, batch, nodes,
                                  !SPECDEC_CPU_ISA::ignores_sampling(p.rule), "[B, N]");
  p.raw_logprobs = raw_logprobs || (named.traits & kRawLogprobs) != 0;

  VerifyTreeCall call{p,
                      {new_tensor(target_logits, {batch, nodes}, ScalarType::Long),
                       new_tensor(target_logits, {batch, nodes}, ScalarType::Long),
                       new_tensor(target_logits, {batch}, ScalarType::Int),
                       new_tensor(target_logits, {batch, nodes}, ScalarType::Float),
                       new_tensor(target_logits, {batch, nodes}, ScalarType::Float),
                       new_tensor(target_logits, {batch}, ScalarType::Int)}};
  call.params.out_tokens = data_of<int64_t>(std::get<0>(call.outputs));
  call.params.path = data_of<int64_t>(std::get<1>(call.outputs));
  call.params.num_accepted = data_of<int32_t>(std::get<2>(call.outputs));
  call.params.logprobs = data_of<float>(std::get<3>(call.outputs));
  call.params.accept_probs = data_of<float>(std::get<4>(call.outputs));
  call.params.status = data_of<int32_t>(std::get<5>(call.outputs));
  return call;
}

AcceptanceCall check_acceptance(Tensor target_logits, Tensor draft_logits,
                                OptionalTensor temperature, OptionalTensor top_k,
                                OptionalTensor top_p, OptionalTensor min_p,
                                OptionalTensor draft_temperature, OptionalTensor draft_top_k,
                                OptionalTensor draft_top_p, OptionalTensor draft_min_p,
                                OptionalTensor allowed_mask, OptionalTensor draft_token_ids) {
  const Checker check("acceptance", target_logits);
  check.vocabulary_rows(target_logits, "target_logits", "[R, V]", {-1, -1});
  const int64_t rows = target_logits.size(0);
  check.vocabulary_rows(draft_logits, "draft_logits", "[R, Vd]", {rows, -1});
  AcceptanceCall call{{}, new_tensor(target_logits, {rows}, ScalarType::Float)};
  AcceptanceParams& p = call.params;
  p.rows = rows;
  p.target = dense_rows(target_logits);
  p.draft = dense_rows(draft_logits);
  const int64_t vocab = p.target.vocab;
  p.mask = check_mask(check, allowed_mask, "[R, ceil(V/32)]", {rows, words_for(vocab)}, vocab);
  p.map = check_map(check, draft_token_ids, p.draft.vocab, vocab);
  p.target_sampling = target_sampling(check, temperature, top_k, top_p, min_p, rows);
  p.draft_sampling = draft_sampling(check, draft_temperature, draft_top_k, draft_top_p, draft_min_p,
                                    p.target_sampling, rows);
  p.acceptance = data_of<float>(call.outputs);
  return call;
}

UniformsCall check_uniforms(Tensor seeds, Tensor positions, int64_t n, int64_t stream) {
  const Checker check("uniforms", seeds);
  check.in_range("n", n, 1, kMaxGamma + 2);
  check.in_range("stream", stream, 0, kMaxStream);
  check.longs(seeds, "seeds", {-1});
  const int64_t batch = seeds.size(0);
  UniformsCall call{{}, new_tensor(seeds, {batch, n}, ScalarType::Double)};
  UniformsParams& p = call.params;
  p.batch = batch;
  p.n = n;
  p.randomness.seeds = check.longs(seeds, "seeds", {batch});
  p.randomness.positions = check.longs(positions, "positions", {batch});
  p.randomness.stream = static_cast<uint32_t>(stream);
  p.uniforms = data_of<double>(call.outputs);
  return call;
}

}  // namespace specdec
