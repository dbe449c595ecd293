"""Verification in eager PyTorch: what one writes without this package, and it is timed against.

Fair and idiomatic: vectorised over the batch, fp32 probabilities, no concatenation of target and
draft logits, in place where that costs nothing, no host synchronisation. The law (one function from
logits to probabilities) and the rule (one function) combine freely:

    probs = partial(sort_probs, top_p=0.9)
    verify_token(target_logits, draft_tokens, draft_logits, uniforms, probs)

Coins come as uniforms, as for `specdec_ext.verify`; the last token comes from
``torch.multinomial``, which takes its randomness from torch's generator, or from another `draw`.
Inside ``GivenRandomness(uniforms)`` the same code draws it by inverse CDF from the last uniform
instead, so that it can be compared token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Entries beyond k that `topk_probs` looks at for ties with the k-th (bfloat16 rows have a few).
TIES = 14


class Verdict(NamedTuple):
    """What a baseline returns."""

    #: [B, G+1] int64, -1 after the end.
    tokens: Tensor
    #: [B] int64.
    num_accepted: Tensor


Probs = Callable[[Tensor], Tensor]
#: From weights [B, V] to tokens [B, 1].
Draw = Callable[[Tensor], Tensor]
Baseline = Callable[[Tensor, Tensor, Tensor, Tensor], Verdict]


# -------------------------------------------------------------------------------------------------
# Laws: logits [..., V] -> probabilities [..., V] float32
# -------------------------------------------------------------------------------------------------


def softmax_probs(logits: Tensor) -> Tensor:
    """No filter."""
    return torch.softmax(logits, -1, dtype=torch.float32)


def sort_probs(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Top-k, then top-p on what is left, by one descending sort of every row.

    As in transformers' warpers and vLLM's ``apply_top_k_top_p``, with two differences: ties at a
    threshold stay, and the result is a cutoff by value: no sorted row is scattered back.
    """
    logits = logits.float()
    ranked = logits.sort(-1, descending=True).values
    cutoff = ranked[..., -1:]
    if 0 < top_k < logits.shape[-1]:
        cutoff = ranked[..., top_k - 1 : top_k]
        ranked = ranked.masked_fill(ranked < cutoff, -torch.inf)
    if top_p < 1:
        cutoff = _top_p_cutoff(ranked, top_p)
    return logits.masked_fill(logits < cutoff, -torch.inf).softmax(-1)


def topk_probs(logits: Tensor, top_k: int, top_p: float = 1.0) -> Tensor:
    """Top-k by ``torch.topk``, everything after it on those entries alone, scattered into zeros."""
    count = min(top_k + TIES, logits.shape[-1])
    values, indices = logits.topk(count)
    values = values.float()
    values = values.masked_fill(values < values[..., top_k - 1 : top_k], -torch.inf)
    if top_p < 1:
        values = values.masked_fill(values < _top_p_cutoff(values, top_p), -torch.inf)
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return probs.scatter_(-1, indices, values.softmax(-1))


def _top_p_cutoff(ranked: Tensor, top_p: float) -> Tensor:
    """Find the lowest kept of descending logits: the mass before it is below top_p."""
    probs = ranked.softmax(-1)
    kept = (probs.cumsum(-1).sub_(probs) < top_p).sum(-1, keepdim=True)
    return ranked.gather(-1, kept - 1)


# -------------------------------------------------------------------------------------------------
# Rules
# -------------------------------------------------------------------------------------------------


def verify_token(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    uniforms: Tensor,
    probs: Probs = softmax_probs,
    draw: Draw | None = None,
) -> Verdict:
    """Token-wise rejection (Leviathan et al., arXiv 2211.17192, Algorithm 1).

    Parameters
    ----------
    target_logits, draft_tokens, draft_logits, uniforms : Tensor
        ``[B, G+1, V]``, ``[B, G]`` int64, ``[B, G, V]``, ``[B, G+1]`` float64.
    probs : callable
        From logits to probabilities.
    draw : callable, optional
        From the last token's weights to tokens; ``torch.multinomial`` by default.

    Returns
    -------
    Verdict
    """
    p, q = probs(target_logits), probs(draft_logits)
    p_drafted = p[:, :-1].gather(-1, draft_tokens[..., None]).squeeze(-1)
    q_drafted = q.gather(-1, draft_tokens[..., None]).squeeze(-1)
    accepted = uniforms[:, :-1] * q_drafted < p_drafted
    n = accepted.long().cumprod(-1).sum(-1)
    return _emit(draft_tokens, n, p, q, torch.ones_like(n, dtype=torch.float32), draw)


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    uniforms: Tensor,
    probs: Probs = softmax_probs,
) -> Verdict:
    """Block verification (Sun et al., arXiv 2403.10444, Algorithm 2), as in `verify_token`."""
    p, q = probs(target_logits), probs(draft_logits)
    p_drafted = p[:, :-1].gather(-1, draft_tokens[..., None]).squeeze(-1)
    q_drafted = q.gather(-1, draft_tokens[..., None]).squeeze(-1)
    inflows = [torch.ones_like(p_drafted[:, 0])]
    for i in range(draft_tokens.shape[1]):
        inflows.append((inflows[-1] * p_drafted[:, i] / q_drafted[:, i]).clamp(max=1.0))
    w = torch.stack(inflows, -1)
    mass = (w[:, 1:-1, None] * p[:, 1:-1]).sub_(q[:, 1:]).clamp_(min=0).sum(-1)
    h = torch.where(w[:, 1:-1] < 1, mass / (mass + (1 - w[:, 1:-1])), 1.0)
    accepted = uniforms[:, :-1] < torch.cat([h, w[:, -1:]], -1)
    place = torch.arange(1, accepted.shape[1] + 1, device=accepted.device)
    n = (accepted * place).amax(-1)
    return _emit(draft_tokens, n, p, q, w.gather(-1, n[:, None]).squeeze(-1))


def _emit(
    draft_tokens: Tensor, n: Tensor, p: Tensor, q: Tensor, w: Tensor, draw: Draw | None = None
) -> Verdict:
    """Keep n draft tokens and draw one more: from p after the last one, else from [w p - q]+."""
    gamma = draft_tokens.shape[1]
    requests = torch.arange(len(n), device=n.device)
    p_next = p[requests, n]
    q_next = q[requests, n.clamp(max=gamma - 1)]
    residual = (w[:, None] * p_next).sub_(q_next).clamp_(min=0)
    weights = torch.where((n == gamma)[:, None], p_next, residual)
    extra = torch.multinomial(weights, 1) if draw is None else draw(weights)
    return place_tokens(draft_tokens, n, extra)


def place_tokens(draft_tokens: Tensor, n: Tensor, extra: Tensor) -> Verdict:
    """Lay out n draft tokens, the extra one ``[B, 1]``, then -1."""
    slot = torch.arange(draft_tokens.shape[1] + 1, device=n.device)
    tokens = F.pad(draft_tokens, (0, 1)).where(slot < n[:, None], -1)
    return Verdict(tokens.where(slot != n[:, None], extra), n)


def verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_logits: Tensor,
    uniforms: Tensor,
    rule: str = "traversal",
    probs: Probs = softmax_probs,
    draw: Draw | None = None,
) -> Verdict:
    """Verify trees whose children were drawn without replacement, request by request.

    Parameters
    ----------
    target_logits, tokens, parents, draft_logits, uniforms : Tensor
        ``[B, N, V]``, ``[B, N]`` and ``[B, N]`` int64, ``[B, N, V]``, ``[B, N]`` float64.
    rule : {"traversal", "recursive"}
        Decide subtrees first, or go down as soon as a child is accepted (SpecInfer, Sequoia).
    probs, draw : callable
        As in `verify_token`.

    Returns
    -------
    Verdict
        ``[B, N]`` tokens.
    """
    p, q = probs(target_logits), probs(draft_logits)
    rows = []
    for b, (ids, above, coins) in enumerate(
        zip(tokens.tolist(), parents.tolist(), uniforms.tolist(), strict=True)
    ):
        visit = _visit_subtree if rule == "traversal" else _visit_child
        path, weights = visit(0, 1.0, p[b], q[b], ids, above, [0.0, *coins])
        extra = torch.multinomial(weights, 1) if draw is None else draw(weights[None])[0]
        rows.append([ids[v] for v in path] + extra.tolist())
    out = torch.full(tokens.shape, -1)
    for b, row in enumerate(rows):
        out[b, : len(row)] = torch.tensor(row)
    return Verdict(out, torch.tensor([len(row) - 1 for row in rows]))


#: Nodes accepted from here on down, and the weights of the token that follows them.
Found = tuple[list[int], Tensor]


def _without(law: Tensor, token: int) -> Tensor:
    """Draw no token twice: the law of the next sibling."""
    law = law.clone()
    law[token] = 0.0
    return law / law.sum()


def _visit_subtree(
    v: int, inflow: float, p: Tensor, q: Tensor, tokens: list[int], parents: list[int],
    coins: list[float],
) -> Found | None:  # fmt: skip
    """Traversal: the first node in post-order whose coin accepts (None: none does)."""
    left, law = p[v], q[v]
    for c in [c for c, parent in enumerate(parents) if parent == v]:
        x = tokens[c]
        offered = min(1.0, inflow * float(left[x]) / float(law[x]))
        found = _visit_subtree(c, offered, p, q, tokens, parents, coins)
        if found is not None:
            return [c, *found[0]], found[1]
        residual = (inflow * left).sub_(law).clamp_(min=0)
        mass = float(residual.sum())
        if inflow < 1:
            inflow = mass / (mass + (1 - inflow))
        left = residual / mass if mass > 0 else left
        law = _without(law, x)
    return ([], left) if v == 0 or coins[v] < inflow else None


def _visit_child(
    v: int, inflow: float, p: Tensor, q: Tensor, tokens: list[int], parents: list[int],
    coins: list[float],
) -> Found:  # fmt: skip
    """Recursive rejection: go down with the first child that is accepted."""
    left, law = p[v], q[v]
    for c in [c for c, parent in enumerate(parents) if parent == v]:
        x = tokens[c]
        if coins[c] < min(1.0, inflow * float(left[x]) / float(law[x])):
            path, weights = _visit_child(c, 1.0, p, q, tokens, parents, coins)
            return [c, *path], weights
        residual = (left - law).clamp_(min=0)
        left = residual / residual.sum()
        law = _without(law, x)
    return [], left


def verify_transformers(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor, uniforms: Tensor
) -> Verdict:
    """``_speculative_sampling`` of transformers, B = 1: the token rule with coins of its own.

    Its caller there hands over float32 logits; the conversion is part of the work here too.
    """
    from transformers.generation.utils import _speculative_sampling

    gamma = draft_tokens.shape[1]
    emitted, n = _speculative_sampling(
        draft_tokens, draft_logits.float(), gamma, target_logits.float()
    )
    tokens = F.pad(emitted, (0, gamma + 1 - emitted.shape[1]), value=-1)
    return Verdict(tokens, n.reshape(1))


RULES: dict[str, Callable[..., Verdict]] = {"token": verify_token, "block": verify_block}


# -------------------------------------------------------------------------------------------------
# The same randomness as the operator
# -------------------------------------------------------------------------------------------------


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Draw from each row of ``[B, V]`` weights: the first prefix sum above u times the total."""
    prefix = weights.double().cumsum(-1)
    found = torch.searchsorted(prefix, u[:, None] * prefix[:, -1:], right=True)
    return found.clamp(max=weights.shape[-1] - 1)


class GivenRandomness(TorchFunctionMode):
    """Inside, ``rand_like`` gives the coins and ``multinomial`` is an inverse CDF of the last slot.

    Parameters
    ----------
    uniforms : Tensor
        ``[B, G+1]`` as for `specdec_ext.verify`.
    """

    def __init__(self, uniforms: Tensor) -> None:
        super().__init__()
        self.uniforms = uniforms

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the two sources of randomness, pass everything else on."""
        if func is torch.rand_like:
            return self.uniforms[:, :-1].reshape(args[0].shape).to(args[0].dtype)
        if func is torch.multinomial:
            return inverse_cdf(args[0], self.uniforms[:, -1])
        return func(*args, **(kwargs or {}))
