"""The texts of all live beams in one row of a cache, and the tree that a draft searches below them.

A request has one row of each model's cache: its prompt, and behind it, as nodes of one tree that
goes on from round to round, the tokens of its live beams. A token that several beams share is one
node; each node sees the prompt and its own ancestors. After a round the nodes that no live beam
needs are dropped and the others move together; nothing is computed twice. (A row for each beam, as
transformers has it, would hold the prompt W times, copy whole rows where beams change places, and
pad each beam's part of a draft's tree to the largest. And the encoder's output is read once for
each request.) What models must understand for it, a mask of a tree and position ids of their own,
is what `generate` asks of them for trees anyway.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .drafters.tree import Branches
from .hosting import HostedModel

__all__ = ["BeamDrafter", "BeamSlots", "BeamTree", "LiveBeams"]


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

    def branches(self, depths: Tensor) -> Branches:
        """Begin with one new node for each live beam, at ``depths`` ``[B, W]``."""
        return Branches.behind(torch.cat([self.seen, _own(self.seen)], 2), depths)

    def run(self, tree: BeamTree, live: LiveBeams) -> Tensor:
        """Run a whole tree in one call; return logits ``[B, N, V]``."""
        self._branches = self.branches(live.depths)
        start = live.tokens.shape[1]
        for size in tree.sizes:
            self._branches.add(tree.parents[:, start : start + size].clamp(min=0))
            start += size
        return self.hosted.forward_nodes(tree.tokens, self._branches.seen, self._branches.depths)

    def keep(self, nodes: Tensor, alive: Tensor) -> None:
        """Drop what the new live beams do not need.

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
        seen = branches.seen.gather(1, wide) & alive[:, :, None]
        needed = seen.any(1)  # [B, t]
        # Nodes before the first that some row can do without stay where they are.
        stays = needed.all(0).long().cumprod(0).sum()
        first, most = torch.stack([stays, needed.sum(1).max()]).tolist()
        order = (~needed).long().sort(dim=1, stable=True).indices[:, :most]
        self.hosted.keep_tree(order[:, first:], first)
        self.seen = seen.gather(2, order[:, None].expand(-1, seen.shape[1], -1))

    def select(self, rows: Tensor, indices: list[int]) -> None:
        """Keep only these requests, given on the device and on the host."""
        self.hosted.select(rows, indices)
        self.seen = self.seen[rows]
        if hasattr(self, "_branches"):
            self._branches = _select(self._branches, rows)


class BeamDrafter(BeamSlots):
    """A smaller model that searches ahead, with beams of its own below the target's live ones.

    It begins with the target's scores of them. Nodes of its last level are not run: nothing would
    read their logits. A live beam that continues one lacks two tokens here, and the next round's
    first call takes in both.

    Parameters
    ----------
    hosted, batch, width, device
        As in `BeamSlots`.
    draft_width : int
        Its own beams.
    ends : sequence of int
        Tokens that no beam goes on with.
    """

    def __init__(
        self,
        hosted: HostedModel,
        batch: int,
        width: int,
        device: torch.device,
        *,
        draft_width: int,
        ends: list[int],
    ) -> None:
        super().__init__(hosted, batch, width, device)
        self._draft_width, self._ends = draft_width, ends
        # [B, W] each: the token before each live beam's last, and whether it is lacking here.
        self._before = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self._lacks = torch.zeros_like(self._before, dtype=torch.bool)
        self._lead = 0  # nodes that were run before the live beams' last tokens: W, or none

    def propose(self, live: LiveBeams, gamma: int) -> BeamTree:
        """Search ``gamma`` >= 1 levels."""
        tree = BeamTree.of_beams(live)
        rows, scores, start = self._run_beams(live), live.scores, 0
        for level in range(gamma):
            scores, places, tokens = self._best(rows, scores)
            real = scores > -torch.inf
            parents = start + places
            start = tree.tokens.shape[1]
            tree = tree.with_level(tokens.where(real, -1), parents.where(real, -1))
            if level < gamma - 1:
                seen, depths = self._branches.add(parents + self._lead)
                rows = self.hosted.forward_nodes(tokens, seen, depths)
        return tree

    def _run_beams(self, live: LiveBeams) -> Tensor:
        """Run the last tokens of the live beams, and what is lacking before them."""
        tokens, depths, own = live.tokens, live.depths, _own(self.seen)
        if not self._lead:
            self._branches = self.branches(depths)
        else:
            leads = torch.cat([self.seen, own, torch.zeros_like(own)], 2)
            lasts = torch.cat([self.seen, own & self._lacks[:, :, None], own], 2)
            depths = torch.cat([(depths - 1).clamp(min=0), depths], 1)
            self._branches = Branches.behind(torch.cat([leads, lasts], 1), depths)
            tokens = torch.cat([self._before, tokens], 1)
        logits = self.hosted.forward_nodes(tokens, self._branches.seen, self._branches.depths)
        return logits[:, self._lead :]

    def _best(self, rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, places and last tokens of the draft's next beams, ``[B, n]`` each."""
        offers = torch.log_softmax(rows.float(), -1) + scores[:, :, None]
        vocabulary = offers.shape[2]
        offers[:, :, [token for token in self._ends if token < vocabulary]] = -torch.inf
        flat = offers.flatten(1)
        best = flat.topk(min(self._draft_width, flat.shape[1]))
        return best.values, best.indices // vocabulary, best.indices % vocabulary

    def keep_below(self, tree: BeamTree, nodes: Tensor, alive: Tensor, *, deepest: bool) -> None:
        """Drop what the new live beams do not need.

        Parameters
        ----------
        tree : BeamTree
            The last one that was proposed.
        nodes, alive : Tensor
            As in `BeamSlots.keep`.
        deepest : bool
            Whether some of ``nodes`` may be of the last level.
        """
        not_run = nodes >= tree.tokens.shape[1] - tree.sizes[-1]
        run = nodes.where(~not_run, tree.parents.gather(1, nodes)).clamp(min=0)
        self._keep(self._branches, run + self._lead, alive)
        self._before, self._lacks = tree.tokens.gather(1, nodes), not_run & alive
        self._lead = nodes.shape[1] if deepest else 0

    def select(self, rows: Tensor, indices: list[int]) -> None:
        """Keep only these requests, given on the device and on the host."""
        super().select(rows, indices)
        self._before, self._lacks = self._before[rows], self._lacks[rows]


def _own(seen: Tensor) -> Tensor:
    """Return ``[B, W, W]``: each of W new nodes sees itself."""
    batch, width = seen.shape[:2]
    return torch.eye(width, dtype=torch.bool, device=seen.device).expand(batch, -1, -1)


def _select(branches: Branches, rows: Tensor) -> Branches:
    return Branches.behind(branches.seen[rows], branches.depths[rows])


def draft_model(draft: Any) -> Any:
    """Return the model that searches for a draft: it, or the one that a drafter runs.

    Raises
    ------
    TypeError
        There is none.
    """
    from .checks import is_model, shown
    from .drafters.hosted import ModelHost

    if isinstance(draft, ModelHost):
        return draft.model
    if hasattr(draft, "propose") or not is_model(draft):
        raise TypeError(
            "generate: draft must be a causal language model, or a drafter that runs one, in a "
            f"beam search, got {shown(draft)}"
        )
    return draft
