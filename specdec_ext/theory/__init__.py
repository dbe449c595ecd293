"""The papers' formulae: what a draft is worth, measured on saved logits or computed from rates.

Three files: `rows`, acceptance of one draft token, row by row; `estimates`, means over contexts
and drafts with standard errors; `speed`, what follows from alpha, gamma and c.

The first two follow Leviathan et al., "Fast inference from transformers via speculative decoding",
arXiv 2211.17192 (its section 3 is cited by number), and Sun et al., "Block verification accelerates
speculative decoding", arXiv 2403.10444. Laws are those of `specdec_ext.verify`: temperature and
filters of the target, and by default the same of the draft.

Estimates take a *stream*: any iterable of batches of logits, which is read once and never held
together, so that a file larger than memory will do.
"""

from .estimates import (
    Estimate,
    acceptance_rate,
    accepted_length,
    expected_accepted,
    ratio,
)
from .rows import (
    divergence,
    lenient_acceptance,
    rejection_sampling_acceptance,
)
from .speed import (
    accepted_share,
    alpha_of_share,
    expected_tokens,
    improves,
    latency,
    memory_access_factor,
    operations_factor,
    optimal_gamma,
    optimal_gamma_real,
    oracle_factor,
    oracle_tokens,
    walltime_bound,
    walltime_factor,
    walltime_gradient,
)

__all__ = [
    "Estimate",
    "acceptance_rate",
    "accepted_length",
    "accepted_share",
    "alpha_of_share",
    "divergence",
    "expected_accepted",
    "expected_tokens",
    "improves",
    "latency",
    "lenient_acceptance",
    "memory_access_factor",
    "operations_factor",
    "optimal_gamma",
    "optimal_gamma_real",
    "oracle_factor",
    "oracle_tokens",
    "ratio",
    "rejection_sampling_acceptance",
    "walltime_bound",
    "walltime_factor",
    "walltime_gradient",
]
