"""Every operator in plain float64 PyTorch: the text that backends must match.

Written to be read beside docs/design.md. One request at a time, one function per rule, nothing
fused. The argument checks live in ``csrc/torch``: shapes and dtypes are assumed clean here, values
are not, and every corner that ``status`` reports is handled where the text says so.

The words: *target* law p, *draft* law q, draft tokens ``x_1 .. x_G``. Node i of a chain is the
state after ``x_1 .. x_i``; row i of the target logits is the law there, and column i (0-based) of
the draft holds ``x_{i+1}`` and the law it was drawn from. ``w_i`` is the inflow of node i and
``h_i`` the threshold of its coin (docs/design.md, "Acceptance").
"""

from .beams import beam_verify
from .caches import compact_kv, tree_attention, tree_mask, tree_size
from .chains import (
    RULES,
    chain_acceptance,
    chain_inflow,
    residual,
    verify,
)
from .draws import (
    ACCEPT,
    COUPLED,
    DRAFT,
    RESIDUAL,
    inverse_cdf,
    law_weights,
    philox4x32,
    philox_uniforms,
    race,
    race_noise,
    residual_weights,
    uniforms,
)
from .laws import Law, law, make_law
from .sampling import acceptance, row_law, sample
from .trees import TREE_RULES, verify_tree

__all__ = [
    "ACCEPT",
    "COUPLED",
    "DRAFT",
    "Law",
    "RESIDUAL",
    "RULES",
    "TREE_RULES",
    "acceptance",
    "beam_verify",
    "chain_acceptance",
    "chain_inflow",
    "compact_kv",
    "inverse_cdf",
    "law",
    "law_weights",
    "make_law",
    "philox4x32",
    "philox_uniforms",
    "race",
    "race_noise",
    "residual",
    "residual_weights",
    "row_law",
    "sample",
    "tree_attention",
    "tree_mask",
    "tree_size",
    "uniforms",
    "verify",
    "verify_tree",
]
