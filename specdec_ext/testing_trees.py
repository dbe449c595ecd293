"""Tools to test a verifier of trees: the companion of `specdec_ext.testing`.

Everything takes any callable with the signature of `specdec_ext.verify_tree`.

Exact laws
    `exact_tree_law` enumerates what may be drafted in a tree of given parents and kinds, finds
    where each coin and the final draw turn, and so integrates out all randomness.
Close or explained
    `assert_trees_match` excuses a difference only if every decision in the outcome is admissible in
    float64 up to a tolerance (`explain_tree_outcome`).
Cases
    `make_tree_case` draws seeded inputs; `chain_as_tree` takes those of a chain.

Nodes are judged here by a second formulation of the mathematics (`nested_acceptance`): the
normalised residual law after each child as a vector, and each child's proposal law as a vector.
Neither lambda, S nor kappa of the operators occurs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import VerifyTreeResult
from .testing import (
    _BEFORE_ONE,
    _GREEDY_TEMPERATURE,
    _SAMPLING,
    ExactLaw,
    VerifyCase,
    _candidate_laws,
    _close,
    _context,
    _law_table,
    _Params,
    _params_of,
    _random_params,
    draw_interval,
    joint_law,
    philox_uniform,
    step_law,
)

__all__ = [
    "NodeAcceptance",
    "TreeCase",
    "assert_trees_match",
    "chain_as_tree",
    "draft_trees",
    "exact_tree_law",
    "explain_tree_outcome",
    "make_tree_case",
    "nested_acceptance",
    "post_order",
]

TreeVerifier = Callable[..., Any]


@dataclass(frozen=True)
class TreeCase:
    """Keyword arguments of one call of `verify_tree`, with a name for messages.

    Attributes
    ----------
    inputs : mapping
        The arguments, by name.
    name : str
        What the case is about.
    """

    inputs: Mapping[str, Any]
    name: str = ""

    @property
    def batch(self) -> int:
        """Number of requests."""
        return int(self.inputs["tokens"].shape[0])

    def run(self, verify_tree: TreeVerifier) -> VerifyTreeResult:
        """Call a verifier on the case."""
        return VerifyTreeResult(*verify_tree(**self.inputs))

    def replace(self, **changes: Any) -> TreeCase:
        """Give the case with other arguments; None drops one."""
        merged = {**self.inputs, **changes}
        return TreeCase({k: v for k, v in merged.items() if v is not None}, self.name)

    def select(self, requests: Sequence[int]) -> TreeCase:
        """Give the case with only these requests, in this order (repeats allowed).

        Packed target logits and draft_token_ids, shared by all requests, stay as they are.
        """
        index = torch.tensor(list(requests), dtype=torch.int64)
        shared = {"draft_token_ids"} | ({"target_logits"} & self._packed())
        return self.replace(
            **{
                name: value.index_select(0, index.to(value.device))
                for name, value in self.inputs.items()
                if isinstance(value, Tensor) and name not in shared
            }
        )

    def _packed(self) -> set[str]:
        return {"target_logits"} if "target_rows" in self.inputs else set()


def chain_as_tree(case: VerifyCase) -> TreeCase:
    """Give the chains of a case as trees, under the rule "traversal".

    What `verify_tree` makes of them is what the rule "block" makes of the chains, bit for bit; its
    ``accept_probs`` have the root's 1 before them.

    Parameters
    ----------
    case : VerifyCase
        Arguments of `specdec_ext.verify`.

    Returns
    -------
    TreeCase
        With N = G + 1 nodes.

    Examples
    --------
    >>> from specdec_ext.testing import make_case
    >>> tree = chain_as_tree(make_case(1, batch=1, gamma=3, ragged=False))
    >>> tree.inputs["parents"].tolist(), tree.inputs["draft_rows"].tolist()
    ([[-1, 0, 1, 2]], [[0, 1, 2, -1]])
    """
    inputs = dict(case.inputs)
    drafted = inputs.pop("draft_tokens")
    batch, gamma = drafted.shape
    lengths = inputs.pop("draft_lengths", drafted.new_full((batch,), gamma))
    steps = torch.arange(gamma, device=drafted.device)
    root = drafted.new_full((batch, 1), -1)
    inputs["tokens"] = torch.cat([root, drafted], 1)
    inputs["parents"] = torch.cat(
        [root.long(), torch.where(steps < lengths[:, None], steps, -1)], 1
    )
    kinds = inputs.pop("draft_kinds", None)
    if kinds is not None:
        inputs["kinds"] = torch.cat([root.to(kinds.dtype), kinds], 1)
    if "draft_logits" in inputs or "draft_probs" in inputs:
        inputs["draft_rows"] = torch.cat([steps, steps.new_tensor([-1])]).expand(batch, -1)
    return TreeCase({**inputs, "rule": "traversal"}, case.name)


def post_order(parents: Sequence[int]) -> list[int]:
    """Nodes of a tree, those below a node before it, siblings in index order; padding left out.

    Examples
    --------
    >>> post_order([-1, 0, 0, 1, 1, -1])
    [3, 4, 1, 2, 0]
    """
    below: dict[int, list[int]] = {}
    for v, parent in enumerate(parents[1:], 1):
        below.setdefault(parent, []).append(v)

    def closed(v: int) -> list[int]:
        return [u for c in below.get(v, []) for u in closed(c)] + [v]

    return closed(0)


# -------------------------------------------------------------------------------------------------
# Acceptance, by vectors
# -------------------------------------------------------------------------------------------------


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
    kind: int, token: int, earlier: Sequence[int], put: Sequence[int], q: Tensor | None, size: int
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
        law[list(put)] = 0.0
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
        walked = rule == "recursive"
        if walked:
            probs[v], slack[v] = a, a_slack
            a, a_slack = 1.0, 0.0
        law = target[v]
        if law is None:
            probs[v], slack[v] = (probs[v], slack[v]) if walked else (a, a_slack)
            continue
        r = torch.zeros(size, dtype=torch.float64)
        r[:vocab] = law
        error = tolerance * r
        put = [tokens[c] for c in children if kinds[c] == 0]
        tried: list[int] = []
        drawn: list[int] = []
        for c in children:
            s = _proposal(kinds[c], tokens[c], drawn, put, draft[v], size)
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
        if not walked:
            probs[v], slack[v] = a, a_slack
        r[tried] = 0.0
        left = r[:vocab]
        has_residual = bool(tried) and float(left.sum()) > 0
        extra[v] = left / left.sum() if has_residual else law
        noise[v] = float(error.max()) if has_residual else tolerance
    return NodeAcceptance(probs, slack, extra, noise, unusable)


# -------------------------------------------------------------------------------------------------
# Exact laws
# -------------------------------------------------------------------------------------------------


def _path(parents: Sequence[int], v: int) -> list[int]:
    """Nodes on the way from the root to v, the root left out."""
    return [] if v == 0 else [*_path(parents, parents[v]), v]


def draft_trees(
    parents: Sequence[int],
    kinds: Sequence[int],
    laws: Sequence[Tensor],
    put: Callable[[tuple[int, ...], int], Sequence[int]] | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """Enumerate what may be drafted in a tree, with probabilities.

    Parameters
    ----------
    parents, kinds : sequence of int
        By node, as `verify_tree` takes them.
    laws : sequence of Tensor
        Draft probabilities after each prefix of tokens: ``laws[d]`` is ``[V] * d + [Vd]``.
    put : callable, optional
        ``put(prefix, n)``: the tokens of n deterministic siblings. By default the n most likely
        ones of the draft's law.

    Returns
    -------
    list of (tuple of int, float)
        Tokens by node (-1 at the root, and where nothing was left to draw), and the probability.

    Examples
    --------
    Two siblings without replacement:

    >>> laws = [torch.tensor([0.5, 0.25, 0.25])]
    >>> [(t, round(w, 4)) for t, w in draft_trees([-1, 0, 0], [0, 2, 2], laws)][:2]
    [((-1, 0, 1), 0.25), ((-1, 0, 2), 0.25)]
    """

    def default(prefix: tuple[int, ...], n: int) -> Sequence[int]:
        best: list[int] = row_of(prefix).argsort(descending=True, stable=True).tolist()
        return best[:n]

    def row_of(prefix: tuple[int, ...]) -> Tensor:
        table = laws[len(prefix)]
        return table[_context(prefix, table)].double()

    found: list[tuple[tuple[int, ...], float]] = [((-1,) * len(parents), 1.0)]
    for v in range(len(parents)):
        children = [c for c in range(1, len(parents)) if parents[c] == v]
        fixed = [c for c in children if kinds[c] == 0]
        drawn = [c for c in children if kinds[c] != 0]
        for c in [*fixed[:1], *drawn]:
            grown: list[tuple[tuple[int, ...], float]] = []
            for tokens, weight in found:
                prefix = tuple(tokens[u] for u in _path(parents, v))
                if -1 in prefix:
                    grown.append((tokens, weight))
                    continue
                changed = list(tokens)
                if c in fixed:
                    given = (put or default)(prefix, len(fixed))
                    for u, token in zip(fixed, given, strict=False):
                        changed[u] = token
                    grown.append((tuple(changed), weight))
                    continue
                row = row_of(prefix).clone()
                gone = {2: drawn[: drawn.index(c)], 3: fixed}.get(kinds[c], [])
                row[[tokens[u] for u in gone if tokens[u] >= 0]] = 0.0
                if not float(row.sum()) > 0:
                    grown.append((tokens, weight))
                    continue
                for x, q in enumerate((row / row.sum()).tolist()):
                    if q > 0:
                        changed[c] = x
                        grown.append((tuple(changed), weight * q))
            found = grown
    return found


#: How far from a step its two sides are looked at.
_INSET = 2.0**-36


def exact_tree_law(
    verify_tree: TreeVerifier,
    parents: Sequence[int],
    kinds: Sequence[int],
    target: Sequence[Tensor],
    draft: Sequence[Tensor],
    *,
    put: Callable[[tuple[int, ...], int], Sequence[int]] | None = None,
    rule: str = "traversal",
    bits: int = 40,
    **options: Any,
) -> ExactLaw:
    """Exact law of what a verifier emits, over all drafts of a tree, coins and final draws.

    Parameters
    ----------
    verify_tree : callable
        Anything with the signature of `specdec_ext.verify_tree`.
    parents, kinds : sequence of int
        The tree, by node; no padding.
    target, draft : sequence of Tensor
        Tables of logits as from `specdec_ext.testing.toy_models`, gamma the depth of the tree.
    put : callable, optional
        See `draft_trees`.
    rule : str
        "traversal", "recursive" or "target_only".
    bits : int
        Resolution of bisections.
    **options
        Passed on; ``temperature`` and its kin as Python scalars.

    Returns
    -------
    ExactLaw
        The joint law of the next depth + 1 tokens, those missing continued by the target's law.

    Raises
    ------
    AssertionError
        The outcome is not a step function with one step per coin.

    Notes
    -----
    The coin of node v is bisected for the step of "v is on the accepted path", while the coins
    above it accept and all others reject. Every tree is then run for each side of each coin, near
    both ends of the side, which must agree; and the final uniform swept for each outcome. A step
    that is where `nested_acceptance` says takes two looks instead of a bisection; what counts is
    where the verifier has it.

    Examples
    --------
    >>> from specdec_ext import reference
    >>> from specdec_ext.testing import toy_models
    >>> target, draft = toy_models(0, vocab=2, gamma=1)
    >>> law = exact_tree_law(reference.verify_tree, [-1, 0, 0], [0, 1, 1], target, draft)
    >>> law.tv < 1e-9
    True
    """
    size, vocab, depth = len(parents), target[0].shape[-1], len(target) - 1
    scalars = {k: options.pop(k) for k in list(options) if k.removeprefix("draft_") in _SAMPLING}
    params = _Params().updated({k: scalars.get(k) for k in _SAMPLING})
    target_probs = [_law_table(table, params) for table in target]
    params = params.updated({k: scalars.get(f"draft_{k}") for k in _SAMPLING})
    draft_probs = [_law_table(table, params) for table in draft]
    trees = draft_trees(parents, kinds, draft_probs, put)

    inputs = _tree_inputs(trees, parents, kinds, target, draft)
    calls = status = 0

    def run(tree: Tensor, uniforms: Tensor) -> VerifyTreeResult:
        nonlocal calls, status
        calls += 1
        expanded = {
            k: torch.full((len(tree),), v, dtype=torch.int64 if "top_k" in k else torch.float32)
            for k, v in scalars.items()
        }
        case = TreeCase(inputs).select(tree.tolist())
        outcome = case.replace(uniforms=uniforms, rule=rule, **expanded, **options).run(verify_tree)
        for seen in set(outcome.status.tolist()):
            status |= seen
        return outcome

    guesses = [
        _guess(parents, tokens, kinds, target_probs, draft_probs, rule) for tokens, _ in trees
    ]
    thresholds, gap = _coin_steps(run, parents, trees, guesses, bits)

    # Every side of every coin; sides without mass are left out.
    inset = max(_INSET, 2.0 ** (2 - bits))
    places: list[tuple[int, list[float], list[float], float]] = []  # tree, ends, mass
    for t, (_, weight) in enumerate(trees):
        sides = [
            [(low, high) for low, high in ((0.0, h), (h, 1.0)) if high - low > 4 * inset]
            for h in thresholds[t]
        ]
        for chosen in itertools.product(*sides):
            mass = weight * math.prod(high - low for low, high in chosen)
            ends = [low + inset for low, _ in chosen], [high - inset for _, high in chosen]
            places.append((t, *ends, mass))
    tree = torch.tensor([t for t, *_ in places])
    lows = torch.tensor([[*low, 0.5] for _, low, _, _ in places], dtype=torch.float64)
    highs = torch.tensor([[*high, 0.5] for _, _, high, _ in places], dtype=torch.float64)
    found, again = run(tree, lows), run(tree, highs)
    if not (torch.equal(found.path, again.path) and torch.equal(found.tokens, again.tokens)):
        raise AssertionError("exact_tree_law: the outcome changes within one side of a coin")

    # The final draw: one sweep for each tree and outcome.
    outcomes: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    rows = zip(tree.tolist(), found.path.tolist(), found.tokens.tolist(), strict=True)
    for k, (t, path, tokens) in enumerate(rows):
        outcomes.setdefault((t, tuple(path), tuple(tokens)), []).append(k)
    accepted = [int(found.num_accepted[members[0]]) for members in outcomes.values()]
    masses = [sum(places[k][3] for k in members) for members in outcomes.values()]
    coins = lows[[members[0] for members in outcomes.values()]]
    extra_laws = [
        guesses[t].extra[path[n - 1] if n > 0 else 0]
        for (t, path, _), n in zip(outcomes, accepted, strict=True)
    ]

    def extra(row: Tensor, u: Tensor) -> Tensor:
        drawn = run(
            torch.tensor([t for t, *_ in outcomes])[row],
            torch.cat([coins[row, :-1], u[:, None]], 1),
        )
        n = torch.tensor(accepted)[row]
        after = drawn.tokens.gather(1, (n + 1).clamp(max=size - 1)[:, None])[:, 0]
        same = (drawn.num_accepted == n) & ((after == -1) | (n + 1 == size))
        token = drawn.tokens.gather(1, n[:, None])[:, 0]
        if not bool((same & (token >= 0) & (token < vocab)).all()):
            raise AssertionError("exact_tree_law: the final draw changes more than the last token")
        return token

    laws = _sweep(extra, extra_laws, bits)
    by_length = [torch.zeros([vocab] * n, dtype=torch.float64) for n in range(depth + 2)]
    counts = torch.zeros(depth + 1, dtype=torch.float64)
    for (_, _, tokens), n, mass, law in zip(outcomes, accepted, masses, laws, strict=True):
        by_length[n + 1][tokens[:n]] += mass * law
        counts[n] += mass
    joint = by_length[0]
    for n in range(depth + 1):
        joint = joint[..., None] * target_probs[n] + by_length[n + 1]
    return ExactLaw(joint, joint_law(target_probs), counts, gap, status, calls)


def _tree_inputs(
    trees: Sequence[tuple[tuple[int, ...], float]],
    parents: Sequence[int],
    kinds: Sequence[int],
    target: Sequence[Tensor],
    draft: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Arguments of `verify_tree` with one request per tree. Rows that nobody may read are NaN."""
    count, size = len(trees), len(parents)
    rows = torch.full((count, size, target[0].shape[-1]), math.nan, dtype=target[0].dtype)
    laws = torch.full((count, size, draft[0].shape[-1]), math.nan, dtype=draft[0].dtype)
    for t, (tokens, _) in enumerate(trees):
        for v in range(size):
            prefix = tuple(tokens[u] for u in _path(parents, v))
            if -1 in prefix:
                continue
            d = len(prefix)
            rows[t, v] = target[d][_context(prefix, target[d])]
            if any(p == v and k != 0 for p, k in zip(parents, kinds, strict=True)):
                laws[t, v] = draft[d][_context(prefix, draft[d])]
    return {
        "target_logits": rows,
        "draft_logits": laws,
        "tokens": torch.tensor([tokens for tokens, _ in trees]),
        "parents": torch.tensor([list(parents)] * count),
        "kinds": torch.tensor([list(kinds)] * count, dtype=torch.int8),
    }


def _guess(
    parents: Sequence[int],
    tokens: Sequence[int],
    kinds: Sequence[int],
    target: Sequence[Tensor],
    draft: Sequence[Tensor],
    rule: str,
) -> NodeAcceptance:
    """Where the steps of a correct verifier are."""
    prefixes = [tuple(tokens[u] for u in _path(parents, v)) for v in range(len(parents))]
    p = [None if -1 in s else target[len(s)][_context(s, target[len(s)])] for s in prefixes]
    q = [
        None if -1 in s or len(s) >= len(draft) else draft[len(s)][_context(s, draft[len(s)])]
        for s in prefixes
    ]
    if rule == "target_only":
        kinds, rule = [0] * len(kinds), "recursive"
    return nested_acceptance(parents, tokens, kinds, p, q, rule)


def _coin_steps(
    run: Callable[[Tensor, Tensor], VerifyTreeResult],
    parents: Sequence[int],
    trees: Sequence[tuple[tuple[int, ...], float]],
    guesses: Sequence[NodeAcceptance],
    bits: int,
) -> tuple[list[list[float]], float]:
    """Find where each coin turns "its node is on the path" on, and how far off the reports are.

    0 or 1 for a coin that decides nothing.
    """
    size = len(parents)
    steps = [[0.0] * (size - 1) for _ in trees]
    pairs = [
        (t, v) for t, (tokens, _) in enumerate(trees) for v in range(1, size) if tokens[v] >= 0
    ]
    if not pairs:
        return steps, 0.0
    tree, node = torch.tensor(pairs).unbind(1)
    others = torch.full((len(pairs), size), _BEFORE_ONE, dtype=torch.float64)
    for k, (_, v) in enumerate(pairs):
        others[k, [u - 1 for u in _path(parents, parents[v])]] = 0.0
    reported = torch.full((len(pairs),), math.nan, dtype=torch.float64)

    def accepts(which: Tensor, u: Tensor) -> Tensor:
        uniforms = others[which].scatter(1, node[which, None] - 1, u[:, None])
        outcome = run(tree[which], uniforms)
        reported[which] = outcome.accept_probs.double().gather(1, node[which, None])[:, 0]
        return (outcome.path == node[which, None]).any(1)

    everyone = torch.arange(len(pairs))
    guess = torch.tensor([guesses[t].probs[v] for t, v in pairs], dtype=torch.float64).nan_to_num(0)
    always = accepts(everyone, torch.full_like(guess, _BEFORE_ONE))
    never = ~accepts(everyone, torch.zeros_like(guess))
    step = torch.where(always, 1.0, torch.where(never, 0.0, guess))
    deciding = everyone[~always & ~never]
    below = (guess[deciding] - _INSET).clamp(min=0.0)
    above = (guess[deciding] + _INSET).clamp(max=_BEFORE_ONE)
    wrong = deciding[~(accepts(deciding, below) & ~accepts(deciding, above))]
    low, high = torch.zeros_like(wrong), torch.full_like(wrong, 1 << bits)
    while len(wrong) > 0 and bool((high - low > 1).any()):
        middle = (low + high) // 2
        yes = accepts(wrong, middle.double() / (1 << bits))
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    step[wrong] = high.double() / (1 << bits)
    gap = float((reported - step)[deciding].abs().max()) if len(deciding) else 0.0
    for (t, v), value in zip(pairs, step.tolist(), strict=True):
        steps[t][v - 1] = value
    return steps, gap


def _sweep(
    outcome: Callable[[Tensor, Tensor], Tensor], guesses: Sequence[Tensor], bits: int
) -> list[Tensor]:
    """Give the law of a token drawn by one uniform, row by row: the guess where it holds."""
    looks: list[tuple[int, int, float]] = []  # row, token, where it should come out
    for k, law in enumerate(guesses):
        for x, mass in enumerate(law.tolist()):
            if mass > 4 * _INSET:
                low, high = draw_interval(law, x)
                looks += [(k, x, low + _INSET), (k, x, high - _INSET)]
    row = torch.tensor([r for r, _, _ in looks])
    u = torch.tensor([u for _, _, u in looks], dtype=torch.float64).clamp(0.0, _BEFORE_ONE)
    right = outcome(row, u) == torch.tensor([x for _, x, _ in looks])
    wrong = sorted(set(row[~right].tolist()))
    laws = [law.double().clone() for law in guesses]
    for r in wrong:
        laws[r].zero_()
    if wrong:
        back = torch.tensor(wrong)
        swept = step_law(lambda k, u: outcome(back[k], u), len(wrong), bits)
        for (k, x), mass in swept.items():
            laws[wrong[k]][x] += mass
    return laws


# -------------------------------------------------------------------------------------------------
# Close or explained
# -------------------------------------------------------------------------------------------------


class _TreeRequest:
    """One request of a case, by node: what the rules may read."""

    def __init__(self, case: TreeCase, b: int) -> None:
        inputs = case.inputs
        self.rule = inputs.get("rule", "traversal")
        source = inputs.get("draft_logits")
        probs = inputs.get("draft_probs")
        if probs is not None:
            source = probs
        vocab = inputs["target_logits"].shape[-1]
        ids = vocab if source is None else max(vocab, source.shape[-1])
        given = inputs["parents"][b].tolist()
        size = given.index(-1, 1) if -1 in given[1:] else len(given)
        self.parents = given[:size]
        self.tokens = inputs["tokens"][b, :size].tolist()
        self.tokens[0] = -1
        kinds = inputs.get("kinds")
        self.kinds = [int(source is not None)] * size if kinds is None else kinds[b, :size].tolist()
        self.bits = 0
        for v in range(1, size):
            if any(self.tokens[u] == -1 for u in _path(self.parents, v)[:-1]):
                self.tokens[v] = -1  # below what is not there
            if self.tokens[v] == -1:
                continue
            if not 0 <= self.tokens[v] < ids or not 0 <= self.kinds[v] <= 3:
                self.bits |= 2
                self.tokens[v] = -1

        params = _params_of(inputs, "", b, _Params())
        draft_params = _params_of(inputs, "draft_", b, params)
        if params.cleaned() != params or (
            probs is None and source is not None and draft_params.cleaned() != draft_params
        ):
            self.bits |= 8
        params, draft_params = params.cleaned(), draft_params.cleaned()
        greedy = params.temperature < _GREEDY_TEMPERATURE
        reads_draft = self.rule in ("traversal", "recursive") and not greedy
        if not reads_draft:
            self.kinds = [0] * size

        target, rows = inputs["target_logits"], inputs.get("target_rows")
        raw = [target[b, v] if rows is None else target[int(rows[b, v])] for v in range(size)]
        self.laws = [next(iter(_candidate_laws(row, params, 0.0)), None) for row in raw]
        self.reported = self.laws
        if inputs.get("raw_logprobs", False):
            self.reported = [next(iter(_candidate_laws(row, _Params(), 0.0)), None) for row in raw]
        self.target = [None if law is None else law.probs for law in self.laws]
        self.draft: list[Tensor | None] = [None] * size
        for v in range(size):
            where = inputs.get("draft_rows")
            r = v if where is None else int(where[b, v])
            if source is None or not reads_draft or not 0 <= r < source.shape[1]:
                continue
            row = source[b, r].double()
            if probs is not None:
                legal = bool((row >= 0).all()) and 0 < float(row.sum()) < math.inf
                self.draft[v] = row / row.sum() if legal else None
            else:
                law = next(iter(_candidate_laws(row, draft_params, 0.0)), None)
                self.draft[v] = None if law is None else law.probs

        self.coins = [0.0] * len(given)
        if not greedy:
            for slot in [*(v - 1 for v in range(1, size) if self.tokens[v] >= 0), len(given) - 1]:
                u = self._uniform(inputs, b, slot, len(given) - 1)
                self.coins[slot] = 0.0 if math.isnan(u) else min(max(u, 0.0), _BEFORE_ONE)
                self.bits |= 8 * (self.coins[slot] != u)

    @staticmethod
    def _uniform(inputs: Mapping[str, Any], b: int, slot: int, last: int) -> float:
        if inputs.get("uniforms") is not None:
            return float(inputs["uniforms"][b, slot])
        seed, position = int(inputs["seeds"][b]), int(inputs["positions"][b])
        stream = inputs.get("stream", 0)
        if slot == last:
            return philox_uniform(seed, position, 0, 1, stream)
        return philox_uniform(seed, position, slot + 1, 0, stream)


def explain_tree_outcome(
    result: VerifyTreeResult, case: TreeCase, request: int, tolerance: float = 1e-5
) -> str:
    """Say why an outcome cannot be right; an empty string if it can.

    For valid trees under the rules "traversal", "recursive" and "target_only", without masks and
    maps. Every decision is recomputed in float64: coins against thresholds, the final draw, the
    log-probabilities, acceptance probabilities and the status. A coin or the final draw may go
    either way only within `tolerance` of its step, scaled by the conditioning of the residuals.

    Parameters
    ----------
    result : VerifyTreeResult
        What a verifier returned for the case.
    case : TreeCase
        Its inputs.
    request : int
        Which row of the batch.
    tolerance : float
        Relative error of laws.

    Returns
    -------
    str
        The first contradiction found, or "".

    Examples
    --------
    >>> p = torch.tensor([[[0.75, 0.25]] * 2]).log()
    >>> case = TreeCase(dict(target_logits=p, tokens=torch.tensor([[-1, 1]]), uniforms=torch.tensor(
    ...     [[0.3, 0.9]], dtype=torch.float64), parents=torch.tensor([[-1, 0]])))
    >>> from specdec_ext import reference
    >>> result = case.run(reference.verify_tree)
    >>> result.tokens.tolist(), explain_tree_outcome(result, case, 0)
    ([[0, -1]], '')
    >>> wrong = result._replace(tokens=torch.tensor([[1, -1]]))
    >>> explain_tree_outcome(wrong, case, 0).split(" (")[0]
    'extra token 1 at u = 0.9, drawn for [1.0, 1.0)'
    """
    asked = _TreeRequest(case, request)
    size = len(asked.parents)
    walked = asked.rule != "traversal"
    found = nested_acceptance(
        asked.parents,
        asked.tokens,
        asked.kinds,
        asked.target,
        asked.draft,
        "recursive" if walked else "traversal",
        tolerance,
    )
    n = int(result.num_accepted[request])
    path = result.path[request].tolist()
    tokens, logprobs = result.tokens[request].tolist(), result.logprobs[request].tolist()
    winner = path[n - 1] if n > 0 else 0
    if not 0 <= winner < size or path != [*_path(asked.parents, winner), *[-1] * (len(path) - n)]:
        return f"path {path} of {n} nodes"
    nodes = [0, *path[:n]]
    if tokens != [*(asked.tokens[v] for v in nodes[1:]), tokens[n], *[-1] * (len(path) - n - 1)]:
        return f"tokens {tokens} are not those of path {path}, one more and -1"

    # Which nodes the rule looked at, and what their coins said.
    if walked:
        looked = {0}
        for v in nodes:
            after = next((c for c in nodes[1:] if asked.parents[c] == v), size)
            looked.update(c for c in range(1, after + 1) if c < size and asked.parents[c] == v)
        tried = [c for c in sorted(looked - {0}) if not math.isnan(found.probs[c])]
        unusable = {c for c in looked & found.unusable}
        said = {c: c in nodes for c in tried}
    else:
        order = post_order(asked.parents)
        looked, unusable = set(range(size)), found.unusable
        before = order[: order.index(winner) + 1]
        said = {v: v == winner for v in before if v != 0 and not math.isnan(found.probs[v])}
        if winner not in {0, *said}:
            return f"node {winner} accepted, which cannot be"
    for v, accepted in said.items():
        u, h = asked.coins[v - 1], found.probs[v]
        slack = found.slack[v] + 1e-15
        if not (u < h + slack if accepted else u >= h - slack):
            verb = "accepted" if accepted else "rejected"
            return f"node {v} {verb} at u = {u!r}, h = {h!r} (slack {slack:.1e})"
    for v, got in enumerate(result.accept_probs[request].tolist()):
        expected = found.probs[v] if v in looked else math.nan
        if v == 0:
            expected = 1.0
        if not _close(got, expected, 1e-7 + (found.slack[v] if v < size else 0.0)):
            return f"accept_probs[{v}] = {got}, not {expected}"

    # The extra token, log-probabilities, status.
    status = asked.bits | 4 * bool(unusable)
    extra, final = found.extra[winner], asked.coins[-1]
    law = asked.laws[winner]
    if law is None:
        status |= 1
        if tokens[n] != 0:
            return f"extra token {tokens[n]} of a row without a law"
    else:
        low, high = draw_interval(extra, tokens[n])
        slack = tolerance + len(extra) ** 0.5 * found.noise[winner]
        if not low - slack <= final < high + slack:
            drawn = f"drawn for [{low!r}, {high!r}) (slack {slack:.1e})"
            return f"extra token {tokens[n]} at u = {final!r}, {drawn}"
        if float(law.probs[tokens[n]]) == 0:
            return f"extra token {tokens[n]} has probability 0"
    for k, got in enumerate(logprobs):
        source = asked.reported[nodes[k]] if k <= n else None
        expected = math.nan
        if source is not None:
            expected = 0.0 if source.greedy else float(source.log_probs[tokens[k]])
        if not _close(got, expected, 2 * tolerance):
            return f"logprobs[{k}] = {got}, not {expected}"
    got_status = int(result.status[request])
    return "" if got_status == status else f"status {got_status}, not {status}"


def assert_trees_match(result: Any, expected: Any, case: TreeCase, tolerance: float = 1e-5) -> int:
    """Check that two outcomes of a case are equal, or differ only where float64 sees a tie.

    Parameters
    ----------
    result, expected : VerifyTreeResult or tuple
        What the verifier under test returned, and what another one did.
    case : TreeCase
        The inputs of both.
    tolerance : float
        See `explain_tree_outcome`.

    Returns
    -------
    int
        How many requests differed and were excused. Tests should bound it.

    Raises
    ------
    AssertionError
        A request differs, and its outcome is not admissible in float64.
    """
    result = VerifyTreeResult(*(t.detach().cpu() for t in result))
    expected = VerifyTreeResult(*(t.detach().cpu() for t in expected))
    same = torch.ones(case.batch, dtype=torch.bool)
    for name, got, wanted in zip(VerifyTreeResult._fields, result, expected, strict=True):
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise AssertionError(
                f"{case.name}: {name} is {list(got.shape)} {got.dtype}, "
                f"not {list(wanted.shape)} {wanted.dtype}"
            )
        slack = {"logprobs": 2 * tolerance, "accept_probs": tolerance}.get(name, 0.0)
        close = torch.isclose(got.double(), wanted.double(), 1e-6, slack, equal_nan=True)
        same &= close.reshape(case.batch, -1).all(1)
    excused = 0
    for b in (~same).nonzero().flatten().tolist():
        reason = explain_tree_outcome(result, case, b, tolerance)
        if reason:
            rows = "\n".join(
                f"  {name}: {got[b].tolist()} against {wanted[b].tolist()}"
                for name, got, wanted in zip(
                    VerifyTreeResult._fields, result, expected, strict=True
                )
            )
            raise AssertionError(f"{case.name or 'case'}, request {b}: {reason}\n{rows}")
        excused += 1
    return excused


# -------------------------------------------------------------------------------------------------
# Cases
# -------------------------------------------------------------------------------------------------


def make_tree_case(
    seed: int,
    *,
    batch: int = 6,
    nodes: int = 8,
    vocab: int = 17,
    draft_vocab: int | None = None,
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    draft: str = "logits",
    shared_rows: bool = False,
    stray: bool = True,
    filters: bool = True,
    draft_filters: bool = False,
    greedy_rows: bool = True,
    philox: bool = False,
    id_dtype: torch.dtype = torch.int64,
    rule: str = "traversal",
    **options: Any,
) -> TreeCase:
    """Draw the inputs of one call of `verify_tree`, reproducibly: valid trees of all kinds.

    Parameters
    ----------
    seed : int
        Everything follows from it.
    batch, nodes, vocab, draft_vocab : int
        B, N, V, Vd. Trees have 1 to N nodes, the rest is padding.
    dtype : torch.dtype
        Of the logits.
    packed : bool
        Target logits as ``[R, V]`` with ``target_rows``, in shuffled order.
    draft : {"logits", "probs", "none"}
        How the draft's law is given; "none": every child is deterministic.
    shared_rows : bool
        One draft row for every two nodes, through ``draft_rows``.
    stray : bool
        Now and then a token of -1, out of range, repeated, or without a draft probability.
    filters, draft_filters, greedy_rows : bool
        As in `specdec_ext.testing.make_case`.
    philox : bool
        ``seeds`` and ``positions`` in place of ``uniforms``.
    id_dtype : torch.dtype
        Of ids and rows.
    rule : str
        Passed on.
    **options
        Passed on as they are.

    Returns
    -------
    TreeCase

    Examples
    --------
    >>> case = make_tree_case(1, batch=2, nodes=5, vocab=7)
    >>> case.inputs["target_logits"].shape, case.inputs["parents"].tolist()
    (torch.Size([2, 5, 7]), [[-1, 0, 0, 0, 2], [-1, 0, 0, 2, 0]])
    """
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    width = vocab if draft_vocab is None else draft_vocab
    params = _random_params(generator, batch, vocab, filters, greedy_rows)
    if draft_filters and draft == "logits":
        theirs = _random_params(generator, batch, width, True, True)
        params |= {f"draft_{name}": value for name, value in theirs.items()}
    spread = torch.tensor([0.3, 2.0, 4.0])[torch.randint(3, (batch, 1, 1), generator=generator)]
    target = torch.randn(batch, nodes, vocab, generator=generator) * spread
    count = (nodes + 1) // 2 if shared_rows else nodes
    owner = torch.arange(nodes) // 2 if shared_rows else torch.arange(nodes)
    drafted = torch.randn(batch, count, width, generator=generator)
    both = min(vocab, width)
    drafted[..., :both] += target[:, :: nodes // count if shared_rows else 1, :both][:, :count]
    target, drafted = target.to(dtype), drafted.to(dtype)

    parents = torch.full((batch, nodes), -1, dtype=torch.int64)
    kinds = torch.zeros(batch, nodes, dtype=torch.int8)
    tokens = torch.full((batch, nodes), -1, dtype=torch.int64)
    for b in range(batch):
        scalars = _Params()
        if draft != "probs":
            scalars = _params_of(params, "", b, scalars)
            scalars = _params_of(params, "draft_", b, scalars).cleaned()
        size = nodes if b % 2 == 0 else integer(1, nodes + 1)
        for v in range(1, size):
            parents[b, v] = integer(max(0, v - 4), v) if v > 2 else 0
        for v in range(size):
            children = (parents[b] == v).nonzero().flatten().tolist()
            law = _candidate_laws(drafted[b, owner[v]], scalars, 0.0)[0].probs
            kind = 0 if draft == "none" else integer(0, 4)
            chosen = [kind if kind and integer(0, 4) else 0 for _ in children]
            if kind == 3:
                chosen = [3 * (c == children[0]) for c in children]
            best = law.argsort(descending=True).tolist()
            put = [c for c, k in zip(children, chosen, strict=True) if k == 0]
            for c, x in zip(put, best, strict=False):
                tokens[b, c] = x
            gone = [int(tokens[b, c]) for c in put] if kind == 3 else []
            for c, k in zip(children, chosen, strict=True):
                kinds[b, c] = k
                row = law.clone()
                row[[x for x in gone if x >= 0]] = 0.0
                if k and float(row.sum()) > 0:
                    tokens[b, c] = int(torch.multinomial(row, 1, generator=generator))
                if k == 2:
                    gone.append(int(tokens[b, c]))
                if stray and k != 2 and integer(0, 12) == 0:
                    anything = [-1, integer(0, max(vocab, width)), max(vocab, width) + 3]
                    tokens[b, c] = [*anything, int(tokens[b, children[0]])][integer(0, 4)]

    inputs: dict[str, Any] = {"rule": rule, "parents": parents, "tokens": tokens, **params}
    if draft != "none":
        inputs["kinds"] = kinds
        values = drafted.float().softmax(-1) * 1.25 if draft == "probs" else drafted
        inputs[f"draft_{draft}"] = values.to(dtype)
        if shared_rows:
            inputs["draft_rows"] = owner.expand(batch, -1).to(id_dtype)
    inputs["target_logits"] = target
    if packed:
        order = torch.randperm(batch * nodes, generator=generator)
        table = torch.empty(batch * nodes, vocab, dtype=dtype)
        table[order] = target.flatten(0, 1)
        inputs["target_logits"] = table
        inputs["target_rows"] = order.reshape(batch, nodes).to(id_dtype)
    for name in ("parents", "tokens"):
        inputs[name] = inputs[name].to(id_dtype)
    if philox:
        inputs["seeds"] = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
        inputs["positions"] = torch.randint(0, 2**40, (batch,), generator=generator)
    else:
        inputs["uniforms"] = torch.rand(batch, nodes, generator=generator, dtype=torch.float64)
    inputs.update(options)
    shape = f"B={batch} N={nodes} V={vocab} Vd={width} {dtype}".replace("torch.", "")
    return TreeCase(inputs, f"seed {seed}, {shape}, {rule}, draft {draft}")
