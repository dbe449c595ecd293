// Arguments of every operator: checked once, here, for all backends, and turned into the plain
// structs of core/params.h together with freshly allocated outputs.
//
// What is wrong raises what Python sees as ValueError (value_error.h): the argument's name, what
// was expected (shapes in symbols) and what came.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "../core/params.h"

namespace specdec {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// What a backend needs to run an operator, and what it returns. The tensors that `params` points
// into belong to the caller's stack.
template <typename P, typename Outputs>
struct Call {
  using Params = P;
  P params;
  Outputs outputs;
};

using RowLawCall = Call<RowLawParams, std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>>;
using SampleCall = Call<SampleParams, std::tuple<Tensor, Tensor>>;
using VerifyCall = Call<VerifyParams, std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>>;
using VerifyShardedCall =
    Call<VerifyShardedParams, std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>>;
using VerifyTreeCall =
    Call<VerifyTreeParams, std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>>;
using AcceptanceCall = Call<AcceptanceParams, Tensor>;
using UniformsCall = Call<UniformsParams, Tensor>;
using TreeMaskCall = Call<TreeMaskParams, std::tuple<Tensor, Tensor, Tensor>>;
using CompactKvCall = Call<CompactKvParams, Tensor>;
using BeamVerifyCall =
    Call<BeamVerifyParams,
         std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>>;
using TreeAttentionCall = Call<TreeAttentionParams, std::tuple<Tensor, Tensor>>;

// ---- what several operators take ---

// The members of a group stand in the schema one after the other; `each` visits them in that order.
template <typename T>
constexpr bool is_group = false;

// The sampling parameters of the target's law, or of the draft's.
struct SamplingArguments {
#define SPECDEC_MEMBER(name) OptionalTensor name;
  SPECDEC_SAMPLING(SPECDEC_MEMBER, SPECDEC_MEMBER)
#undef SPECDEC_MEMBER

  template <typename Visit>
  void each(Visit visit) {
#define SPECDEC_VISIT(name) visit(name);
    SPECDEC_SAMPLING(SPECDEC_VISIT, SPECDEC_VISIT)
#undef SPECDEC_VISIT
  }

  bool any() const {
#define SPECDEC_OR_IS_GIVEN(name) || name.has_value()
    return false SPECDEC_SAMPLING(SPECDEC_OR_IS_GIVEN, SPECDEC_OR_IS_GIVEN);
#undef SPECDEC_OR_IS_GIVEN
  }
};
template <>
inline constexpr bool is_group<SamplingArguments> = true;

// The draft's rows, and which rows, tokens and entries count.
struct RowArguments {
  OptionalTensor draft_logits, draft_probs, draft_probs_ids, target_rows;
  OptionalTensor draft_row_index;  // draft_rows of a chain, children_rows of a tree
  OptionalTensor allowed_mask, draft_token_ids;

  template <typename Visit>
  void each(Visit visit) {
    visit(draft_logits), visit(draft_probs), visit(draft_probs_ids), visit(target_rows);
    visit(draft_row_index), visit(allowed_mask), visit(draft_token_ids);
  }
};
template <>
inline constexpr bool is_group<RowArguments> = true;

// Uniforms, or seeds and positions.
struct RandomnessArguments {
  OptionalTensor uniforms, seeds, positions;
  int64_t stream = 0;

  template <typename Visit>
  void each(Visit visit) {
    visit(uniforms), visit(seeds), visit(positions), visit(stream);
  }
};
template <>
inline constexpr bool is_group<RandomnessArguments> = true;

// ---- checks, with parameters in the order of library.cpp ---

RowLawCall check_row_law(const Tensor& logits, const OptionalTensor& allowed_mask,
                         const SamplingArguments& sampling);

SampleCall check_sample(const Tensor& logits, const OptionalTensor& uniforms,
                        const OptionalTensor& allowed_mask, const OptionalTensor& draft_token_ids,
                        const OptionalTensor& seeds, const OptionalTensor& positions,
                        int64_t draft_index, int64_t domain, int64_t stream,
                        const SamplingArguments& sampling);

VerifyCall check_verify(const Tensor& target_logits, const Tensor& draft_tokens,
                        const RowArguments& rows, const OptionalTensor& draft_kinds,
                        const OptionalTensor& draft_lengths, const RandomnessArguments& randomness,
                        const SamplingArguments& sampling, const SamplingArguments& draft_sampling,
                        const std::string& rule, double lenience, int64_t beta, double tau,
                        double epsilon, double delta, bool full_accept_probs, bool raw_logprobs);

// Of a rank's part of the rows: `bounds` [W + 1] say where all ranks' parts begin and end, the last
// being V; the tails hold the rest of a tile that begins here and ends elsewhere.
VerifyShardedCall check_verify_sharded(
    const Tensor& target_logits, const Tensor& draft_tokens, const RowArguments& rows,
    const OptionalTensor& draft_kinds, const OptionalTensor& draft_lengths,
    const RandomnessArguments& randomness, const SamplingArguments& sampling,
    const SamplingArguments& draft_sampling, const std::string& rule, double lenience, int64_t beta,
    double tau, double epsilon, double delta, bool full_accept_probs, bool raw_logprobs,
    const OptionalTensor& target_tail, const OptionalTensor& draft_tail, const Tensor& bounds,
    int64_t rank, int64_t draft_vocab, int64_t exchange);

VerifyTreeCall check_verify_tree(const Tensor& target_logits, const Tensor& tokens,
                                 const Tensor& parents, const RowArguments& rows,
                                 const OptionalTensor& kinds, const RandomnessArguments& randomness,
                                 const SamplingArguments& sampling,
                                 const SamplingArguments& draft_sampling, const std::string& rule,
                                 bool raw_logprobs);

AcceptanceCall check_acceptance(const Tensor& target_logits, const Tensor& draft_logits,
                                const OptionalTensor& allowed_mask,
                                const OptionalTensor& draft_token_ids,
                                const SamplingArguments& sampling,
                                const SamplingArguments& draft_sampling);

UniformsCall check_uniforms(const Tensor& seeds, const Tensor& positions, int64_t n,
                            int64_t stream);

TreeMaskCall check_tree_mask(const Tensor& parents);

CompactKvCall check_compact_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& path,
                               const Tensor& num_accepted, const Tensor& seq_lens);

BeamVerifyCall check_beam_verify(const Tensor& target_logits, const Tensor& scores,
                                 const Tensor& tokens, const Tensor& parents, int64_t gamma,
                                 const OptionalTensor& eos_token_ids, const std::string& rule,
                                 bool log_probs);

TreeAttentionCall check_tree_attention(const Tensor& q, const Tensor& k_cache,
                                       const Tensor& v_cache, const Tensor& ancestors,
                                       const Tensor& seq_lens, const OptionalTensor& block_table,
                                       const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                                       const std::optional<double>& scale, double soft_cap,
                                       int64_t window);

}  // namespace specdec
