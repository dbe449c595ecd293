"""The texts of all live beams in one row of a cache, and the tree that a draft searches below them.

A request has one row of each model's cache: its prompt, and behind it, as nodes of one tree that
goes on from round to round, the tokens of its live beams. A token that several beams share is one
node; each node sees the prompt and its own ancestors. Now and then the nodes that no live beam
needs are dropped and the others move together; nothing is computed twice. (A row for each beam, as
transformers has it, would hold the prompt W times, copy whole rows where beams change places, and
pad each beam's part of a draft's tree to the largest. And the encoder's output is read once for
each request.) What models must understand for it, a mask of a tree and position ids of their own,
is what `generate` asks of them for trees anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .drafters.tree import Branches
from .hosting import HostedModel

__all__ = ["BeamSlots", "BeamTree", "LiveBeams", "own_nodes"]

#: Nodes that may come until those that no beam needs are dropped. Attention to a few more slots
#: costs less than moving the others together in every round, which is two calls for each layer.
LOOSE = 32


class LiveBeams(NamedTuple):
    """The beams that are continued.

    Attributes
    ----------
    tokens : Tensor
        ``[B, W]`` int64, each beam's last token, which no cache holds yet; anything for no beam.
    scores : Tensor
        ``[B, W]`` float32, -inf for no beam.
    levels : Tensor
        ``[B]`` int64, new tokens of each of a request's beams.
    """

    tokens: Tensor
    scores: Tensor
    levels: Tensor

    def select(self, rows: Tensor) -> LiveBeams:
        """Keep only these requests."""
        return LiveBeams(*(values[rows] for values in self))

    @property
    def depths(self) -> Tensor:
        """The depth of each beam's last token in the tree, ``[B, W]``; the prompt's last has 0."""
        return self.levels[:, None].expand_as(self.tokens)


class BeamTree(NamedTuple):
    """Live beams and what a draft put below them, as `specdec_ext.beam_verify` takes it.

    Attributes
    ----------
    tokens, parents : Tensor
        ``[B, N]`` int64; nodes 0 .. W-1 are the live beams.
    sizes : list of int
        Nodes of each level below them.
    """

    tokens: Tensor
    parents: Tensor
    sizes: list[int]

    @classmethod
    def of_beams(cls, live: LiveBeams) -> BeamTree:
        """Give a tree without a draft."""
        return cls(live.tokens, torch.full_like(live.tokens, -1), [])

    def with_level(self, tokens: Tensor, parents: Tensor) -> BeamTree:
        """Add a level ``[B, n]``; -1 in both for padding."""
        return BeamTree(
            torch.cat([self.tokens, tokens], 1),
            torch.cat([self.parents, parents], 1),
            [*self.sizes, tokens.shape[1]],
        )

    def select(self, rows: Tensor) -> BeamTree:
        """Keep only these requests."""
        return self._replace(tokens=self.tokens[rows], parents=self.parents[rows])


class BeamSlots:
    """What a model has run of the live beams' texts.

    Parameters
    ----------
    hosted : HostedModel
        The model, which has run the prompts but their last tokens.
    batch, width : int
        Requests, and live beams of each.
    device : torch.device
        Where.
    """

    def __init__(self, hosted: HostedModel, batch: int, width: int, device: torch.device) -> None:
        self.hosted = hosted
        hosted.begin_tree()
        # [B, W, t]: which of the tree's nodes hold tokens of each live beam. In a batch some rows
        # need fewer than others; what stands in the rest is seen by nobody.
        self.seen = torch.zeros(batch, width, 0, dtype=torch.bool, device=device)
        self._together = 0  # nodes that there were when all were needed

    def branches(self, depths: Tensor) -> Branches:
        """Begin with one new node for each live beam, at ``depths`` ``[B, W]``."""
        return Branches.behind(torch.cat([self.seen, own_nodes(self.seen)], 2), depths)

    def run(self, tree: BeamTree, live: LiveBeams) -> Tensor:
        """Run a whole tree in one call; return logits ``[B, N, V]``."""
        self._branches = self.branches(live.depths)
        start = live.tokens.shape[1]
        for size in tree.sizes:
            self._branches.add(tree.parents[:, start : start + size].clamp(min=0))
            start += size
        return self.hosted.forward_nodes(tree.tokens, self._branches.seen, self._branches.depths)

    def keep(self, nodes: Tensor, alive: Tensor) -> None:
        """Go on to the new live beams; what they do not need is dropped now and then.

        Parameters
        ----------
        nodes : Tensor
            ``[B, W]`` int64, the node of the last tree that each of them continues.
        alive : Tensor
            ``[B, W]`` bool, whether there is such a beam.
        """
        self._keep(self._branches, nodes, alive)

    def _keep(self, branches: Branches, nodes: Tensor, alive: Tensor) -> None:
        wide = nodes[:, :, None].expand(-1, -1, branches.seen.shape[2])
        self.seen = branches.seen.gather(1, wide) & alive[:, :, None]
        if self.seen.shape[2] - self._together > LOOSE:
            self._move_together()

    def _move_together(self) -> None:
        """Drop the nodes that no live beam needs."""
        needed = self.seen.any(1)  # [B, t]
        # Nodes before the first that some row can do without stay where they are.
        stays = needed.all(0).long().cumprod(0).sum()
        first, most = torch.stack([stays, needed.sum(1).max()]).tolist()
        order = (~needed).long().sort(dim=1, stable=True).indices[:, :most]
        self.hosted.keep_tree(order[:, first:], first)
        self.seen = self.seen.gather(2, order[:, None].expand(-1, self.seen.shape[1], -1))
        self._together = most

    def select(self, rows: Tensor, indices: list[int]) -> None:
        """Keep only these requests, given on the device and on the host."""
        self.hosted.select(rows, indices)
        self.seen = self.seen[rows]
        if hasattr(self, "_branches"):
            self._branches = _select(self._branches, rows)


def own_nodes(seen: Tensor) -> Tensor:
    """Return ``[B, W, W]``: each of W new nodes sees itself."""
    batch, width = seen.shape[:2]
    return torch.eye(width, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)


def _select(branches: Branches, rows: Tensor) -> Branches:
    return Branches.behind(branches.seen[rows], branches.depths[rows])
