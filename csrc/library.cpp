// The schema of every operator of the `specdec` namespace, and nothing else.
//
// Shapes, laws and errors are documented once, in specdec_ext/ops.py. Kernels are registered beside
// their code (register.cpp of csrc/cpu and csrc/cuda); fakes in specdec_ext/_fake.py follow the
// order of this file.
#include <string>

#include "torch/registration.h"

namespace {

// Defines an operator, and its `_prepare_` twin for backends outside C++: the same arguments, which
// it checks, and the same outputs, allocated but not filled (csrc/torch/prepare.cpp).
template <typename Library>
void define(Library& m, const std::string& schema) {
  m.def(schema.c_str());
  m.def(("_prepare_" + schema).c_str());
}

}  // namespace

SPECDEC_LIBRARY(SPECDEC_NAMESPACE, m) {
  // A logits row and its filters as five scalars: the probability law that every rule works with.
  define(m,
         "row_law(Tensor logits, *, Tensor? temperature=None, Tensor? top_k=None, "
         "Tensor? top_p=None, Tensor? min_p=None, Tensor? allowed_mask=None) "
         "-> (Tensor max, Tensor scale, Tensor cutoff, Tensor log_z, Tensor argmax)");

  // One token per row, drawn from the row's law by an inverse CDF in integers, or by a race.
  define(m,
         "sample(Tensor logits, Tensor? uniforms=None, *, Tensor? seeds=None, "
         "Tensor? positions=None, int draft_index=0, int domain=2, int stream=0, "
         "Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
         "Tensor? allowed_mask=None, Tensor? draft_token_ids=None) "
         "-> (Tensor tokens, Tensor logprobs)");

  // Chain verification: draft tokens and raw logits in, tokens to emit out.
  define(m,
         "verify(Tensor target_logits, Tensor draft_tokens, Tensor? draft_logits=None, *, "
         "Tensor? draft_probs=None, Tensor? draft_kinds=None, Tensor? draft_lengths=None, "
         "Tensor? target_rows=None, Tensor? draft_rows=None, "
         "Tensor? uniforms=None, Tensor? seeds=None, Tensor? positions=None, int stream=0, "
         "Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
         "Tensor? draft_temperature=None, Tensor? draft_top_k=None, Tensor? draft_top_p=None, "
         "Tensor? draft_min_p=None, str rule=\"block\", float lenience=1.0, int beta=3, "
         "float tau=1.0, float epsilon=0.09, float delta=0.3, bool full_accept_probs=False, "
         "bool raw_logprobs=False, Tensor? allowed_mask=None, Tensor? draft_token_ids=None) "
         "-> (Tensor tokens, Tensor num_accepted, Tensor logprobs, Tensor accept_probs, "
         "Tensor status)");

  // Tree verification: the same for a tree of draft tokens, given by the parents of its nodes.
  define(m,
         "verify_tree(Tensor target_logits, Tensor tokens, Tensor parents, "
         "Tensor? draft_logits=None, *, Tensor? draft_probs=None, Tensor? kinds=None, "
         "Tensor? draft_rows=None, Tensor? target_rows=None, Tensor? uniforms=None, "
         "Tensor? seeds=None, Tensor? positions=None, int stream=0, Tensor? temperature=None, "
         "Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
         "Tensor? draft_temperature=None, Tensor? draft_top_k=None, Tensor? draft_top_p=None, "
         "Tensor? draft_min_p=None, str rule=\"traversal\", bool raw_logprobs=False, "
         "Tensor? allowed_mask=None, Tensor? draft_token_ids=None) "
         "-> (Tensor tokens, Tensor path, Tensor num_accepted, Tensor logprobs, "
         "Tensor accept_probs, Tensor status)");

  // sum_x min(p(x), q(x)) of two laws, row by row: the acceptance probability of one draft token.
  define(m,
         "acceptance(Tensor target_logits, Tensor draft_logits, *, Tensor? temperature=None, "
         "Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
         "Tensor? draft_temperature=None, Tensor? draft_top_k=None, Tensor? draft_top_p=None, "
         "Tensor? draft_min_p=None, Tensor? allowed_mask=None, Tensor? draft_token_ids=None) "
         "-> Tensor acceptance");

  // The coins that verify draws from seeds and positions: n - 1 accept coins, then the final draw.
  define(m, "uniforms(Tensor seeds, Tensor positions, int n, *, int stream=0) -> Tensor uniforms");

  // The ancestors of every node of a draft tree as bits, and its depth.
  define(m, "tree_mask(Tensor parents) -> (Tensor ancestors, Tensor depths, Tensor status)");

  // Keeps the accepted path's keys and values behind the root's, in place.
  define(m,
         "compact_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor path, Tensor num_accepted, "
         "Tensor seq_lens) -> Tensor status");

  // Attention of a tree's nodes to a cached prefix and to their ancestors.
  define(m,
         "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ancestors, "
         "Tensor seq_lens, *, float? scale=None, float soft_cap=0.0) -> Tensor out");
}
