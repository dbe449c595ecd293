"""A smaller causal model as the drafter: it samples gamma tokens, one call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import is_model, shown
from ..counts import Counts
from .hosted import ModelHost
from .interface import (
    Draft,
    Drafter,
    GoOn,
    NoDrafter,
    Requests,
    made_drafter,
)
from .rows import last_tokens, lengthened, prefix_or_drawn

__all__ = ["ModelDrafter", "as_drafter"]


class _Observed(NamedTuple):
    tokens: Tensor  # [B, n]
    gained: Counts  # how many of them, of each row

    def select(self, rows: Tensor, indices: Sequence[int]) -> _Observed:
        return _Observed(self.tokens[rows], self.gained.select(rows, indices))


class ModelDrafter(ModelHost):
    """Draws draft tokens from a causal model, under the draft's filters and the processors.

    The last draft token of a round is never run here: nothing would read its logits. So after full
    acceptance the model lacks two tokens, else one, and the next round's first call takes in
    whichever is missing; no call is spent on it alone. In a batch in which some row lacks two, the
    others run their last cached token again, and no hole is made. In a `StackedDrafter` it may lack
    more, and takes that in when it is asked again.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model called as Hugging Face models are, over the target's tokens. If it
        has ``draft_token_ids`` ``[Vd]``, as `specdec_ext.models.draft_llama.DraftLlama` has, its
        logits are over these tokens only, and its law is passed on over them. Logits processors,
        which work on the target's tokens, are left out of such a draft's law then: its tokens are
        accepted less often, and the output's law is the same.
    """

    def __init__(self, model: Any) -> None:
        if not is_model(model):
            raise TypeError(
                f"{type(self).__name__}: model must be a causal language model, called as Hugging "
                f"Face models are, got {shown(model)}"
            )
        super().__init__(model)
        self._observed: list[_Observed] = []  # what comes behind them, by others

    def start(self, requests: Requests) -> None:
        """Run the prompts but their last tokens."""
        self._begin(requests)
        self._observed = []

    def propose(
        self,
        gamma: int,
        positions: Tensor,
        go_on: GoOn | None = None,
        prefix: Tensor | None = None,
    ) -> Draft:
        """Sample up to ``gamma`` tokens, each from the law after the ones before it.

        Parameters
        ----------
        gamma : int
            How many, those of ``prefix`` included.
        positions : Tensor
            ``[B]``, where the first goes.
        go_on : callable, optional
            As in `Drafter`; where ``prefix`` goes on, so does the draft.
        prefix : Tensor, optional
            ``[B, F]`` int64, tokens that another drafter proposes for the head, -1 behind them;
            fewer than ``gamma`` in some row. What all rows have is run in one call.
        """
        assert self._cached is not None, "start() comes first"
        self._take_in()
        shared = 0 if prefix is None else int((prefix >= 0).all(0).sum())
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        process = self._requests.process if self.token_ids is None else None
        feed = self._missing
        if prefix is not None:
            tokens.append(prefix[:, :shared])
            feed = torch.cat([feed, tokens[0]], 1)
            if go_on is not None:
                for token in tokens[0].T:
                    go_on(token, None)
        going: Tensor | None = None  # [B], requests that propose more; None: all
        for i in range(shared, gamma):
            logits = self._cached.forward(feed, last_only=True)
            if process is not None:
                logits = process(logits, torch.cat([self._missing[:, :0], *tokens], 1))
            drawn = self._draw(logits[:, 0], positions, i)[:, 0]
            feed = prefix_or_drawn(prefix, drawn, i)[:, None]
            tokens.append(feed if going is None else torch.where(going[:, None], feed, -1))
            laws.append(logits)
            if go_on is None or i == gamma - 1:
                continue
            wanted = go_on(tokens[-1][:, 0], self._over_the_target(logits[:, 0]))
            going = wanted if going is None else going & wanted
            if prefix is not None and i + 1 < prefix.shape[1]:
                going |= prefix[:, i + 1] >= 0
            count = sum(going.tolist())
            if not count:
                break
            going = going if count < going.shape[0] else None
        if not tokens:
            return Draft(self._missing[:, :0])
        laws = laws[:1] * shared + laws  # no law is read of tokens that another drafter proposed
        if not self._requests.needs_law:
            return Draft(torch.cat(tokens, 1))
        return Draft(
            torch.cat(tokens, 1),
            torch.cat(laws, 1),
            token_ids=self.token_ids,
            masked=process is not None,
        )

    def _draw(self, logits: Tensor, positions: Tensor, i: int) -> Tensor:
        """Draw draft token ``i`` (0-based) of each row, ``[B, 1]``; -1 where a row has no law."""
        return self._requests.draw(logits, positions, i, self.token_ids)[:, None]

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Roll back what was rejected and note which tokens the cache lacks."""
        assert self._cached is not None, "start() comes first"
        gamma, known = tokens.shape[1] - 1, self._missing.shape[1]
        lacks = 1 if gamma else known  # the last draft token was not run
        width = self._take_back(lacks, gamma - accepted)
        history = torch.cat([self._missing, tokens], 1)
        self._missing = last_tokens(history, accepted + known, width)

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Take tokens back that commits emitted, and take one in their place."""
        assert self._cached is not None, "start() comes first"
        self._take_in()
        lacks = self._missing.shape[1]
        fewest = min(drop.host)
        rows = zip(self._cached.lengths, drop.host, strict=True)
        if any(cached < n - fewest for cached, n in rows):
            # Rounds without a draft: some text is now shorter than what the cache lacks of others.
            self._cached.forward(self._missing[:, :-1], last_only=True)
            lacks = 1
        width = self._take_back(lacks, drop, across_holes=True)
        self._missing = text[:, text.shape[1] - width :]

    def _take_back(self, lacks: int, drop: Counts, **how: bool) -> int:
        """Take back the last ``drop`` tokens of each text, of which the cache lacks ``lacks``.

        Returns how many tokens it lacks when one more has come, of the row that it lacks most of;
        ``how`` is for its own rollback.
        """
        assert self._cached is not None, "start() comes first"
        lacks_still = max(lacks - min(drop.host), 0)
        taken = lacks - lacks_still
        self._cached.rollback(drop - taken, **how)
        return lacks_still + 1

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Note tokens that others' rounds added; the next round takes them in.

        Parameters
        ----------
        tokens : Tensor
            ``[B, n]``: ``gained`` tokens, then anything.
        gained : Counts
            How many tokens each request gained.
        """
        self._observed.append(_Observed(tokens, gained))

    def _take_in(self) -> None:
        """Make what was observed part of what the cache lacks.

        Where rows gained different numbers of tokens, one call runs all of them but the last one.
        """
        if not self._observed:
            return
        assert self._cached is not None
        batch, known = self._missing.shape
        text, lengths = self._missing, Counts.full(batch, known, self._missing.device)
        for tokens, gained in self._observed:
            text, lengths = lengthened(text, lengths, tokens, gained)
        longest = max(lengths.host)
        self._missing, self._observed = text, []
        if min(lengths.host) == longest:
            return
        self._cached.forward(text[:, :-1], last_only=True)
        self._cached.rollback(longest - lengths)
        self._missing = last_tokens(text, lengths - 1, 1)

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        assert self._cached is not None, "start() comes first"
        self._requests = self._requests.select(rows)
        self._cached.select(rows, indices)
        self._missing = self._missing[rows]
        self._observed = [seen.select(rows, indices) for seen in self._observed]


def as_drafter(draft: Any | Drafter | None, name: str = "draft") -> Drafter:
    """Return the drafter that ``draft`` is, or the one that drives the model or heads that it is.

    Parameters
    ----------
    draft : torch.nn.Module, Drafter or None
        None: the drafter that proposes nothing. Decoding heads, which are no language models, have
        ``make_drafter()``.
    name : str
        The argument, as errors are to say it.

    Raises
    ------
    TypeError
        Something else, or a drafter that lacks a method.
    """
    if draft is None:
        return NoDrafter()
    draft = made_drafter(draft)
    if hasattr(draft, "propose") and not isinstance(draft, type):
        methods = ("start", "propose", "commit", "select")
        lacking = [method for method in methods if not callable(getattr(draft, method, None))]
        if lacking:
            raise TypeError(f"{name} must have {lacking[0]}(), as drafters do, got {shown(draft)}")
        drafter: Drafter = draft
        return drafter
    if not is_model(draft):
        raise TypeError(
            f"{name} must be a causal language model, heads, a Drafter or None, got {shown(draft)}"
        )
    return ModelDrafter(draft)
