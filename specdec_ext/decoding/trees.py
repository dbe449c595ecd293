"""Trees of draft tokens: their shapes, and how the children of a node are drawn.

Children of a node (`CHILDREN`):

* ``"without_replacement"``: drawn from q, each without the siblings before it;
* ``"iid"``: drawn from q independently, repeats allowed;
* ``"rest"``: the k - 1 likeliest tokens, and visited before them one that is drawn from q without
  those ("GDS");
* ``"top_k"``: the k likeliest tokens;
* ``"coupled"``: the first k to arrive in the race that the target will run, too. Made for the rule
  "coupled", which accepts more of them.

All of these, and a `GrownTree`, are lossless under every rule of `specdec_ext.verify_tree`: drawn
children are declared as drawn, with the law that they were drawn from, all others as deterministic.
What would *not* be lossless cannot be asked for: choosing among children that were drawn by their
value (a tree that is grown by value has no drawn children, and `GrownTree` refuses them), or two
ways of drawing at one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops, reference
from ..contract import (
    DOMAIN_COUPLED,
    DOMAIN_DRAFT,
    GREEDY_BELOW,
    KIND_DETERMINISTIC,
    KIND_IID,
    KIND_REST,
    KIND_WITHOUT_REPLACEMENT,
)
from .checks import integer, items, number_in, shown

__all__ = [
    "CHILDREN",
    "MOST_NODES",
    "StaticTree",
    "TreeDraft",
    "draft_nothing",
    "draft_static",
    "draft_top_k",
    "draw_children",
    "filtered_scores",
    "sequoia_tree",
]

#: How the children of a node can be drawn.
CHILDREN = ("without_replacement", "iid", "rest", "top_k", "coupled")

MOST_NODES = 1024  # of a tree that `specdec_ext.verify_tree` takes


class TreeDraft(NamedTuple):
    """A drafted tree, in the arguments of `specdec_ext.verify_tree`.

    Attributes
    ----------
    tokens : Tensor
        ``[B, N]`` int64; node 0 is the root.
    parents : Tensor
        ``[B, N]`` int64.
    kinds : Tensor
        ``[B, N]`` int8.
    logits : Tensor or None
        ``[B, R, V]``, the laws that children were drawn from; None where none was drawn.
    children_rows : Tensor or None
        ``[B, N]`` int64, the law of each node's children, -1 where it has none.
    masked : bool
        As in `specdec_ext.decoding.Draft`.
    """

    tokens: Tensor
    parents: Tensor
    kinds: Tensor
    logits: Tensor | None
    children_rows: Tensor | None
    masked: bool = False


# -------------------------------------------------------------------------------------------------
# Shapes
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticTree:
    """A tree whose shape is known before anything is drafted.

    Parameters
    ----------
    parents : tuple of int
        Parent of each node, -1 for the root (node 0), level by level.
    children : {"without_replacement", "iid", "rest", "top_k", "coupled"}
        How the children of a node are drawn; see the table of this module.

    Raises
    ------
    TypeError
        Parents that are no sequence of ints.
    ValueError
        Nodes that are no tree in breadth-first order, more than 1,024 of them, or unknown children.

    Examples
    --------
    >>> from specdec_ext.decoding import StaticTree
    >>> StaticTree.from_widths((2, 1)).parents
    (-1, 0, 0, 1, 2)
    >>> StaticTree.from_widths((1, 1, 3)).parents  # delayed branching: a trunk, then a tree
    (-1, 0, 1, 2, 2, 2)
    """

    parents: tuple[int, ...]
    children: str = "without_replacement"

    def __post_init__(self) -> None:
        """Check the topology."""
        if self.children not in CHILDREN:
            raise ValueError(
                f"StaticTree: children must be one of {CHILDREN}, got {self.children!r}"
            )
        parents = items(self.parents)
        if parents is None:
            raise TypeError(
                f"StaticTree: parents must be a sequence of int, got {shown(self.parents)}"
            )
        if not 1 <= len(parents) <= MOST_NODES:
            raise ValueError(
                f"StaticTree: parents must be those of 1 to 1024 nodes, got {len(parents)}"
            )
        named = [integer("StaticTree: each of parents", parent) for parent in parents]
        object.__setattr__(self, "parents", tuple(named))
        if self.parents[0] != -1:
            raise ValueError(
                f"StaticTree: parents must begin with -1, the root's, got {self.parents}"
            )
        for node, (before, parent) in enumerate(
            zip(self.parents, self.parents[1:], strict=False), 1
        ):
            if not max(before, 0) <= parent < node:
                raise ValueError(
                    "StaticTree: parents must name nodes level by level, children of one node "
                    f"together; got parent {parent} of node {node} after one of parent {before}"
                )

    @classmethod
    def from_widths(
        cls, widths: Sequence[int], children: str = "without_replacement"
    ) -> StaticTree:
        """Make a tree in which every node of level i has ``widths[i]`` children."""
        parents, level = [-1], [0]
        several = items(widths)
        if several is None:
            raise TypeError(f"StaticTree: widths must be a sequence of int, got {shown(widths)}")
        for width in [integer("StaticTree: each of widths", width, low=1) for width in several]:
            first = len(parents)
            if first + len(level) * width > MOST_NODES:
                raise ValueError(
                    f"StaticTree: widths must make 1024 nodes at most, got {tuple(several)}"
                )
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents), children)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """How many siblings come before each node."""
        ranks = [0]
        for node in range(1, len(self.parents)):
            is_first = self.parents[node] != self.parents[node - 1]
            ranks.append(0 if is_first else ranks[-1] + 1)
        return tuple(ranks)

    @property
    def depth(self) -> int:
        """The deepest level: the draft tokens that a round can accept."""
        return self.depths[-1]

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """Nodes of each depth."""
        ends = [self.depths.index(d) for d in range(self.depths[-1] + 1)] + [len(self.parents)]
        return tuple(range(a, b) for a, b in zip(ends, ends[1:], strict=False))

    def children_of(self, node: int) -> range:
        """Nodes whose parent this is."""
        count = self.parents.count(node)
        return (
            range(self.parents.index(node), self.parents.index(node) + count) if count else range(0)
        )


def sequoia_tree(
    acceptance: Sequence[float],
    nodes: int,
    max_depth: int | None = None,
    children: str = "without_replacement",
) -> StaticTree:
    """Find the static tree with the most tokens a call, by Sequoia's dynamic programme.

    Parameters
    ----------
    acceptance : sequence of float
        ``acceptance[k]``: how often the (k+1)-th child of a node is the one that is accepted:
        `Statistics.acceptance_by_rank` of a run with a wide tree.
    nodes : int
        The budget, the root included.
    max_depth : int, optional
        The deepest level allowed.
    children : str
        As in `StaticTree`.

    Returns
    -------
    StaticTree
        The tree that maximises the expected number of accepted tokens if each position is accepted
        independently with these rates (Chen et al., "Sequoia", arXiv 2402.12374, section 4.1).

    Examples
    --------
    >>> from specdec_ext.decoding import sequoia_tree
    >>> sequoia_tree([0.9, 0.05], nodes=4).parents  # one good guess: a chain
    (-1, 0, 1, 2)
    >>> sequoia_tree([0.4, 0.3, 0.2], nodes=4).parents  # many fair ones: a star
    (-1, 0, 0, 0)
    """
    nodes = integer("sequoia_tree: nodes", nodes, 1, MOST_NODES)
    if max_depth is not None:
        max_depth = integer("sequoia_tree: max_depth", max_depth, low=0)
    several = items(acceptance)
    if several is None:
        raise TypeError(
            f"sequoia_tree: acceptance must be a sequence of rates, got {shown(acceptance)}"
        )
    rates = tuple(number_in("sequoia_tree: each of acceptance", a, 0, 1) for a in several)

    @cache
    def best(budget: int, depth: int) -> tuple[float, tuple[int, ...]]:
        """Tokens expected of a subtree with its root, and the budgets of the root's children."""
        value, split = below(budget - 1, 0, depth) if depth > 0 else (0.0, ())
        return 1.0 + value, split

    @cache
    def below(budget: int, rank: int, depth: int) -> tuple[float, tuple[int, ...]]:
        """Tokens expected of the children from this rank on, with ``budget`` nodes to share."""
        if budget == 0 or rank == len(rates):
            return 0.0, ()
        options = []
        for own in range(1, budget + 1):
            rest, split = below(budget - own, rank + 1, depth)
            options.append((rates[rank] * best(own, depth - 1)[0] + rest, (own, *split)))
        return max(options)

    parents = [-1]
    level = [(0, nodes, nodes if max_depth is None else max_depth)]
    while level:
        following = []
        for node, budget, depth in level:
            for own in best(budget, depth)[1]:
                parents.append(node)
                following.append((len(parents) - 1, own, depth - 1))
        level = following
    return StaticTree(tuple(parents), children)


# -------------------------------------------------------------------------------------------------
# Children
# -------------------------------------------------------------------------------------------------


class Noise(NamedTuple):
    """Randomness of the rows of one level.

    Attributes
    ----------
    seeds, positions : Tensor
        ``[M]`` int64; positions are those of the call.
    depths : Tensor
        ``[M]`` int64, depth of the node whose children are drawn.
    """

    seeds: Tensor
    positions: Tensor
    depths: Tensor

    def uniforms(self, nodes: Tensor) -> Tensor:
        """DRAFT uniforms ``[M]`` of these nodes."""
        return reference.philox_uniforms(self.seeds, self.positions, nodes, DOMAIN_DRAFT, 0)


def _hide(mask: Tensor, tokens: Tensor) -> None:
    """Take tokens ``[M]`` (-1: none) out of a mask ``[M, ceil(V/32)]``, in place."""
    word = (tokens >> 5).clamp(min=0)[:, None]
    bit = torch.where(tokens >= 0, 1 << (tokens & 31), 0)[:, None]
    kept = mask.gather(1, word).long() & ~bit
    mask.scatter_(1, word, kept.to(torch.int32))


def filtered_scores(logits: Tensor, filters: Mapping[str, Any]) -> Tensor:
    """Logits ``[M, V]`` with -inf where top-k, top-p and min-p keep nothing.

    At temperature 0 they keep everything, as where all requests are greedy and none are passed: the
    likeliest tokens behind the first are what a tree may hold there.
    """
    if not any(filters.get(name) is not None for name in ("top_k", "top_p", "min_p")):
        return logits
    cutoff = ops.row_law(logits, **filters).cutoff
    keeps_all = cutoff.isnan()  # such a row draws -1
    if filters.get("temperature") is not None:
        keeps_all = keeps_all | (filters["temperature"] < GREEDY_BELOW)
    cutoff = torch.where(keeps_all, -torch.inf, cutoff)
    return logits.masked_fill(logits < cutoff[:, None], -torch.inf)


def draw_children(
    logits: Tensor,
    first_nodes: Tensor,
    count: int,
    children: str,
    noise: Noise,
    filters: Mapping[str, Any],
) -> tuple[Tensor, list[int]]:
    """Draw ``count`` children of each row's node.

    Parameters
    ----------
    logits : Tensor
        ``[M, V]``, the draft's rows at the nodes.
    first_nodes : Tensor
        ``[M]`` int64, the node that the first child will be; the others follow.
    count : int
        Children of each.
    children : str
        As in `StaticTree`.
    noise : Noise
        The rows' randomness.
    filters : mapping
        ``temperature``, ``top_k``, ``top_p``, ``min_p``, each ``[M]`` or absent.

    Returns
    -------
    tokens : Tensor
        ``[M, count]`` int64, -1 where q has no more tokens.
    kinds : list of int
        The kind of each child, as `specdec_ext.verify_tree` names them.
    """
    filtered = filtered_scores(logits, filters)
    temperature = {k: v for k, v in filters.items() if k == "temperature"}
    mask = torch.full(
        (logits.shape[0], (logits.shape[1] + 31) // 32), -1, dtype=torch.int32, device=logits.device
    )

    def draw(rank: int) -> Tensor:
        return ops.sample(
            filtered, noise.uniforms(first_nodes + rank), allowed_mask=mask, **temperature
        ).tokens

    def race(rank: int) -> Tensor:
        return ops.sample(
            filtered,
            seeds=noise.seeds,
            positions=noise.positions + noise.depths,
            domain=DOMAIN_COUPLED,
            allowed_mask=mask,
            **temperature,
        ).tokens

    def next_best(rank: int) -> Tensor:
        law = ops.row_law(filtered, allowed_mask=mask)
        return law.argmax

    def in_turn(count: int, choose: Callable[[int], Tensor]) -> list[Tensor]:
        """Choose one after another, each without those before it."""
        chosen = []
        for rank in range(count):
            chosen.append(choose(rank))
            _hide(mask, chosen[-1])
        return chosen

    if children == "iid":
        return torch.stack([draw(rank) for rank in range(count)], 1), [KIND_IID] * count
    if children == "without_replacement":
        return torch.stack(in_turn(count, draw), 1), [KIND_WITHOUT_REPLACEMENT] * count
    if children == "coupled":
        return torch.stack(in_turn(count, race), 1), [KIND_DETERMINISTIC] * count
    if children == "top_k":
        return torch.stack(in_turn(count, next_best), 1), [KIND_DETERMINISTIC] * count
    top = in_turn(count - 1, next_best)  # "rest": drawn last, but visited first
    return torch.stack([draw(0), *top], 1), [KIND_REST] + [KIND_DETERMINISTIC] * (count - 1)


def draft_static(
    tree: StaticTree,
    root: Tensor,
    extend: Callable[[Tensor, range], Tensor],
    seeds: Tensor,
    positions: Tensor,
    filters: Mapping[str, Any],
) -> TreeDraft:
    """Draft a tree of a static shape, one draft call a level.

    Parameters
    ----------
    tree : StaticTree
        The shape.
    root : Tensor
        ``[B]`` int64, each request's last token.
    extend : callable
        ``extend(tokens [B, m], nodes) -> logits [B, m, V]`` runs the draft on the nodes of a level.
    seeds, positions : Tensor
        ``[B]`` int64.
    filters : mapping
        As in `draw_children`, each ``[B]``.

    Returns
    -------
    TreeDraft
        Row v of ``logits`` belongs to node v; nodes of the last level have none.
    """
    batch, count = root.shape[0], len(tree.parents)
    tokens = root.new_full((batch, count), -1)
    tokens[:, 0] = root
    kinds = torch.zeros(batch, count, dtype=torch.int8, device=root.device)
    laws = []
    for level, nodes in enumerate(tree.levels[:-1]):
        logits = extend(tokens[:, nodes.start : nodes.stop], nodes)
        laws.append(logits)
        by_width: dict[int, list[int]] = {}
        for node in nodes:
            if width := len(tree.children_of(node)):
                by_width.setdefault(width, []).append(node)
        for width, parents in by_width.items():
            some = torch.tensor(parents, device=root.device)
            firsts = torch.tensor([tree.children_of(v).start for v in parents], device=root.device)
            rows = logits[:, some - nodes.start].reshape(batch * len(parents), -1)

            def spread(value: Tensor, each: int = len(parents)) -> Tensor:
                return value.repeat_interleave(each, 0)

            noise = Noise(spread(seeds), spread(positions), torch.full_like(spread(seeds), level))
            drawn, drawn_kinds = draw_children(
                rows,
                firsts.repeat(batch),
                width,
                tree.children,
                noise,
                {name: spread(value) for name, value in filters.items()},
            )
            places = (firsts[:, None] + torch.arange(width, device=root.device)).reshape(-1)
            tokens[:, places] = drawn.reshape(batch, -1)
            kinds[:, places] = torch.tensor(
                drawn_kinds * len(parents), dtype=torch.int8, device=root.device
            )
    parents_tensor = torch.tensor(tree.parents, device=root.device).expand(batch, -1)
    if not laws:
        return TreeDraft(tokens, parents_tensor, kinds, None, None)
    inner = tree.levels[-1].start
    rows_of = torch.arange(count, device=root.device)
    rows_of = torch.where(rows_of < inner, rows_of, -1).expand(batch, -1)
    return TreeDraft(tokens, parents_tensor, kinds, torch.cat(laws, 1), rows_of)


def draft_nothing(root: Tensor) -> TreeDraft:
    """Return trees that hold no token but the root's, ``[B]``."""
    none = torch.full_like(root, -1)[:, None]
    return TreeDraft(root[:, None], none, torch.zeros_like(none, dtype=torch.int8), None, None)


def draft_top_k(
    tree: StaticTree, root: Tensor, laws: Tensor, filters: Mapping[str, Any]
) -> TreeDraft:
    """Draft a tree in which all nodes of a level have the same likeliest tokens as children.

    Parameters
    ----------
    tree : StaticTree
        The shape.
    root : Tensor
        ``[B]`` int64, each request's last token.
    laws : Tensor
        ``[B, depth, V]``, the draft's rows: row d belongs to the children of nodes of depth d.
    filters : mapping
        As in `draw_children`, each ``[B]``.

    Returns
    -------
    TreeDraft
        Of deterministic children, without laws.
    """
    batch, vocabulary = len(root), laws.shape[2]
    levels = [root[:, None]]
    for depth, nodes in enumerate(tree.levels[1:]):
        ranks = torch.tensor(tree.ranks[nodes.start : nodes.stop], device=root.device)
        most = min(max(tree.ranks[nodes.start : nodes.stop]) + 1, vocabulary)
        values, tokens = filtered_scores(laws[:, depth], filters).topk(most, -1)
        tokens = torch.where(values > -torch.inf, tokens, -1)
        tokens = torch.nn.functional.pad(tokens, (0, 1), value=-1)  # of ranks that V has not
        levels.append(tokens[:, ranks.clamp(max=most)])
    return TreeDraft(
        torch.cat(levels, 1),
        torch.tensor(tree.parents, device=root.device).expand(batch, -1),
        torch.zeros(batch, len(tree.parents), dtype=torch.int8, device=root.device),
        None,
        None,
    )
