"""Tools to test a verifier: exact laws, close-or-explained comparison, case generators.

Everything takes *any* callable with the signature of `specdec_ext.verify` or, for trees, of
`specdec_ext.verify_tree` (or of the operators in ``torch.ops.specdec``), so that a decoding loop,
a new backend or a deliberately wrong verifier can be examined in the same way.

Exact laws
    A verifier is a pure function of its uniforms, and the emitted tokens are a step function of
    each of them. `exact_law` enumerates the draft chains, `exact_tree_law` what may be drafted in a
    tree of given parents and kinds; both locate the threshold of each coin and the steps of the
    final draw by bisection, and so integrate out all randomness: the law of what is emitted comes
    out to about 1e-12, with no sampling error. Losslessness is then an equality, not a hypothesis
    test.
Close or explained
    Backends round differently, so two correct ones may differ where a coin falls within rounding of
    its threshold. `assert_tokens_match` and `assert_trees_match` excuse a mismatch only if every
    decision in the outcome is admissible in float64 up to a tolerance (`explain_outcome`,
    `explain_tree_outcome`); nothing else is excused.
Cases
    `make_case` and `make_tree_case` draw seeded inputs over shapes, dtypes, strides, filters,
    temperatures, masks and ragged lengths; `chain_as_tree` gives the chains of a case as trees.

The files: `cases`, `laws`, `exact` and `explain`, with what they stand on in `masks`, `philox` and
`requests`; and the same for trees in `tree_cases`, `tree_laws`, `tree_exact` and `tree_explain`.

The mathematics here is a second formulation, independent of what the operators and
`specdec_ext.reference` use: filters are computed by sorting, and the nodes of a tree by nested
residual laws as vectors (`nested_acceptance`), where neither lambda, S nor kappa occurs.
"""

from .cases import VerifyCase, VerifyOutcome, make_case
from .exact import ExactLaw, exact_law, joint_law, step_law, toy_models, tv_bound
from .explain import assert_tokens_match, explain_outcome
from .laws import draw_interval, filtered_law
from .masks import pack_mask
from .philox import philox4x32, philox_exponentials, philox_uniform
from .tree_cases import TreeCase, chain_as_tree, make_tree_case, post_order
from .tree_exact import draft_trees, exact_tree_law
from .tree_explain import assert_trees_match, explain_tree_outcome
from .tree_laws import NodeAcceptance, nested_acceptance

__all__ = [
    "ExactLaw",
    "NodeAcceptance",
    "TreeCase",
    "VerifyCase",
    "VerifyOutcome",
    "assert_tokens_match",
    "assert_trees_match",
    "chain_as_tree",
    "draft_trees",
    "draw_interval",
    "exact_law",
    "exact_tree_law",
    "explain_outcome",
    "explain_tree_outcome",
    "filtered_law",
    "joint_law",
    "make_case",
    "make_tree_case",
    "nested_acceptance",
    "pack_mask",
    "philox4x32",
    "philox_exponentials",
    "philox_uniform",
    "post_order",
    "step_law",
    "toy_models",
    "tv_bound",
]
