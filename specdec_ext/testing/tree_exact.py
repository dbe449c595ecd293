"""Exact laws of what a verifier of trees emits, all randomness integrated out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract import VerifyTreeResult
from .exact import ExactLaw, context_index, joint_law, step_law
from .laws import SAMPLING, Params, draw_interval, law_table
from .philox import BEFORE_ONE
from .tree_cases import TreeCase, TreeVerifier, path_to
from .tree_laws import NodeAcceptance, nested_acceptance

#: How far from a step its two sides are looked at.
_INSET = 2.0**-36


def draft_trees(
    parents: Sequence[int],
    kinds: Sequence[int],
    laws: Sequence[Tensor],
    deterministic: Callable[[tuple[int, ...], int], Sequence[int]] | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """Enumerate what may be drafted in a tree, with probabilities.

    Parameters
    ----------
    parents, kinds : sequence of int
        By node, as `verify_tree` takes them.
    laws : sequence of Tensor
        Draft probabilities after each prefix of tokens: ``laws[d]`` is ``[V] * d + [Vd]``.
    deterministic : callable, optional
        ``deterministic(prefix, n)``: the tokens of n deterministic siblings. By default the n most
        likely ones of the draft's law.

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
        return table[context_index(prefix, table)].double()

    found: list[tuple[tuple[int, ...], float]] = [((-1,) * len(parents), 1.0)]
    for v in range(len(parents)):
        children = [c for c in range(1, len(parents)) if parents[c] == v]
        fixed = [c for c in children if kinds[c] == 0]
        drawn = [c for c in children if kinds[c] != 0]
        for c in [*fixed[:1], *drawn]:
            grown: list[tuple[tuple[int, ...], float]] = []
            for tokens, weight in found:
                prefix = tuple(tokens[u] for u in path_to(parents, v))
                if -1 in prefix:
                    grown.append((tokens, weight))
                    continue
                changed = list(tokens)
                if c in fixed:
                    given = (deterministic or default)(prefix, len(fixed))
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


def exact_tree_law(
    verify_tree: TreeVerifier,
    parents: Sequence[int],
    kinds: Sequence[int],
    target: Sequence[Tensor],
    draft: Sequence[Tensor],
    *,
    deterministic: Callable[[tuple[int, ...], int], Sequence[int]] | None = None,
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
    deterministic : callable, optional
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
    scalars = {k: options.pop(k) for k in list(options) if k.removeprefix("draft_") in SAMPLING}
    params = Params().updated({k: scalars.get(k) for k in SAMPLING})
    target_probs = [law_table(table, params) for table in target]
    params = params.updated({k: scalars.get(f"draft_{k}") for k in SAMPLING})
    draft_probs = [law_table(table, params) for table in draft]
    trees = draft_trees(parents, kinds, draft_probs, deterministic)

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
            prefix = tuple(tokens[u] for u in path_to(parents, v))
            if -1 in prefix:
                continue
            d = len(prefix)
            rows[t, v] = target[d][context_index(prefix, target[d])]
            if any(p == v and k != 0 for p, k in zip(parents, kinds, strict=True)):
                laws[t, v] = draft[d][context_index(prefix, draft[d])]
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
    prefixes = [tuple(tokens[u] for u in path_to(parents, v)) for v in range(len(parents))]
    p = [None if -1 in s else target[len(s)][context_index(s, target[len(s)])] for s in prefixes]
    q = [
        None if -1 in s or len(s) >= len(draft) else draft[len(s)][context_index(s, draft[len(s)])]
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
    others = torch.full((len(pairs), size), BEFORE_ONE, dtype=torch.float64)
    for k, (_, v) in enumerate(pairs):
        others[k, [u - 1 for u in path_to(parents, parents[v])]] = 0.0
    reported = torch.full((len(pairs),), math.nan, dtype=torch.float64)

    def accepts(which: Tensor, u: Tensor) -> Tensor:
        uniforms = others[which].scatter(1, node[which, None] - 1, u[:, None])
        outcome = run(tree[which], uniforms)
        reported[which] = outcome.accept_probs.double().gather(1, node[which, None])[:, 0]
        return (outcome.path == node[which, None]).any(1)

    everyone = torch.arange(len(pairs))
    guess = torch.tensor([guesses[t].probs[v] for t, v in pairs], dtype=torch.float64).nan_to_num(0)
    always = accepts(everyone, torch.full_like(guess, BEFORE_ONE))
    never = ~accepts(everyone, torch.zeros_like(guess))
    step = torch.where(always, 1.0, torch.where(never, 0.0, guess))
    deciding = everyone[~always & ~never]
    below = (guess[deciding] - _INSET).clamp(min=0.0)
    above = (guess[deciding] + _INSET).clamp(max=BEFORE_ONE)
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
    u = torch.tensor([u for _, _, u in looks], dtype=torch.float64).clamp(0.0, BEFORE_ONE)
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
