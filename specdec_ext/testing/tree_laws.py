"""Acceptance in a tree, by vectors.

A second formulation of the mathematics: the normalised residual law after each child as a vector,
and each child's proposal law as a vector. Neither lambda, S nor kappa of the operators occurs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class NodeAcceptance(NamedTuple):
    """What `nested_acceptance` finds, by node.

    Attributes
    ----------
    probs : list of float
        The threshold of each node's coin; NaN where the node cannot be accepted.
    slack : list of float
        How far rounding may move it.
    extra : list of Tensor
        ``[V]``: the law of the extra token if the node wins.
    noise : list of float
        How far rounding may move an entry of that law.
    unusable : set of int
        Children that cannot have been drawn as their kind says, whether or not a rule gets there.
    """

    probs: list[float]
    slack: list[float]
    extra: list[Tensor]
    noise: list[float]
    unusable: set[int]


def _proposal(
    kind: int,
    token: int,
    earlier: Sequence[int],
    deterministic: Sequence[int],
    q: Tensor | None,
    size: int,
) -> Tensor | None:
    """Law ``[size]`` that a child was drawn from; None if it cannot have been."""
    law = torch.zeros(size, dtype=torch.float64)
    if kind == 0:
        law[token] = 1.0
        return law
    if q is None:
        return None
    law[: len(q)] = q
    if kind == 2:
        law[list(earlier)] = 0.0
    if kind == 3:
        law[list(deterministic)] = 0.0
    if not float(law.sum()) > 0:
        return None
    law /= law.sum()
    return law if float(law[token]) > 0 else None


def _outflow(a: float, a_slack: float, mass: float, mass_slack: float) -> tuple[float, float]:
    """Give R / (R + 1 - a), 1 where a is 1, and how far rounding may move it."""

    def ratio(mass: float, rest: float) -> float:
        return mass / (mass + rest) if mass > 0 else float(rest == 0)

    value = ratio(mass, 1.0 - a)
    lowest = ratio(max(mass - mass_slack, 0.0), 1.0 - a + a_slack)
    highest = ratio(mass + mass_slack, max(1.0 - a - a_slack, 0.0))
    return value, max(value - lowest, highest - value)


def nested_acceptance(
    parents: Sequence[int],
    tokens: Sequence[int],
    kinds: Sequence[int],
    target: Sequence[Tensor | None],
    draft: Sequence[Tensor | None],
    rule: str = "traversal",
    tolerance: float = 0.0,
) -> NodeAcceptance:
    """Compute the acceptance thresholds of a tree from nested residual laws.

    A node begins with its target law r = p and inflow a. A child x with proposal law s gets b =
    min(1, a r(x) / s(x)); then r becomes [a r - s]+, normalised by its sum R, and a becomes R / (R
    + 1 - a). Under "traversal" b flows into the child, and a node's coin has the last a as its
    threshold; under "recursive" every node begins with a = 1, and a child's coin has b.

    Parameters
    ----------
    parents, tokens, kinds : sequence of int
        By node. A child with token -1 is not there, nor what is below it.
    target, draft : sequence of Tensor or None
        By node, ``[V]`` and ``[Vd]``: the target's law there, and the law that its children were
        drawn from.
    rule : {"traversal", "recursive"}
        See above.
    tolerance : float
        Relative error of the laws, for `slack` and `noise`.

    Examples
    --------
    >>> p, q = torch.tensor([0.3, 0.7]), torch.tensor([0.8, 0.2])
    >>> found = nested_acceptance([-1, 0], [-1, 0], [0, 1], [p, p], [q, None])
    >>> round(found.probs[1], 6), found.extra[0].tolist()
    (0.375, [0.0, 1.0])
    """
    count = len(parents)
    vocab = max((len(p) for p in target if p is not None), default=1)
    size = max([vocab, *(len(q) for q in draft if q is not None), *(x + 1 for x in tokens)])
    nothing = torch.zeros(vocab, dtype=torch.float64)
    probs, slack = [math.nan] * count, [0.0] * count
    extra, noise = [nothing] * count, [0.0] * count
    inflow: dict[int, tuple[float, float]] = {0: (1.0, 0.0)}
    unusable: set[int] = set()
    for v in range(count):
        children = [c for c in range(v + 1, count) if parents[c] == v and tokens[c] != -1]
        if v not in inflow:
            continue
        a, a_slack = inflow[v]
        if a == 0.0:
            probs[v] = 0.0
            inflow.update((c, (0.0, a_slack)) for c in children)
            continue
        stepwise = rule == "recursive"
        if stepwise:
            probs[v], slack[v] = a, a_slack
            a, a_slack = 1.0, 0.0
        law = target[v]
        if law is None:
            probs[v], slack[v] = (probs[v], slack[v]) if stepwise else (a, a_slack)
            continue
        r = torch.zeros(size, dtype=torch.float64)
        r[:vocab] = law
        error = tolerance * r
        deterministic = [tokens[c] for c in children if kinds[c] == 0]
        tried: list[int] = []
        drawn: list[int] = []
        for c in children:
            s = _proposal(kinds[c], tokens[c], drawn, deterministic, draft[v], size)
            if s is None:
                unusable.add(c)
                continue
            x = tokens[c]
            s_x = float(s[x])
            ratio = 0.0 if x in tried else a * float(r[x]) / s_x
            b = min(1.0, ratio)
            b_slack = (a * float(error[x]) + a_slack * float(r[x])) / s_x + tolerance * ratio
            b_slack = min(b_slack, max(b - ratio + b_slack, 0.0))  # none well above 1
            inflow[c] = (b, b_slack)
            drawn += [x] if kinds[c] == 2 else []
            if kinds[c] != 0:
                r[tried] = 0.0
            left = (a * r - s).clamp(min=0.0)
            mass = float(left.sum())
            error = a * error + a_slack * r + tolerance * s * (kinds[c] != 0)
            mass_slack = float(error.sum())
            a, a_slack = _outflow(a, a_slack, mass, mass_slack)
            if mass > 0:
                r = left / mass
                error = error / mass + r * (mass_slack / mass)
            else:
                r, error = torch.zeros_like(r), torch.full_like(r, float(mass_slack > 0))
            # Accepted for certain, a drawn x may have residual left, which nothing depends on.
            tried.append(x)
        if not stepwise:
            probs[v], slack[v] = a, a_slack
        r[tried] = 0.0
        left = r[:vocab]
        has_residual = bool(tried) and float(left.sum()) > 0
        extra[v] = left / left.sum() if has_residual else law
        noise[v] = float(error.max()) if has_residual else tolerance
    return NodeAcceptance(probs, slack, extra, noise, unusable)
