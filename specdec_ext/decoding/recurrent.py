"""Models with recurrent state, run for speculation: a checkpoint, and tokens replayed behind it.

A state that has taken tokens in cannot give single ones back. So a state is kept from the last
commit after which nothing was taken back (the *checkpoint*). After a partial acceptance the next
call begins there again: accepted tokens that the checkpoint lacks (the *replay*) are fed in front
of the next ones, in the same call. No target call is added, but where the replay has grown long:
then it is run once by itself, and its end is the new checkpoint. Keys and values of hybrids are
cropped to the checkpoint, not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .continuation import Continuation, caller, continuation
from .counts import Counts
from .states import Caller, State, keeps_state

__all__ = ["RecurrentModel", "keeps_state"]


class RecurrentModel:
    """A model with recurrent state: a `HostedModel` for rows that advance at different speeds.

    Rows that are equally long and lack equally many tokens share a state and its calls; once they
    accept different numbers of draft tokens each goes on with a part of the state, in calls of its
    own. No row is padded.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model that keeps a state: see `keeps_state`.
    ends : Tensor
        ``[B]`` int64, the position at which each request must stop.
    room : int
        Slots that a cache of keys and values allocates at first.
    rolls_back : bool
        Whether tokens will be taken back; if none will be, no checkpoint is kept.
    verifies : bool
        Whether calls on several tokens are to cost less than one call for each.
    longest_replay : int
        Longer replays are run by themselves. A replay of r tokens makes each call on it dearer by
        r tokens, and a call of its own costs about one round: with c for the cost of a token more
        in a call, relative to a call, and a for the tokens a round accepts, ``sqrt(2 a / c)`` is
        the best limit: 24 for a = 3 and c = 0.01.

    Attributes
    ----------
    calls, lengths
        As of `HostedModel`; calls by rows that no longer share a state count one by one.
    features : None
        Hidden states are not handed over.

    Raises
    ------
    ValueError
        The model does not continue from its state as it reads on, or not with several tokens in a
        call where ``verifies`` asks for that.
    """

    def __init__(
        self,
        model: Any,
        ends: Tensor,
        *,
        room: int = 0,
        rolls_back: bool = True,
        verifies: bool = False,
        longest_replay: int = 24,
    ) -> None:
        found = continuation(model, ends.device)
        if verifies and found.way == "single":
            raise ValueError(
                f"generate: {type(model).__name__} runs several tokens behind a state otherwise "
                "than one after another, so every draft token would cost a call; it can decode "
                "plainly (draft=None), and be a draft"
            )
        self.features: Tensor | None = None
        self.room = room
        self.longest_replay = longest_replay
        self._found: Continuation = found
        self._caller: Caller = caller(model, found)
        self._keeps = rolls_back or found.fewest > 1
        self._ends: list[int] = ends.tolist()
        self._groups: list[_Group] = []

    @property
    def calls(self) -> int:
        """Model calls since `prefill`."""
        return self._caller.calls

    @property
    def lengths(self) -> list[int]:
        """Tokens that the model remembers, of each row."""
        lengths = {row: group.length for group in self._groups for row in group.rows}
        return [lengths[row] for row in range(len(lengths))]

    @torch.inference_mode()
    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None, *, rides: bool = False
    ) -> None:
        """Run the prompts but their last tokens, those of one length together, without padding.

        They never wait: a rejected draft is rolled back to the state behind them.
        """
        batch, width = input_ids.shape
        lengths = [width] * batch
        if attention_mask is not None:
            lengths = (attention_mask != 0).sum(1).tolist()
        together: dict[Any, list[int]] = {}
        for row, length in enumerate(lengths):
            key = length if self._found.shares else row
            together.setdefault(key, []).append(row)
        self._groups = []
        for rows in together.values():
            texts = input_ids[rows, width - lengths[rows[0]] :]
            group = _Group(self, rows, self._caller.begin(self.room), texts[:, :0])
            self._groups.append(group)
            if texts.shape[1] >= self._found.fewest:
                group.forward(texts, last_only=True)
                group.commit()
            else:
                group.text = texts  # taken in by the first call
        self._caller.calls = 0

    def forward(self, tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """Append tokens to every row: `HostedModel.forward`."""
        parts = [group.forward(_rows(tokens, group.rows), last_only) for group in self._groups]
        order = [row for group in self._groups for row in group.rows]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        if order == sorted(order):
            return logits
        return logits[sorted(range(len(order)), key=order.__getitem__)]

    def rollback(self, drop: Counts, *, across_holes: bool = False) -> None:
        """Forget the last tokens of each row, and commit to the others: `HostedModel.rollback`."""
        groups = []
        for group in self._groups:
            drops = sorted({drop.host[row] for row in group.rows})
            for n in drops:
                part = group
                if len(drops) > 1:
                    part = group.select(
                        [i for i, row in enumerate(group.rows) if drop.host[row] == n]
                    )
                part.keeps_anchor |= across_holes
                part.rollback(n)
                groups.append(part)
        self._groups = sorted(groups, key=lambda group: group.rows[0])

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these rows of the batch, given on the device and on the host."""
        place = {row: i for i, row in enumerate(indices)}
        groups = []
        for group in self._groups:
            kept = [i for i, row in enumerate(group.rows) if row in place]
            if not kept:
                continue
            part = group if len(kept) == len(group.rows) else group.select(kept)
            part.rows = [place[row] for row in part.rows]
            groups.append(part)
        self._groups = groups
        self._ends = [self._ends[i] for i in indices]

    def begin_tree(self) -> None:
        """Refuse: branches would each need a state of their own."""
        raise ValueError(
            f"generate: {type(self._caller.model).__name__} keeps a recurrent state, and the "
            "branches of a tree would each need one; it can verify and draft chains"
        )

    def forward_nodes(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> Tensor:
        """Refuse, as `begin_tree` does."""
        self.begin_tree()
        raise AssertionError

    def keep_nodes(self, nodes: Tensor, kept: Counts) -> None:
        """Refuse, as `begin_tree` does."""
        self.begin_tree()

    def keep_tree(self, nodes: Tensor, first: int) -> None:
        """Refuse, as `begin_tree` does."""
        self.begin_tree()


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Return some rows; neighbours without a list of indices, which would wait for the device."""
    first, count = rows[0], len(rows)
    if rows == list(range(first, first + count)):
        return tensor[first : first + count]
    return tensor[rows]


class _Group:
    """Rows that share a state: their text, the state, and states from which to begin again.

    Attributes
    ----------
    rows : list of int
        Which rows of the batch.
    state : State
        What the last call left, or, where that is of no use any more, anything.
    text : Tensor
        ``[b, n]`` int64, all tokens that count.
    checkpoints : list of State
        Saved states that have seen the beginning of the text, the shortest first; the first has
        seen nothing.
    keeps_anchor : bool
        Whether to keep an older checkpoint, for rollbacks that go behind the last commit.
    """

    def __init__(self, host: RecurrentModel, rows: list[int], state: State, text: Tensor) -> None:
        self.host = host
        self.rows = rows
        self.state = state
        self.text = text
        self.checkpoints = [state.save()]
        self.keeps_anchor = False
        self._ahead = False  # whether the state has seen the text, and no checkpoint shares it

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.text.shape[1]

    def forward(self, tokens: Tensor, last_only: bool) -> Tensor:
        """Append tokens; return their logits, or those of the last one."""
        host, new = self.host, tokens.shape[1]
        if not self._ahead and host._keeps:
            self.state.load(self.checkpoints[-1])
            if self.length - self.state.seen > host.longest_replay:
                self._run(self.text[:, self.state.seen :], 1)
                self._push()
                self.state.load(self.checkpoints[-1])
        replay = self.text[:, self.state.seen :]
        self.text = torch.cat([self.text, tokens], 1)
        feed = torch.cat([replay, tokens], 1)
        # Past its end a row is fed to keep the batch rectangular; those logits are unused.
        within = max(host._ends[row] for row in self.rows) - self.length
        cut = min(max(-within, 0), new - 1)
        feed = feed[:, : feed.shape[1] - cut]
        logits = self._run(feed, 1 if last_only else new - cut)
        if cut and not last_only:
            logits = torch.cat([logits, logits[:, -1:].expand(-1, cut, -1)], 1)
        self._ahead = self.state.seen == self.length
        return logits

    def _run(self, feed: Tensor, keep: int) -> Tensor:
        """Take tokens in; where they are too few for a call, with a filler behind them."""
        lacks = max(self.host._found.fewest - feed.shape[1], 0)
        if lacks:
            feed = torch.cat([feed, feed[:, -1:].expand(-1, lacks)], 1)
        logits = self.host._caller.run(self.state, feed, keep + lacks)
        return logits[:, :keep]

    def rollback(self, drop: int) -> None:
        """Forget the last tokens, or make the state a checkpoint."""
        if not drop:
            return self.commit()
        self.text = self.text[:, : self.length - drop]
        self.checkpoints = [c for c in self.checkpoints if c.seen <= self.length]
        self._ahead = False

    def commit(self) -> None:
        """Make the state a checkpoint, if it has seen the text."""
        if self._ahead and self.host._keeps:
            self._push()
            self._ahead = False

    def _push(self) -> None:
        """Add the state to the checkpoints, and drop those that are not needed."""
        first, *others = self.checkpoints
        if not self.keeps_anchor:
            others = []
        elif len(others) > 1 and others[-1].seen - others[0].seen >= self.host.longest_replay:
            others = others[-1:]
        else:
            others = others[:1]
        self.checkpoints = [first, *others, self.state.save()]

    def select(self, kept: list[int]) -> _Group:
        """Give the group of some of the rows, with states of its own."""
        batch = len(self.rows)
        rows = torch.tensor(kept, device=self.text.device)
        part = _Group.__new__(_Group)
        part.host, part.rows = self.host, [self.rows[i] for i in kept]
        part.state = self.state.select(rows, batch)
        part.text = self.text[rows]
        part.checkpoints = [saved.select(rows, batch) for saved in self.checkpoints]
        part.keeps_anchor, part._ahead = self.keeps_anchor, self._ahead
        return part
