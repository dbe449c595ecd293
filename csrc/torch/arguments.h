// Arguments of every operator: checked once, here, for all backends, and turned into the plain
// structs of core/params.h together with freshly allocated outputs.
//
// What is wrong raises std::invalid_argument, which Python sees as ValueError: the argument's name,
// what was expected (shapes in symbols) and what came.
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
using VerifyTreeCall =
    Call<VerifyTreeParams, std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>>;
using AcceptanceCall = Call<AcceptanceParams, Tensor>;
using UniformsCall = Call<UniformsParams, Tensor>;
using TreeMaskCall = Call<TreeMaskParams, std::tuple<Tensor, Tensor, Tensor>>;
using CompactKvCall = Call<CompactKvParams, Tensor>;
using TreeAttentionCall = Call<TreeAttentionParams, Tensor>;

// Parameters in the order of library.cpp.

RowLawCall check_row_law(Tensor logits, OptionalTensor temperature, OptionalTensor top_k,
                         OptionalTensor top_p, OptionalTensor min_p, OptionalTensor allowed_mask);

SampleCall check_sample(Tensor logits, OptionalTensor uniforms, OptionalTensor seeds,
                        OptionalTensor positions, int64_t draft_index, int64_t domain,
                        int64_t stream, OptionalTensor temperature, OptionalTensor top_k,
                        OptionalTensor top_p, OptionalTensor min_p, OptionalTensor allowed_mask,
                        OptionalTensor draft_token_ids);

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
                        OptionalTensor draft_token_ids);

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
                                 OptionalTensor draft_token_ids);

AcceptanceCall check_acceptance(Tensor target_logits, Tensor draft_logits,
                                OptionalTensor temperature, OptionalTensor top_k,
                                OptionalTensor top_p, OptionalTensor min_p,
                                OptionalTensor draft_temperature, OptionalTensor draft_top_k,
                                OptionalTensor draft_top_p, OptionalTensor draft_min_p,
                                OptionalTensor allowed_mask, OptionalTensor draft_token_ids);

UniformsCall check_uniforms(Tensor seeds, Tensor positions, int64_t n, int64_t stream);

TreeMaskCall check_tree_mask(Tensor parents);

CompactKvCall check_compact_kv(Tensor k_cache, Tensor v_cache, Tensor path, Tensor num_accepted,
                               Tensor seq_lens);

TreeAttentionCall check_tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ancestors,
                                       Tensor seq_lens, std::optional<double> scale,
                                       double soft_cap);

}  // namespace specdec
