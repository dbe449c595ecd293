"""Trees of draft tokens that grow where the draft is confident."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contract import GREEDY_BELOW
from .checks import integer, number_in
from .trees import MOST_NODES, TreeDraft, filtered_scores

__all__ = ["GrownTree", "draft_grown"]


@dataclass(frozen=True)
class GrownTree:
    """A tree that grows where the draft is confident: EAGLE-2 and OPT-Tree.

    Level by level the ``beam`` paths with the largest products of q are extended by their
    ``beam`` likeliest tokens; of everything seen the ``nodes`` most valuable nodes are kept. Values
    fall along a path, so they form a tree. Its tokens are chosen by value: they are deterministic
    children, and nothing of it may be drawn.

    A level costs a call of the draft. With ``min_chance`` a request's tree ends before a level that
    can hardly be reached: shallow where the draft is unsure, deep where it is not. Where it ends
    depends on the request's text and the draft's laws alone, and no node was drawn, so that the
    output keeps the target's law.

    Parameters
    ----------
    nodes : int
        The budget, the root included.
    depth : int
        Levels to grow at most.
    beam : int
        Paths to extend in each level, and children of each.
    children : {"top_k"}
        How children are drawn: no other way is lossless here.
    min_chance : float
        In [0, 1]: behind the first level, another one is grown while the likeliest of the paths to
        be extended has at least this chance, the product of q along it (at temperature 0, of the
        softmax of the draft's logits). 0: always. A level adds about as many tokens as that chance
        times the draft's acceptance rate, less what the nodes that it displaces would have brought.
        A call serves all requests of a batch, and is saved where none of them goes on.
        `SuffixDrafter`, which goes by estimates of its own, does not look at it.

    References
    ----------
    Li et al., "EAGLE-2", arXiv 2406.16858; Wang et al., "OPT-Tree", arXiv 2406.17276, which ends a
    tree by a threshold on the expected tokens that a level adds.

    Examples
    --------
    >>> from specdec_ext.decoding import GrownTree
    >>> GrownTree(nodes=5, depth=4, beam=3, min_chance=0.4)
    GrownTree(nodes=5, depth=4, beam=3, children='top_k', min_chance=0.4)
    """

    nodes: int
    depth: int
    beam: int = 8
    children: str = "top_k"
    min_chance: float = 0.0

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.children != "top_k":
            raise ValueError(
                'GrownTree: children must be "top_k", deterministic, where a tree is grown: '
                f"choosing among drawn ones would bias what is emitted; got {self.children!r}"
            )
        most = {"nodes": MOST_NODES, "depth": None, "beam": None}
        for name, high in most.items():
            given = integer(f"GrownTree: {name}", getattr(self, name), 1, high)
            object.__setattr__(self, name, given)
        chance = number_in("GrownTree: min_chance", self.min_chance, 0, 1)
        object.__setattr__(self, "min_chance", chance)


def _grow_level(
    logits: Tensor, values: Tensor, parents: Tensor, beam: int, filters: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Extend every node of a frontier by its likeliest tokens; tokens, parents and values."""
    batch, width, vocab = logits.shape
    spread = {name: value.repeat_interleave(width, 0) for name, value in filters.items()}
    flat = filtered_scores(logits.reshape(batch * width, vocab), spread)
    temperature = spread.get("temperature")
    scores = flat.double()
    if temperature is not None:  # at T = 0 the order is what matters; its values are those of T = 1
        scores = scores / torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
    log_q, tokens = scores.log_softmax(-1).topk(min(beam, vocab), -1)
    log_q = torch.where(log_q.isnan(), -torch.inf, log_q)
    each = log_q.shape[-1]
    values = (values[:, :, None] + log_q.reshape(batch, width, each)).reshape(batch, -1)
    return tokens.reshape(batch, -1), parents.repeat_interleave(each, 1), values


def draft_grown(
    tree: GrownTree,
    root: Tensor,
    extend: Callable[[Tensor, Tensor], Tensor],
    filters: Mapping[str, Any],
    *,
    token_ids: Tensor | None = None,
) -> tuple[TreeDraft, Tensor]:
    """Grow a tree by value, one draft call a level, until no request's tree goes on.

    Parameters
    ----------
    tree : GrownTree
        Its sizes.
    root : Tensor
        ``[B]`` int64, each request's last token.
    extend : callable
        ``extend(tokens [B, m], parents [B, m]) -> logits [B, m, V]`` runs the draft on m nodes;
        parents count the nodes run before, -1 for the root.
    filters : mapping
        As in `trees.draw_children`, each ``[B]``.
    token_ids : Tensor, optional
        ``[Vd]`` int64: the rows that ``extend`` returns are over these tokens, ``[B, m, Vd]``.
        None: over all of the target's.

    Returns
    -------
    draft : TreeDraft
        Without laws.
    runs : Tensor
        ``[B, N]`` int64: which of the nodes that ``extend`` ran this is, -1 for none.
    """
    batch = root.shape[0]
    # The pool, by column: the root, then every node seen, level by level.
    tokens, parents = root[:, None], root.new_full((batch, 1), -1)
    values = torch.zeros(batch, 1, dtype=torch.float64, device=root.device)
    runs = root.new_full((batch, 1), -1)
    frontier, run = root.new_zeros(batch, 1), 0
    for level in range(tree.depth):
        going, chances = None, values.gather(1, frontier)  # logarithms
        if level and tree.min_chance:
            going = chances.amax(1, keepdim=True) >= math.log(tree.min_chance)
            if not bool(going.any()):
                break
        width = frontier.shape[1]
        ran_before = torch.where(parents >= 0, runs.gather(1, parents.clamp(min=0)), -1)
        logits = extend(tokens.gather(1, frontier), ran_before.gather(1, frontier))
        order = torch.arange(run, run + width, device=root.device).expand(batch, -1)
        runs = runs.scatter(1, frontier, order)
        run += width
        seen = tokens.shape[1]
        entries, above, reached = _grow_level(logits, chances, frontier, tree.beam, filters)
        children = entries if token_ids is None else token_ids[entries]
        if going is not None:  # trees that ended do not depend on those that go on
            reached = torch.where(going, reached, -torch.inf)
        tokens, parents, values = (
            torch.cat(pair, 1)
            for pair in zip((tokens, parents, values), (children, above, reached), strict=True)
        )
        runs = torch.cat([runs, torch.full_like(above, -1)], 1)
        best = reached.sort(dim=1, descending=True, stable=True).indices[:, : tree.beam]
        frontier = seen + best.sort(dim=1).values
    return _most_valuable(tree.nodes, tokens, parents, values, runs)


def _most_valuable(
    nodes: int, tokens: Tensor, parents: Tensor, values: Tensor, runs: Tensor
) -> tuple[TreeDraft, Tensor]:
    """Keep so many nodes of a pool, ``[B, n]`` each; return them as `draft_grown` does."""
    # Values fall along a path and equals keep their order, so that a node comes after its parent.
    kept = values.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    kept = kept.sort(dim=1).values
    place = torch.full_like(tokens, -1).scatter(
        1, kept, torch.arange(kept.shape[1], device=tokens.device).expand_as(kept)
    )
    new_parents = parents.gather(1, kept)
    new_parents = torch.where(new_parents >= 0, place.gather(1, new_parents.clamp(min=0)), -1)
    impossible = values.gather(1, kept) == -torch.inf
    draft = TreeDraft(
        tokens.gather(1, kept).masked_fill(impossible, -1),
        new_parents,
        torch.zeros_like(kept, dtype=torch.int8),
        None,
        None,
    )
    return draft, runs.gather(1, kept)
