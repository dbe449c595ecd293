"""What every part of the package agrees on, each fact once: results, bits, kinds, domains, rules.

The ground floor: nothing here imports from the package. C++ has the same facts in csrc/core (the
rules in rules.h), and ``python_tests/operators/test_contract.py`` compares the two. A new
verification rule begins with its line in `RULES`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = [
    "BEAM_RULES",
    "BeamVerifyResult",
    "CHAIN_RULES",
    "DOMAIN_ACCEPT",
    "DOMAIN_COUPLED",
    "DOMAIN_DRAFT",
    "DOMAIN_RESIDUAL",
    "GREEDY_BELOW",
    "KIND_DETERMINISTIC",
    "KIND_IID",
    "KIND_REST",
    "KIND_SAMPLED",
    "KIND_WITHOUT_REPLACEMENT",
    "RULES",
    "RowLaw",
    "Rule",
    "STATUS_INVALID_DRAFT_TOKEN",
    "STATUS_INVALID_TREE",
    "STATUS_NO_DRAFT_LAW",
    "STATUS_NO_TARGET_LAW",
    "STATUS_PARAMETER_OUT_OF_RANGE",
    "SampleResult",
    "TREE_RULES",
    "TreeAttentionResult",
    "TreeMaskResult",
    "VerifyResult",
    "VerifyTreeResult",
    "rule_names",
]

# -------------------------------------------------------------------------------------------------
# Status bits: docs/design.md, "Failure", says when each is set, and what is done then
# -------------------------------------------------------------------------------------------------

#: The target's row that decides gives no probability distribution.
STATUS_NO_TARGET_LAW = 1
#: A draft token is no token.
STATUS_INVALID_DRAFT_TOKEN = 2
#: A draft token cannot have been drawn from the draft's row.
STATUS_NO_DRAFT_LAW = 4
#: A number, or a map of a draft's vocabulary, is out of range.
STATUS_PARAMETER_OUT_OF_RANGE = 8
#: Parents or kinds are those of no tree.
STATUS_INVALID_TREE = 16

# -------------------------------------------------------------------------------------------------
# How draft tokens were proposed, and what randomness is for
# -------------------------------------------------------------------------------------------------

#: Kinds of draft tokens. Deterministic: proposed whatever the draft law says.
KIND_DETERMINISTIC = 0
#: Of a chain: drawn from the draft law.
KIND_SAMPLED = 1
#: Of a tree: drawn from the draft law independently of its siblings, ...
KIND_IID = 1
#: ... drawn without replacement, in index order, ...
KIND_WITHOUT_REPLACEMENT = 2
#: ... or drawn from what the deterministic siblings leave of the draft law.
KIND_REST = 3

# Domains keep draws apart: the same seed and position never serve two purposes.
#: The coins of draft tokens.
DOMAIN_ACCEPT = 0
#: The last token of a round, and draws from a target law elsewhere.
DOMAIN_RESIDUAL = 1
#: Draft tokens.
DOMAIN_DRAFT = 2
#: Races that target and draft run on the same noise.
DOMAIN_COUPLED = 3

#: A temperature under this is 0: the law is the point mass at the arg max.
GREEDY_BELOW = 1e-6

# -------------------------------------------------------------------------------------------------
# Rules
# -------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A verification rule, and what sets it apart from others.

    Attributes
    ----------
    name : str
        What ``rule=`` takes.
    chains, trees : bool
        Whether `specdec_ext.verify`, `specdec_ext.verify_tree` has it.
    lossless : bool
        Emitted tokens are distributed as the target's own; at T = 0 they are the arg max.
    reads_draft_law : bool
        The law that draft tokens were drawn from decides, too. A map of a reduced draft vocabulary
        is not looked at by other rules.
    takes_coins : bool
        A uniform for each draft token, and one for the last token's draw.
    races : bool
        The target draws each token in a race, on the noise of the token's place.
    stepwise : bool
        Goes from token to token and stops at the first failure. The others find every threshold
        before they look at a coin.
    raw_logprobs : bool
        Always reports log-probabilities of the raw rows, as ``raw_logprobs=True`` asks of others.
    """

    name: str
    chains: bool = False
    trees: bool = False
    lossless: bool = False
    reads_draft_law: bool = False
    takes_coins: bool = False
    races: bool = False
    stepwise: bool = False
    raw_logprobs: bool = False

    @property
    def ignores_sampling(self) -> bool:
        """Whether it goes by arg max and order of the raw row: no temperature, no randomness."""
        return not (self.takes_coins or self.races)


# fmt: off
_TABLE = (
    Rule("block", chains=True, lossless=True, reads_draft_law=True, takes_coins=True),
    Rule("token", chains=True, lossless=True, reads_draft_law=True, takes_coins=True,
         stepwise=True),
    Rule("traversal", trees=True, lossless=True, reads_draft_law=True, takes_coins=True),
    Rule("recursive", trees=True, lossless=True, reads_draft_law=True, takes_coins=True,
         stepwise=True),
    Rule("target_only", trees=True, lossless=True, takes_coins=True, stepwise=True),
    Rule("greedy", chains=True, trees=True, lossless=True, stepwise=True),
    Rule("lenient", chains=True, reads_draft_law=True, takes_coins=True, stepwise=True),
    Rule("top_beta", chains=True, stepwise=True, raw_logprobs=True),
    Rule("typical", chains=True, takes_coins=True, stepwise=True),
    Rule("coupled", chains=True, trees=True, lossless=True, races=True, stepwise=True),
)
# fmt: on

#: Every rule by its name, in the order in which messages list them.
RULES = {rule.name: rule for rule in _TABLE}


def rule_names(**traits: bool) -> tuple[str, ...]:
    """Names of the rules that have these traits.

    Parameters
    ----------
    **traits : bool
        Attributes of `Rule`, and what they have to be.

    Returns
    -------
    tuple of str
        In the table's order.

    Raises
    ------
    AttributeError
        A rule has no such attribute.

    Examples
    --------
    >>> from specdec_ext.contract import rule_names
    >>> rule_names(chains=True, lossless=True)
    ('block', 'token', 'greedy', 'coupled')
    >>> rule_names(trees=True, takes_coins=True, stepwise=True)
    ('recursive', 'target_only')
    """
    return tuple(
        rule.name
        for rule in _TABLE
        if all(getattr(rule, trait) == wanted for trait, wanted in traits.items())
    )


#: Names that `specdec_ext.verify` takes as its rule.
CHAIN_RULES = rule_names(chains=True)
#: Names that `specdec_ext.verify_tree` takes as its rule.
TREE_RULES = rule_names(trees=True)
#: Names that `specdec_ext.beam_verify` takes as its rule: how it knows that a level is decided.
BEAM_RULES = ("bound", "subset")

# -------------------------------------------------------------------------------------------------
# Results
# -------------------------------------------------------------------------------------------------


class RowLaw(NamedTuple):
    """The law of each row: p(x) = exp(scale * (logit - max) - log_z) where logit >= cutoff, else 0.

    A row without a law (NaN, +inf, all -inf) or with a parameter out of range is NaN throughout,
    with an argmax of -1. T = 0 is scale +inf, cutoff max, log_z 0: the point mass at argmax.
    """

    #: [R] float32, the largest logit.
    max: Tensor
    #: [R] float64, 1 / temperature.
    scale: Tensor
    #: [R] float32, a raw logit: what is below has probability 0. -inf without filters.
    cutoff: Tensor
    #: [R] float64, nats, relative to max.
    log_z: Tensor
    #: [R] int64, the lowest index of the largest logit.
    argmax: Tensor


class SampleResult(NamedTuple):
    """What `sample` returns."""

    #: [B] int64, -1 where nothing could be drawn.
    tokens: Tensor
    #: [B] float32, nats, under the filtered law. 0 at T = 0, NaN where nothing could be drawn.
    logprobs: Tensor


class VerifyResult(NamedTuple):
    """What `verify` returns."""

    #: [B, G+1] int64: accepted tokens, then the residual or bonus token, then -1.
    tokens: Tensor
    #: [B] int32.
    num_accepted: Tensor
    #: [B, G+1] float32, nats, of what is emitted; NaN after the end.
    logprobs: Tensor
    #: [B, G] float32, the threshold of each draft position's coin; NaN where it was not computed.
    accept_probs: Tensor
    #: [B] int32, a set of ``STATUS_`` bits; 0 where all went well.
    status: Tensor


class VerifyTreeResult(NamedTuple):
    """What `verify_tree` returns."""

    #: [B, N] int64: tokens of the accepted path, then the residual or bonus token, then -1.
    tokens: Tensor
    #: [B, N] int64: the node of each accepted token, the root left out, then -1.
    path: Tensor
    #: [B] int32.
    num_accepted: Tensor
    #: [B, N] float32, nats, of what is emitted; NaN after the end.
    logprobs: Tensor
    #: [B, N] float32, by node, the threshold of its coin; 1 at the root, NaN where not computed.
    accept_probs: Tensor
    #: [B] int32, a set of ``STATUS_`` bits; 0 where all went well.
    status: Tensor


class BeamVerifyResult(NamedTuple):
    """What `beam_verify` returns: by level, the beams after it, best first.

    Levels that were not decided, and places without a beam, hold -1 and scores of -inf.
    """

    #: [B, G+1, W] int64: the last token of each live beam.
    tokens: Tensor
    #: [B, G+1, W] int64: the place, in the level before, of the beam that it continues.
    parents: Tensor
    #: [B, G+1, W] int64: the node that it is; -1 also where it is not in the tree.
    nodes: Tensor
    #: [B, G+1, W] float32, nats: the sum of the log-probabilities of its tokens.
    scores: Tensor
    #: [B, G+1, W] int64: the EOS token of each hypothesis that ended, best first.
    finished_tokens: Tensor
    #: [B, G+1, W] int64: as `parents`.
    finished_parents: Tensor
    #: [B, G+1, W] float32, nats: as `scores`, without a length penalty.
    finished_scores: Tensor
    #: [B] int32: decided levels.
    num_levels: Tensor
    #: [B] int32, a set of ``STATUS_`` bits; 0 where all went well.
    status: Tensor


class TreeMaskResult(NamedTuple):
    """What `tree_mask` returns."""

    #: [B, N, ceil(N/64)] int64: bit j % 64 of word j // 64 is set where node j is an ancestor of
    #: the node, or the node itself. Padding nodes have no bits.
    ancestors: Tensor
    #: [B, N] int64, 0 at the root, -1 at padding nodes.
    depths: Tensor
    #: [B] int32, ``STATUS_INVALID_TREE`` where parents are no tree (taken as a root alone), else 0.
    status: Tensor


class TreeAttentionResult(NamedTuple):
    """What attention over some keys leaves: enough to merge it with attention over others."""

    #: [B, N, H, Dv] of q's dtype; 0 where nothing is seen.
    out: Tensor
    #: [B, N, H] float32, nats: log of the sum of exp(score); -inf where nothing is seen.
    lse: Tensor
