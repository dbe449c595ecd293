"""Close or explained: an outcome of `specdec_ext.verify_tree`, recomputed in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..contract import VerifyTreeResult
from .explain import close_to
from .laws import (
    GREEDY_TEMPERATURE,
    Params,
    candidate_laws,
    draw_interval,
    params_of,
)
from .philox import BEFORE_ONE, philox_uniform
from .tree_cases import TreeCase, path_to, post_order
from .tree_laws import nested_acceptance


class TreeRequest:
    """One request of a case, by node: what the rules may read."""

    def __init__(self, case: TreeCase, b: int) -> None:
        inputs = case.with_whole_rows().inputs
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
            if any(self.tokens[u] == -1 for u in path_to(self.parents, v)[:-1]):
                self.tokens[v] = -1  # below what is not there
            if self.tokens[v] == -1:
                continue
            if not 0 <= self.tokens[v] < ids or not 0 <= self.kinds[v] <= 3:
                self.bits |= 2
                self.tokens[v] = -1

        params = params_of(inputs, "", b, Params())
        draft_params = params_of(inputs, "draft_", b, params)
        if params.cleaned() != params or (
            probs is None and source is not None and draft_params.cleaned() != draft_params
        ):
            self.bits |= 8
        params, draft_params = params.cleaned(), draft_params.cleaned()
        greedy = params.temperature < GREEDY_TEMPERATURE
        reads_draft = self.rule in ("traversal", "recursive") and not greedy
        if not reads_draft:
            self.kinds = [0] * size

        target, rows = inputs["target_logits"], inputs.get("target_rows")
        raw = [target[b, v] if rows is None else target[int(rows[b, v])] for v in range(size)]
        self.laws = [next(iter(candidate_laws(row, params, 0.0)), None) for row in raw]
        self.reported = self.laws
        if inputs.get("raw_logprobs", False):
            self.reported = [next(iter(candidate_laws(row, Params(), 0.0)), None) for row in raw]
        self.target = [None if law is None else law.probs for law in self.laws]
        self.draft: list[Tensor | None] = [None] * size
        for v in range(size):
            where = inputs.get("children_rows")
            r = v if where is None else int(where[b, v])
            if source is None or not reads_draft or not 0 <= r < source.shape[1]:
                continue
            row = source[b, r].double()
            if probs is not None:
                legal = bool((row >= 0).all()) and 0 < float(row.sum()) < math.inf
                self.draft[v] = row / row.sum() if legal else None
            else:
                law = next(iter(candidate_laws(row, draft_params, 0.0)), None)
                self.draft[v] = None if law is None else law.probs

        self.coins = [0.0] * len(given)
        if not greedy:
            for slot in [*(v - 1 for v in range(1, size) if self.tokens[v] >= 0), len(given) - 1]:
                u = self._uniform(inputs, b, slot, len(given) - 1)
                self.coins[slot] = 0.0 if math.isnan(u) else min(max(u, 0.0), BEFORE_ONE)
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
    asked = TreeRequest(case, request)
    size = len(asked.parents)
    stepwise = asked.rule != "traversal"
    found = nested_acceptance(
        asked.parents,
        asked.tokens,
        asked.kinds,
        asked.target,
        asked.draft,
        "recursive" if stepwise else "traversal",
        tolerance,
    )
    n = int(result.num_accepted[request])
    path = result.path[request].tolist()
    tokens, logprobs = result.tokens[request].tolist(), result.logprobs[request].tolist()
    winner = path[n - 1] if n > 0 else 0
    if not 0 <= winner < size or path != [*path_to(asked.parents, winner), *[-1] * (len(path) - n)]:
        return f"path {path} of {n} nodes"
    nodes = [0, *path[:n]]
    if tokens != [*(asked.tokens[v] for v in nodes[1:]), tokens[n], *[-1] * (len(path) - n - 1)]:
        return f"tokens {tokens} are not those of path {path}, one more and -1"

    # Which nodes the rule looked at, and what their coins said.
    if stepwise:
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
        if not close_to(got, expected, 1e-7 + (found.slack[v] if v < size else 0.0)):
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
        if not close_to(got, expected, 2 * tolerance):
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
        How many requests were excused by a tie. Tests should bound it. `assert_tokens_match` says
        why a request whose ``accept_probs`` alone differ is not counted.

    Raises
    ------
    AssertionError
        A request differs, and its outcome is not admissible in float64.
    """
    result = VerifyTreeResult(*(t.detach().cpu() for t in result))
    expected = VerifyTreeResult(*(t.detach().cpu() for t in expected))
    same = torch.ones(case.batch, dtype=torch.bool)
    agreed = same.clone()
    for name, got, wanted in zip(VerifyTreeResult._fields, result, expected, strict=True):
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise AssertionError(
                f"{case.name}: {name} is {list(got.shape)} {got.dtype}, "
                f"not {list(wanted.shape)} {wanted.dtype}"
            )
        slack = {"logprobs": 2 * tolerance, "accept_probs": tolerance}.get(name, 0.0)
        close = torch.isclose(got.double(), wanted.double(), 1e-6, slack, equal_nan=True)
        rows_close = close.reshape(case.batch, -1).all(1)
        same &= rows_close
        if name != "accept_probs":
            agreed &= rows_close
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
        excused += not bool(agreed[b])
    return excused
