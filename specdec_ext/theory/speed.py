"""What follows from an acceptance rate alpha, a draft length gamma and a cost ratio c.

Words. A round is one call of the target and the gamma draft calls before it. Time is counted in
target calls; *c* is the time of a draft call in them. Conventions: *tokens* a round are those
emitted, the bonus or replacement that ends the round included, so that plain decoding has 1;
*alpha* is accepted / (accepted + rejected), since a draft token after a rejection is no trial. All
but `latency` assume, as the paper does, that draft tokens are accepted independently at rate alpha
and that the target's call takes as long on gamma + 1 tokens as on one.

Sources. Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv
2211.17192, by its own numbering (theorem 8 of the proceedings is 3.8 there); Xia et al.,
"Speculative decoding: exploiting speculative execution for accelerating seq2seq generation", arXiv
2203.16487; and Tulsian, Goyal, Aggarwal, a course report on the former.
"""

from __future__ import annotations

import math

__all__ = [
    "accepted_share",
    "alpha_of_share",
    "expected_tokens",
    "improves",
    "latency",
    "memory_access_factor",
    "operations_factor",
    "optimal_gamma",
    "optimal_gamma_real",
    "oracle_factor",
    "oracle_tokens",
    "walltime_bound",
    "walltime_factor",
    "walltime_gradient",
]


def _check(name: str, *, alpha: float = 0.0, gamma: float = 0.0, c: float = 0.0) -> None:
    """Check ranges. NaN, an alpha of which nothing was tested, gives NaN."""
    if alpha < 0 or alpha > 1:
        raise ValueError(f"{name}: alpha must be in [0, 1], got {alpha}")
    if gamma < 0:
        raise ValueError(f"{name}: gamma must be at least 0, got {gamma}")
    if c < 0:
        raise ValueError(f"{name}: c must be at least 0, got {c}")


# --- tokens -----------------------------------------------------------------------------------


def expected_tokens(alpha: float, gamma: float) -> float:
    """Compute E[tokens a round] = (1 - alpha^(gamma + 1)) / (1 - alpha), equation 1.

    Convention: the round's final token is counted; `accepted_length` plus 1.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round. Not only whole numbers, for `walltime_gradient`.

    Returns
    -------
    float

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.1, figure 2.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.expected_tokens(0.5, 2)
    1.75
    """
    _check("expected_tokens", alpha=alpha, gamma=gamma)
    if alpha == 1:
        return gamma + 1
    if alpha == 0:
        return 1.0
    # As 1 - alpha ** (gamma + 1), but without its loss of digits as alpha nears 1.
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)


def accepted_share(alpha: float, gamma: int) -> float:
    """Compute E[accepted draft tokens] / gamma, which some texts print as their alpha.

    It falls as gamma grows, alpha does not: tokens after a rejection count here as if they had
    been tried. The table 2 of the report can only be read so.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1]: accepted / (accepted + rejected).
    gamma : int
        Draft tokens a round, at least 1.

    Returns
    -------
    float

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.accepted_share(0.5, 1), theory.accepted_share(0.5, 2)
    (0.5, 0.375)
    """
    if gamma < 1:
        raise ValueError(f"accepted_share: gamma must be at least 1, got {gamma}")
    return (expected_tokens(alpha, gamma) - 1) / gamma


def alpha_of_share(share: float, gamma: int) -> float:
    """Compute the alpha at which `accepted_share` is ``share``.

    Parameters
    ----------
    share : float
        Accepted / drafted, in [0, 1].
    gamma : int
        Draft tokens a round, at least 1.

    Returns
    -------
    float

    Examples
    --------
    >>> from specdec_ext import theory
    >>> round(theory.alpha_of_share(0.375, 2), 12)
    0.5
    """
    if not 0 <= share <= 1:
        raise ValueError(f"alpha_of_share: share must be in [0, 1], got {share}")
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection: the share grows with alpha
        middle = (low + high) / 2
        if accepted_share(middle, gamma) < share:
            low = middle
        else:
            high = middle
    return high


# --- factors against plain decoding -----------------------------------------------------------


def walltime_factor(alpha: float, gamma: float, c: float, tokens: int | None = None) -> float:
    """Compute how many times faster than plain decoding: theorem 8.

    (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)), for long outputs. For an output of so
    many ``tokens`` it is exact: the rounds near the end draft no more than can be kept. It cannot
    be above ``tokens`` then, the cap that the paper names, since one target call is always made.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round; a whole number where ``tokens`` is given.
    c : float
        Time of a draft call in target calls.
    tokens : int, optional
        Length of the output. None: long.

    Returns
    -------
    float

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.3.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.walltime_factor(0.5, 2, 0.25)
    1.1666666666666667
    >>> theory.walltime_factor(1.0, 7, 0.0), theory.walltime_factor(1.0, 7, 0.0, tokens=3)
    (8.0, 3.0)
    """
    _check("walltime_factor", alpha=alpha, gamma=gamma, c=c)
    if tokens is None:
        return expected_tokens(alpha, gamma) / (gamma * c + 1)
    if tokens < 1 or gamma != int(gamma):
        raise ValueError(
            f"walltime_factor: tokens must be at least 1 and gamma whole, got {tokens} and {gamma}"
        )
    time = [0.0]  # expected, by the number of tokens that are left
    for left in range(1, tokens + 1):
        drafted = min(int(gamma), left - 1)
        accepted = [(1 - alpha) * alpha**n for n in range(drafted)] + [alpha**drafted]
        rest = sum(weight * time[left - 1 - n] for n, weight in enumerate(accepted))
        time.append(1 + c * drafted + rest)
    return tokens / time[-1]


def operations_factor(alpha: float, gamma: float, c: float = 0.0) -> float:
    """Compute how many times the operations of plain decoding: theorem 10.

    (1 - alpha) (gamma c + gamma + 1) / (1 - alpha^(gamma + 1)).

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round.
    c : float
        The paper's c-hat: operations a token of the draft in those of the target.

    Returns
    -------
    float
        At least 1.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.4, table 1.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.operations_factor(0.5, 1)
    1.3333333333333333
    """
    _check("operations_factor", c=c)
    return (gamma * c + gamma + 1) / expected_tokens(alpha, gamma)


def memory_access_factor(alpha: float, gamma: float, c: float = 0.0) -> float:
    """Compute how many times the weights and keys and values read by plain decoding.

    The target's are read once a round: 1 / `expected_tokens`, with the draft's where it has any.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round.
    c : float
        Bytes that a draft call reads in those of a target call. 0 (the paper): not counted.

    Returns
    -------
    float

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.4.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.memory_access_factor(0.5, 2)
    0.5714285714285714
    """
    _check("memory_access_factor", c=c)
    return (gamma * c + 1) / expected_tokens(alpha, gamma)


def walltime_bound(alpha: float, c: float) -> float:
    """Compute (1 + alpha) / (1 + c): at least so much faster, with the best gamma, if alpha > c.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call in target calls.

    Returns
    -------
    float
        `walltime_factor` of gamma = 1.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, corollary 9 (3.9 in its numbering).

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.walltime_bound(0.5, 0.25)
    1.2
    """
    _check("walltime_bound", alpha=alpha, c=c)
    return (1 + alpha) / (1 + c)


def improves(alpha: float, c: float) -> bool:
    """Tell whether some gamma is faster than plain decoding: if and only if alpha > c.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call in target calls.

    Returns
    -------
    bool

    References
    ----------
    Leviathan et al., arXiv 2211.17192, corollary 9, which states the "if". The converse: each draft
    token adds at most alpha tokens for its c.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.improves(0.5, 0.25), theory.improves(0.25, 0.5)
    (True, False)
    """
    _check("improves", alpha=alpha, c=c)
    return alpha > c


# --- the best gamma ---------------------------------------------------------------------------


def walltime_gradient(alpha: float, gamma: float, c: float) -> float:
    """Compute the derivative of `walltime_factor` in gamma.

    The report climbs it, with a running mean for alpha, to choose gamma as it goes.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round.
    c : float
        Time of a draft call in target calls.

    Returns
    -------
    float

    References
    ----------
    Tulsian, Goyal, Aggarwal, section II.D.2 and its figure 1.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.walltime_gradient(1.0, 3, 0.0)
    1.0
    """
    _check("walltime_gradient", alpha=alpha, gamma=gamma, c=c)
    if alpha == 1:
        growth = 1.0
    elif alpha == 0:
        growth = 0.0
    else:
        growth = -(alpha ** (gamma + 1)) * math.log(alpha) / (1 - alpha)
    return (growth - c * walltime_factor(alpha, gamma, c)) / (gamma * c + 1)


def optimal_gamma_real(alpha: float, c: float) -> float:
    """Compute the gamma that maximises theorem 8 over the reals from 0 up, in closed form.

    Where the derivative is 0, u = alpha^-(gamma + 1) solves u exp(-u) = exp(-k) with
    k = 1 - log(alpha) (1/c - 1): u = -W(-exp(-k)), W the lower branch of Lambert's function.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call in target calls.

    Returns
    -------
    float
        Infinity where the factor grows without end: c = 0, or alpha = 1 with c < 1.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.5 (which searches numerically); Corless et al.,
    "On the Lambert W function", Advances in Computational Mathematics 5, 1996, section 4.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> round(theory.optimal_gamma_real(0.8, 0.05), 3)
    7.857
    """
    _check("optimal_gamma_real", alpha=alpha, c=c)
    if alpha == 0 or c >= 1:
        return 0.0
    if alpha == 1 or c == 0:
        return math.inf
    decay = -math.log(alpha)
    return max(_log_minus_lambert(decay * (1 / c - 1)) / decay - 1, 0.0)


def _log_minus_lambert(s: float) -> float:
    """Return log(-W(-exp(-1 - s))) of the lower branch, s > 0.

    It is the root v > 0 of exp(v) - 1 - v = s. Newton's iteration falls towards the root of this
    convex function; it starts at the bound of Chatzigeorgiou, "Bounds on the Lambert function",
    arXiv 1601.04895, theorem 1. A large s loses no digits, as exp(-1 - s) would.
    """
    v = math.log1p(math.sqrt(2 * s) + s)
    while True:
        lower = v - (math.expm1(v) - v - s) / math.expm1(v)
        if not 0 < lower < v:
            return v
        v = lower


def optimal_gamma(alpha: float, c: float, limit: int | None = None) -> int:
    """Compute the whole gamma that maximises theorem 8; of equal ones, the smallest.

    The factor rises, then falls (a concave numerator over a linear denominator), so it is one of
    the two neighbours of `optimal_gamma_real`. 0, do not draft, if and only if alpha <= c.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call in target calls.
    limit : int, optional
        Largest gamma to consider. Needed where no gamma is best: c = 0, or alpha = 1 with c < 1.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        A limit is needed, or an argument is out of range.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.5, figure 3.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.optimal_gamma(0.8, 0.05), theory.optimal_gamma(0.8, 0.0, limit=10)
    (8, 10)
    """
    real = optimal_gamma_real(alpha, c)
    if limit is None and math.isinf(real):
        raise ValueError(
            f"optimal_gamma: the factor grows without end at alpha {alpha} and c {c}: give limit"
        )
    if not improves(alpha, c):
        return 0
    real = max(real, 1.0) if limit is None else min(max(real, 1.0), limit)
    return max(math.floor(real), math.ceil(real), key=lambda n: (walltime_factor(alpha, n, c), -n))


def oracle_tokens(alpha: float) -> float:
    """Compute E[tokens a round] where an oracle ends each draft at its first rejection.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].

    Returns
    -------
    float
        1 / (1 - alpha); infinity at 1.

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.5.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.oracle_tokens(0.75)
    4.0
    """
    _check("oracle_tokens", alpha=alpha)
    return math.inf if alpha == 1 else 1 / (1 - alpha)


def oracle_factor(alpha: float, c: float) -> float:
    """Compute how many times faster than plain decoding under that oracle.

    1 / (1 - alpha + c alpha): it drafts alpha / (1 - alpha) tokens a round, and all are accepted.
    Where c <= 1, no way of choosing gamma as decoding goes is faster on average.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call in target calls.

    Returns
    -------
    float

    References
    ----------
    Leviathan et al., arXiv 2211.17192, section 3.5.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.oracle_factor(0.75, 0.2)
    2.5
    """
    _check("oracle_factor", alpha=alpha, c=c)
    rate = 1 - alpha + c * alpha
    return 1 / rate if rate else math.inf


# --- latency ----------------------------------------------------------------------------------


def latency(length: float, tokens_per_round: float, draft_time: float, verify_time: float) -> float:
    """Compute the time of one output: length / tokens a round, times a round's time.

    Convention: Xia's Tok. counts what a round emits, the target's own token at its end included,
    so that plain decoding has 1; nothing is assumed of acceptance.

    Parameters
    ----------
    length : float
        Tokens of the output.
    tokens_per_round : float
        Tok., tokens emitted a round, at least 1.
    draft_time, verify_time : float
        Time of a round's drafting and of its verification, in any unit.

    Returns
    -------
    float
        In the same unit.

    References
    ----------
    Xia et al., arXiv 2203.16487, equation 4.

    Examples
    --------
    >>> from specdec_ext import theory
    >>> theory.latency(100, 4, 2.0, 6.0)
    200.0
    """
    if tokens_per_round < 1:
        raise ValueError(f"latency: tokens_per_round must be at least 1, got {tokens_per_round}")
    return length / tokens_per_round * (draft_time + verify_time)
