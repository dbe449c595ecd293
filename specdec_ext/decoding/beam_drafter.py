"""A draft model in a beam search: it searches ahead below the target's live beams.

What the live beams become is noted after each round, and made true at the next draft: rounds that
draft nothing cost the draft nothing. Tokens that it has not run by then go first, as more nodes of
its next call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from .beam_trees import BeamSlots, BeamTree, LiveBeams, own_nodes
from .beams import MOST_BEAMS
from .checks import is_model, shown
from .drafters.hosted import ModelHost
from .drafters.interface import GoOn, over_the_target
from .drafters.tree import Branches
from .hosting import HostedModel

__all__ = ["BeamDrafter", "draft_model"]


class _Round(NamedTuple):
    """What became of the live beams in a round, drafted or not.

    Attributes
    ----------
    tree : BeamTree
        The tree that was verified; without levels where nothing was drafted.
    levels : Tensor
        ``[B]``, new tokens of each live beam before it.
    nodes, alive : Tensor
        As in `BeamSlots.keep`, of the live beams behind it.
    deepest : bool
        Whether some of ``nodes`` may be of the tree's last level.
    """

    tree: BeamTree
    levels: Tensor
    nodes: Tensor
    alive: Tensor
    deepest: bool

    def select(self, rows: Tensor) -> _Round:
        return _Round(
            self.tree.select(rows),
            self.levels[rows],
            self.nodes[rows],
            self.alive[rows],
            self.deepest,
        )


class _Waiting(NamedTuple):
    """M tokens of the live beams' texts that the draft has not run, nodes behind the t it has.

    Attributes
    ----------
    tokens, depths : Tensor
        ``[B, M]`` int64.
    seen : Tensor
        ``[B, M, t + M]`` bool, which nodes each of them sees.
    lacks : Tensor
        ``[B, W, M]`` bool, which of them each live beam continues.
    """

    tokens: Tensor
    depths: Tensor
    seen: Tensor
    lacks: Tensor

    @classmethod
    def none(cls, seen: Tensor) -> _Waiting:
        """Nothing waits behind beams that see ``seen`` ``[B, W, t]``."""
        batch, width, known = seen.shape
        ids = torch.zeros(batch, 0, dtype=torch.int64, device=seen.device)
        return cls(ids, ids, seen.new_zeros(batch, 0, known), seen.new_zeros(batch, width, 0))

    def __bool__(self) -> bool:
        return self.tokens.shape[1] > 0

    def select(self, rows: Tensor) -> _Waiting:
        return _Waiting(*(values[rows] for values in self))

    def behind(self, seen: Tensor, width: int) -> Tensor:
        """Show what these nodes see, and ``width`` new ones behind beams that see ``seen``."""
        own = own_nodes(seen)
        return torch.cat(
            [
                torch.nn.functional.pad(self.seen, (0, width)),
                torch.cat([seen, self.lacks, own], 2),
            ],
            1,
        )

    def needed(self) -> _Waiting:
        """Drop what no live beam continues."""
        needed = self.lacks.any(1)
        most = int(needed.sum(1).max())
        order = (~needed).long().sort(dim=1, stable=True).indices[:, :most]
        known = self.seen.shape[2] - self.tokens.shape[1]
        rows = self.seen.gather(1, _wide(order, self.seen.shape[2]))
        columns = rows[:, :, known:].gather(2, order[:, None].expand(-1, most, -1))
        return _Waiting(
            self.tokens.gather(1, order),
            self.depths.gather(1, order),
            torch.cat([rows[:, :, :known], columns], 2),
            self.lacks.gather(2, order[:, None].expand(-1, self.lacks.shape[1], -1)),
        )


class BeamDrafter(BeamSlots):
    """A smaller model that searches ahead, with beams of its own below the target's live ones.

    It begins with the target's scores of them. Nodes of its last level are not run: nothing would
    read their logits. A live beam that continues one lacks two tokens here, and more where rounds
    were not drafted; the next draft's first call takes them in.

    Parameters
    ----------
    hosted, batch, width, device
        As in `BeamSlots`.
    draft_width : int
        Its own beams.
    ends : sequence of int
        Tokens that no beam goes on with.
    token_ids : Tensor, optional
        ``[Vd]`` int64, the target's token of each entry of the draft's rows. None: the same.
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
        token_ids: Tensor | None = None,
    ) -> None:
        super().__init__(hosted, batch, width, device)
        self._draft_width, self._token_ids = draft_width, token_ids
        self._ends = torch.tensor(ends, dtype=torch.int64, device=device)  # entries of its rows
        if token_ids is not None:
            self._ends = torch.isin(token_ids, self._ends).nonzero()[:, 0]
        self._rounds: list[_Round] = []  # since the last draft began
        self._waiting = _Waiting.none(self.seen)
        self._lead = 0  # nodes that were run before the live beams' last tokens

    def propose(self, live: LiveBeams, gamma: int, go_on: GoOn | None = None) -> BeamTree:
        """Search ``gamma`` >= 1 levels, or fewer.

        Parameters
        ----------
        live : LiveBeams
            What is continued.
        gamma : int
            Levels at most.
        go_on : callable, optional
            Asked after every level but the last with the last token of each request's best beam and
            the row that it is from, as of a chain; the search ends where no request goes on.
        """
        self._settle()
        tree = BeamTree.of_beams(live)
        rows, scores, start = self._run_beams(live), live.scores, 0
        going: Tensor | None = None
        for level in range(gamma):
            scores, places, entries = self._best(rows, scores)
            real = scores > -torch.inf
            tokens = entries if self._token_ids is None else self._token_ids[entries]
            parents = start + places
            start = tree.tokens.shape[1]
            tree = tree.with_level(tokens.where(real, -1), parents.where(real, -1))
            if level == gamma - 1:
                break
            if go_on is not None:
                wanted = go_on(tree.tokens[:, start], self._best_row(rows, places))
                going = wanted if going is None else going & wanted
                if not any(going.tolist()):
                    break
            seen, depths = self._branches.add(parents + self._lead)
            rows = self.hosted.forward_nodes(tokens, seen, depths)
        return tree

    def _run_beams(self, live: LiveBeams) -> Tensor:
        """Run the last tokens of the live beams, and what waits before them."""
        waiting, tokens, depths = self._waiting, live.tokens, live.depths
        self._lead = waiting.tokens.shape[1]
        if not waiting:
            self._branches = self.branches(depths)
        else:
            seen = waiting.behind(self.seen, tokens.shape[1])
            tokens = torch.cat([waiting.tokens, tokens], 1)
            self._branches = Branches.behind(seen, torch.cat([waiting.depths, depths], 1))
        logits = self.hosted.forward_nodes(tokens, self._branches.seen, self._branches.depths)
        return logits[:, self._lead :]

    def _best(self, rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores, places and last entries of the draft's next beams, ``[B, n]`` each."""
        if rows.shape[1] == self._draft_width <= MOST_BEAMS:
            nobody = torch.full_like(scores, -1, dtype=torch.int64)
            found = ops.beam_verify(rows, scores, nobody, nobody, 0, eos_token_ids=self._ends)
            places, entries = found.parents[:, 0], found.tokens[:, 0]
            return found.scores[:, 0], places.clamp(min=0), entries.clamp(min=0)
        offers = torch.log_softmax(rows.float(), -1) + scores[:, :, None]
        size = offers.shape[2]
        offers[:, :, self._ends[self._ends < size]] = -torch.inf
        flat = offers.flatten(1)
        best = flat.topk(min(self._draft_width, flat.shape[1]))
        return best.values, best.indices // size, best.indices % size

    def _best_row(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return the row that each request's best beam is from, over the target's tokens."""
        row = rows[torch.arange(len(rows), device=rows.device), places[:, 0]]
        return over_the_target(row, self._token_ids)

    def note(
        self, tree: BeamTree, live: LiveBeams, nodes: Tensor, alive: Tensor, *, deepest: bool
    ) -> None:
        """Note what the next live beams continue.

        Parameters
        ----------
        tree : BeamTree
            The tree that was verified, of this drafter's or without levels.
        live : LiveBeams
            The beams that it began with.
        nodes, alive : Tensor
            As in `BeamSlots.keep`.
        deepest : bool
            Whether some of ``nodes`` may be of the tree's last level.
        """
        self._rounds.append(_Round(tree, live.levels, nodes, alive, deepest))

    def _settle(self) -> None:
        """Bring the cache, and what waits, to where the live beams are."""
        rounds, self._rounds = self._rounds, []
        for past in rounds:
            if past.tree.sizes:
                self._keep_below(past)
            else:
                self._wait_for(past)

    def _keep_below(self, past: _Round) -> None:
        """Drop what the live beams behind a draft do not need; they may lack its last level."""
        nodes, tree = past.nodes, past.tree
        not_run = nodes >= tree.tokens.shape[1] - tree.sizes[-1]
        run = nodes.where(~not_run, tree.parents.gather(1, nodes)).clamp(min=0)
        self._keep(self._branches, run + self._lead, past.alive)
        self._waiting = _Waiting.none(self.seen)
        if not past.deepest:
            return
        own = own_nodes(self.seen)
        depths = (past.levels + len(tree.sizes))[:, None].expand_as(nodes)
        self._waiting = _Waiting(
            tree.tokens.gather(1, nodes),
            depths,
            torch.cat([self.seen, own], 2),
            own & (not_run & past.alive)[:, :, None],
        )

    def _wait_for(self, past: _Round) -> None:
        """Let the live beams' last tokens wait, in a round without a draft."""
        waiting, tokens = self._waiting, past.tree.tokens
        seen = waiting.behind(self.seen, tokens.shape[1])
        alive = past.alive[:, :, None]
        lacks = torch.cat([waiting.lacks, own_nodes(self.seen)], 2)
        depths = past.levels[:, None].expand_as(tokens)
        self.seen = self.seen.gather(1, _wide(past.nodes, self.seen.shape[2])) & alive
        self._waiting = _Waiting(
            torch.cat([waiting.tokens, tokens], 1),
            torch.cat([waiting.depths, depths], 1),
            seen,
            lacks.gather(1, _wide(past.nodes, lacks.shape[2])) & alive,
        ).needed()

    def select(self, rows: Tensor, indices: list[int]) -> None:
        """Keep only these requests, given on the device and on the host."""
        super().select(rows, indices)
        self._waiting = self._waiting.select(rows)
        self._rounds = [past.select(rows) for past in self._rounds]


def _wide(index: Tensor, size: int) -> Tensor:
    """Widen ``[B, n]`` to what gathers whole rows of this size, ``[B, n, size]``."""
    return index[:, :, None].expand(-1, -1, size)


def draft_model(draft: Any) -> Any:
    """Return the model that searches for a draft: it, or the one that a drafter runs.

    Raises
    ------
    TypeError
        There is none.
    """
    if isinstance(draft, ModelHost):
        return draft.model
    if hasattr(draft, "propose") or not is_model(draft):
        raise TypeError(
            "generate: draft must be a causal language model, or a drafter that runs one, in a "
            f"beam search, got {shown(draft)}"
        )
    return draft
