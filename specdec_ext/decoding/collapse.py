"""A word to whoever drafts in vain: a warning where next to no draft token is accepted."""

from __future__ import annotations

import warnings

from .stats import Statistics

__all__ = ["ENOUGH_TESTED", "LEAST_ACCEPTED", "warn_where_drafts_fail"]

#: So many draft tokens must have been tested: at a rate of 1 in 5, no more than 1 in 20 of them
#: would be accepted once in 2,000 generations.
ENOUGH_TESTED = 64
#: Below this share no draft pays: a round gains a twentieth of a token, and drafting, with a target
#: call on more tokens, costs more than that.
LEAST_ACCEPTED = 0.05


def warn_where_drafts_fail(statistics: Statistics, *, stacklevel: int) -> None:
    """Warn where drafts were tested often enough, and hardly any token of them was accepted.

    Drafts that come seldom cost little: nothing is said where less than half of the request calls
    tested one, as under a policy that stops drafting (`RenewalRule`), or with a drafter that seldom
    has a proposal.

    Parameters
    ----------
    statistics : Statistics
        Of a whole generation.
    stacklevel : int
        Whose line the warning names, as seen from the caller: see `warnings.warn`.
    """
    accepted, tested = statistics.accepted, statistics.accepted + statistics.rejected
    if tested < ENOUGH_TESTED or accepted >= LEAST_ACCEPTED * tested:
        return
    if 2 * statistics.tested[0] < statistics.request_calls:
        return
    warnings.warn(
        f"generate: the target accepted {accepted} of {tested} draft tokens that it tested, so "
        "drafting costs time and gains none. Does the draft have the target's tokenizer and chat "
        "template (python -m specdec_ext check compares tokenizers)? If it does, it is no draft "
        "for these texts: take another, or None, or gamma=RenewalRule(), which stops drafting",
        stacklevel=stacklevel + 1,
    )
