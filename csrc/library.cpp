// The schema of every operator of the `specdec` namespace, and nothing else.
//
// Shapes, laws and errors are documented once, in specdec_ext/ops.py and beams.py. Arguments are
// in the order of their roles: logits, what says which rows, tokens and entries of them count, what
// was drafted, randomness, sampling parameters, the rule, what to report.
#include <string>

#include "torch/operators.h"
#include "torch/registration.h"

namespace {

// What several operators take. Each is a struct of torch/arguments.h.

#define ARGUMENT(name) ", Tensor? " #name "=None"
#define SAMPLING SPECDEC_SAMPLING(ARGUMENT, ARGUMENT)

#define DRAFT_ARGUMENT(name) ", Tensor? draft_" #name "=None"
#define DRAFT_SAMPLING SPECDEC_SAMPLING(DRAFT_ARGUMENT, DRAFT_ARGUMENT)

#define RANDOMNESS \
  ", Tensor? uniforms=None, Tensor? seeds=None, Tensor? positions=None, int stream=0"

// RowArguments: between these two comes the argument that says which of the draft's rows are read.
#define ROWS                                                                                 \
  ", Tensor? draft_logits=None, *, Tensor? draft_probs=None, Tensor? draft_probs_ids=None, " \
  "Tensor? target_rows=None"
#define MASK_AND_MAP ", Tensor? allowed_mask=None, Tensor? draft_token_ids=None"

namespace schemas {

// A logits row and its filters as five scalars: the probability law that every rule works with.
constexpr char row_law[] =
    "(Tensor logits, *, Tensor? allowed_mask=None" SAMPLING
    ") -> (Tensor max, Tensor scale, Tensor cutoff, Tensor log_z, Tensor argmax)";

// One token per row, drawn from the row's law by an inverse CDF in integers, or by a race.
constexpr char sample[] =
    "(Tensor logits, Tensor? uniforms=None, *, Tensor? allowed_mask=None, "
    "Tensor? draft_token_ids=None, Tensor? seeds=None, Tensor? positions=None, "
    "int draft_index=0, int domain=2, int stream=0" SAMPLING
    ") -> (Tensor tokens, Tensor logprobs)";

#define VERIFY_ARGUMENTS                                                                      \
  "Tensor target_logits, Tensor draft_tokens" ROWS ", Tensor? draft_rows=None" MASK_AND_MAP   \
  ", Tensor? draft_kinds=None, Tensor? draft_lengths=None" RANDOMNESS SAMPLING DRAFT_SAMPLING \
  ", str rule=\"block\", float lenience=1.0, int beta=3, float tau=1.0, float epsilon=0.09, " \
  "float delta=0.3, bool full_accept_probs=False, bool raw_logprobs=False"
#define VERIFY_OUTPUTS \
  "(Tensor tokens, Tensor num_accepted, Tensor logprobs, Tensor accept_probs, Tensor status)"

// Chain verification: draft tokens and raw logits in, tokens to emit out.
constexpr char verify[] = "(" VERIFY_ARGUMENTS ") -> " VERIFY_OUTPUTS;

// The same on one of several ranks that hold parts of the vocabulary (specdec_ext/distributed).
constexpr char verify_sharded[] =
    "_verify_sharded(" VERIFY_ARGUMENTS
    ", Tensor? target_tail=None, Tensor? draft_tail=None, Tensor bounds, int rank, "
    "int draft_vocab, int exchange) -> " VERIFY_OUTPUTS;

// What ranks exchange: bytes are gathered, int64 summed. Its implementation is Python's.
constexpr char exchange[] = "_exchange(Tensor mine, int exchange) -> Tensor";

// Tree verification: the same for a tree of draft tokens, given by the parents of its nodes.
constexpr char verify_tree[] =
    "(Tensor target_logits, Tensor tokens, Tensor parents" ROWS
    ", Tensor? children_rows=None" MASK_AND_MAP
    ", Tensor? kinds=None" RANDOMNESS SAMPLING DRAFT_SAMPLING
    ", str rule=\"traversal\", bool raw_logprobs=False"
    ") -> (Tensor tokens, Tensor path, Tensor num_accepted, Tensor logprobs, "
    "Tensor accept_probs, Tensor status)";

// sum_x min(p(x), q(x)) of two laws, row by row: the acceptance probability of one draft token.
constexpr char acceptance[] =
    "(Tensor target_logits, Tensor draft_logits, *, Tensor? allowed_mask=None, "
    "Tensor? draft_token_ids=None" SAMPLING DRAFT_SAMPLING ") -> Tensor acceptance";

// The coins that verify draws from seeds and positions: n - 1 accept coins, then the final draw.
constexpr char uniforms[] =
    "(Tensor seeds, Tensor positions, int n, *, int stream=0) -> Tensor uniforms";

// The ancestors of every node of a draft tree as bits, and its depth.
constexpr char tree_mask[] = "(Tensor parents) -> (Tensor ancestors, Tensor depths, Tensor status)";

// Keeps the accepted path's keys and values behind the root's, in place.
constexpr char compact_kv[] =
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor path, Tensor num_accepted, "
    "Tensor seq_lens) -> Tensor status";

// Levels of beam search by the target, as far as the rows of a draft's beams decide them.
constexpr char beam_verify[] =
    "(Tensor target_logits, Tensor scores, Tensor tokens, Tensor parents, int gamma, *, "
    "Tensor? eos_token_ids=None, str rule=\"bound\", bool log_probs=False) -> (Tensor tokens, "
    "Tensor parents, Tensor nodes, Tensor scores, Tensor finished_tokens, "
    "Tensor finished_parents, Tensor finished_scores, Tensor num_levels, Tensor status)";

// Attention of a tree's nodes to a cached prefix and to their ancestors, and its log-sum-exp.
constexpr char tree_attention[] =
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ancestors, Tensor seq_lens, *, "
    "Tensor? block_table=None, Tensor? k_scale=None, Tensor? v_scale=None, float? scale=None, "
    "float soft_cap=0.0, int window=0) -> (Tensor out, Tensor lse)";

}  // namespace schemas

// Defines an operator, and its `_prepare_` twin for backends outside C++: the same arguments, which
// it checks, and the same outputs, allocated but not filled (csrc/torch/prepare.cpp).
template <typename Library>
void define(Library& m, const std::string& name, const char* schema) {
  m.def((name + schema).c_str());
  m.def(("_prepare_" + name + schema).c_str());
}

}  // namespace

SPECDEC_LIBRARY(SPECDEC_NAMESPACE, m) {
#define SPECDEC_DEFINE(name, Name) define(m, #name, schemas::name);
  SPECDEC_OPERATORS(SPECDEC_DEFINE)
#undef SPECDEC_DEFINE
  m.def(schemas::verify_sharded);
  m.def(schemas::exchange);
}
