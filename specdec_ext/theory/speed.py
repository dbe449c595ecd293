"""Formulae: what speculation gains, from an acceptance rate alpha, a draft length gamma, a cost c.

Words. A *round* is gamma calls of the draft and one call of the target, which verifies the gamma
draft tokens. Time is counted in target calls, so that *c* is the time of one draft call divided by
that of one target call. The *tokens of a round* are those it emits, the token at its end included
(the bonus token, or the one that replaces a rejected draft token): plain decoding has 1. *alpha* is
the probability that a draft token is accepted, given that those before it were. Measured under the
rule "token" it is accepted / (accepted + rejected): a draft token after a rejection was not tried.

Assumptions, those of the paper, in all functions but `latency`: draft tokens are accepted
independently of each other, each with probability alpha, and a target call on gamma + 1 tokens
takes as long as one on a single token.

Sources. Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv
2211.17192 (theorem 8 here is theorem 3.8 there, and so on); Xia et al., "Speculative decoding:
exploiting speculative execution for accelerating seq2seq generation", arXiv 2203.16487; and
Tulsian, Goyal, Aggarwal, a course report on the former.
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
    """Raise where a number is out of range. An alpha of NaN (nothing was tested) passes."""
    if alpha < 0 or alpha > 1:
        raise ValueError(f"{name}: alpha must be in [0, 1], got {alpha}")
    if gamma < 0:
        raise ValueError(f"{name}: gamma must be at least 0, got {gamma}")
    if c < 0:
        raise ValueError(f"{name}: c must be at least 0, got {c}")


# --- tokens -----------------------------------------------------------------------------------


def expected_tokens(alpha: float, gamma: float) -> float:
    """Compute the expected tokens of a round, (1 - alpha^(gamma + 1)) / (1 - alpha): equation 1.

    The token at the end of the round counts. (`accepted_length`, estimated from logits, does not
    count it.)

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round. Any real number from 0 up: `walltime_gradient` needs those between.

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
    """Compute the expected accepted tokens of a round over gamma, which some texts call alpha.

    It is not alpha: tokens after a rejection count here as if they had been tried and rejected, so
    that it falls as gamma grows. Table 2 of the report makes sense only if its alpha is this.

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
    """Compute alpha from accepted over drafted tokens: the inverse of `accepted_share`.

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
    """Compute how many times faster than plain decoding speculation is: theorem 8.

    The expected tokens of a round over its time, (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c +
    1)). That is for long outputs. If ``tokens`` is given, the result is exact for an output of that
    length, whose last rounds draft no more than can still be kept; it is then at most ``tokens``,
    since at least one target call is made.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round; a whole number where ``tokens`` is given.
    c : float
        Time of a draft call, divided by that of a target call.
    tokens : int, optional
        Length of the output, at least 1. None: so long that its end does not matter.

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
    """Compute how many times as many operations as plain decoding speculation takes: theorem 10.

    (1 - alpha) (gamma c + gamma + 1) / (1 - alpha^(gamma + 1)): the target computes gamma + 1
    tokens a round, whether they are kept or not.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round.
    c : float
        Operations of the draft for one token, divided by the target's; the paper writes c-hat.

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
    """Compute how many times as much memory as plain decoding speculation reads.

    Weights, keys and values of the target are read once a round, (gamma c + 1) / `expected_tokens`
    times as often as in plain decoding.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round.
    c : float
        Bytes that a draft call reads, divided by those of a target call. The paper leaves the
        draft out: 0.

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
    """Compute (1 + alpha) / (1 + c), a lower bound of the speed-up at the best gamma.

    It holds where alpha > c, and is reached with one draft token a round.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call, divided by that of a target call.

    Returns
    -------
    float
        `walltime_factor` at gamma = 1.

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
    """Tell whether speculation at some gamma is faster than plain decoding: alpha > c.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call, divided by that of a target call.

    Returns
    -------
    bool

    References
    ----------
    Leviathan et al., arXiv 2211.17192, corollary 9, which shows that alpha > c suffices. It is also
    necessary: each draft token adds at most alpha expected tokens, and takes c.

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
    """Compute the derivative of `walltime_factor` with respect to gamma.

    The report chooses gamma during decoding by gradient ascent on it, with a running mean for alpha
    (`specdec_ext.decoding.GradientAscent`).

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    gamma : float
        Draft tokens a round.
    c : float
        Time of a draft call, divided by that of a target call.

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
    """Compute the real gamma >= 0 at which `walltime_factor` is largest, in closed form.

    Where the derivative is 0, u = alpha^-(gamma + 1) solves u exp(-u) = exp(-k) with
    k = 1 - log(alpha) (1/c - 1). So u = -W(-exp(-k)), with the lower branch W of Lambert's
    function.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call, divided by that of a target call.

    Returns
    -------
    float
        Infinity where the factor grows with gamma without end: c = 0, or alpha = 1 with c < 1.

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
    """Compute the whole gamma at which `walltime_factor` is largest; of equal ones, the smallest.

    As gamma grows, the factor rises and then falls (it is a concave function over a linear one), so
    the best whole number is a neighbour of `optimal_gamma_real`. It is 0, do not draft, if and only
    if alpha <= c.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call, divided by that of a target call.
    limit : int, optional
        Largest gamma to consider. It must be given where the factor grows without end: c = 0, or
        alpha = 1 with c < 1.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        A limit must be given and is not, or an argument is out of range.

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
    """Compute the expected tokens of a round if each draft ended just before its first rejection.

    An *oracle* that knows which draft tokens will be accepted could choose gamma so, anew in every
    round.

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
    """Compute how many times faster than plain decoding speculation is with that oracle.

    1 / (1 - alpha + c alpha): a round drafts alpha / (1 - alpha) tokens on average, and all of them
    are accepted. Where c <= 1, no way of choosing gamma during decoding is faster on average.

    Parameters
    ----------
    alpha : float
        Acceptance rate in [0, 1].
    c : float
        Time of a draft call, divided by that of a target call.

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
    """Compute the time of one output: its number of rounds times the time of a round.

    The paper's "Tok." is the number of tokens that a round emits, the target's own token at its end
    included, so that plain decoding has 1. Nothing is assumed about acceptance.

    Parameters
    ----------
    length : float
        Tokens of the output.
    tokens_per_round : float
        Tokens that a round emits, at least 1; "Tok." in the paper.
    draft_time, verify_time : float
        Time of a round's drafting and of its target call, in any one unit.

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
