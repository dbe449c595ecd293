"""What Theorem 3.8 of Leviathan et al. (arXiv 2211.17192) says, with two of its assumptions lifted.

It assumes that a target call on gamma + 1 tokens takes as long as one on a single token, and that
texts are long. Here such a call may take r times as long, and texts have their lengths. That draft
tokens are accepted independently of each other, each with probability alpha, stays assumed.
"""

from __future__ import annotations

from collections.abc import Iterable

from specdec_ext import theory


def corrected_factor(alpha: float, gamma: int, c: float, r: float) -> float:
    """Compute the speed-up if a target call on gamma + 1 tokens takes r times one on a token.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : int
        Draft tokens a round.
    c : float
        Time of a draft call, in target calls on one token.
    r : float
        Time of a target call on gamma + 1 tokens, in the same unit. At 1 it is Theorem 3.8.

    Returns
    -------
    float
    """
    return theory.expected_tokens(alpha, gamma) / (gamma * c + r)


def expected_rounds(alpha: float, gamma: int, length: int) -> float:
    """Compute the expected rounds until a text of a given length is there.

    Every round drafts gamma tokens, the last one too: an end token is not foreseen, and what is
    behind it was drafted for nothing. (`theory.walltime_factor` with ``tokens`` is about a limit on
    the length, which is known beforehand.)

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : int
        Draft tokens a round.
    length : int
        Tokens, the end token included.

    Returns
    -------
    float
    """
    chances = [(1 - alpha) * alpha**n for n in range(gamma)] + [alpha**gamma]
    rounds = [0.0]
    for left in range(1, length + 1):
        rest = sum(p * rounds[max(left - 1 - n, 0)] for n, p in enumerate(chances))
        rounds.append(1 + rest)
    return rounds[length]


def factor_of_lengths(
    alpha: float, gamma: int, c: float, r: float, lengths: Iterable[int]
) -> float:
    """Compute the speed-up over all texts of given lengths, the call corrected as above."""
    lengths = list(lengths)
    rounds = sum(expected_rounds(alpha, gamma, length) for length in lengths)
    return sum(lengths) / (rounds * (gamma * c + r))
