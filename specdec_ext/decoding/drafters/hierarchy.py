"""Levels of models: a drafter's proposals pass a medium model before the target sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.decoding.drafters import (
    Draft,
    Drafter,
    GoOn,
    Requests,
    RevisableDrafter,
    as_drafter,
    last_tokens,
)
from specdec_ext.decoding.drafters.model import ModelDrafter

__all__ = ["HierarchicalDrafter"]

# Rounds that one call of `propose` may have: the numbers that tell its rounds apart count by this.
MOST_ROUNDS = 1024


class HierarchicalDrafter(ModelDrafter):
    """Draws draft tokens from a medium model, which has them drafted by a smaller one.

    Rounds of the medium model on the drafter's proposals go on until there are as many tokens as
    were asked for; of a burst that has more, the first are taken. The rows passed to the level
    above are the medium model's.

    Why the output is distributed as the target's own: verification above needs every proposed token
    to follow, given those before it, the row that is passed on. A lossless rule makes a burst,
    continued by draws from the medium's law p, a text of p. Take the texts that begin with
    x_1..x_j: where the burst had ended by then, the next token was drawn from p; over all of them
    it follows p; so it does where the burst goes on. Nothing of this depends on the rule. Where
    bursts and drafts are cut depends on counts and on tokens that are proposed, never on what is
    cut off.

    Each level verifies and draws in a `Requests.stream` of its own; only the races of the rule
    "coupled" are shared by all. A round's randomness is keyed by the call's position and the number
    of the round in it: the target's block rule has seen more than the tokens it kept, so what a
    rejected round drew must not come again, and where the next round begins is no key for it.

    What a draft begins with does not depend on how many tokens are asked for, nor on the other
    requests of the batch. The drafter may be of any kind. A `RevisableDrafter`, as models and
    hierarchies are, is rolled back; any other one is started again on the text after every round of
    the target. The host waits for the device once a round of the medium model.

    After Algorithm 3 of the follow-up report among the project's sources, in which the medium
    model verifies once and then fills the draft up token by token (``refill``). Printed there, the
    first token after a rejection is drawn from the medium's law, not from the residual: that is
    biased. Here it is the residual token.

    Parameters
    ----------
    model : torch.nn.Module
        The medium model: a causal language model called as Hugging Face models are.
    draft : torch.nn.Module or Drafter
        A smaller model over the same tokens, or any drafter, another hierarchy included.
    gamma : int
        Draft tokens in a round of the medium model, at least 1.
    rule : {"block", "token"}
        The medium model's rule where tokens are drawn. (It is "coupled" where the target's is.)
    refill : bool
        Ask the drafter once, then fill up by the medium model alone.

    Examples
    --------
    >>> drafter = HierarchicalDrafter(medium, small, gamma=3)  # doctest: +SKIP
    >>> specdec_ext.generate(target, drafter, input_ids, gamma=6)  # doctest: +SKIP
    >>> drafter.calls_by_level  # of the medium and of the small model  # doctest: +SKIP
    [61, 180]
    """

    def __init__(
        self,
        model: Any,
        draft: Any | Drafter,
        gamma: int = 4,
        *,
        rule: str = "block",
        refill: bool = False,
    ) -> None:
        if isinstance(gamma, bool) or not isinstance(gamma, int):
            raise TypeError(f"hierarchy: gamma must be an int, got {type(gamma).__name__}")
        if gamma < 1:
            raise ValueError(f"hierarchy: gamma must be at least 1, got {gamma}")
        if rule not in ("block", "token"):  # others have no law that could be passed on
            raise ValueError(f"hierarchy: rule must be 'block' or 'token', got {rule!r}")
        super().__init__(model)
        drafter: Any = as_drafter(draft)
        self.draft: RevisableDrafter | _Restarted
        revisable = hasattr(drafter, "revise") and hasattr(drafter, "hear")
        self.draft = drafter if revisable else _Restarted(drafter)
        self.gamma = gamma
        self.rule = rule
        self.refill = refill
        self._level: Requests  # as this level's verification and drafter have it
        self._ends: list[int]
        self._text: Tensor  # [B, n], what the target has, left-padded with -1
        self._found: _Proposals

    @property
    def calls(self) -> int:
        """Model calls of all levels so far, prefill excluded."""
        return sum(self.calls_by_level)

    @property
    def calls_by_level(self) -> list[int]:
        """Model calls so far, prefill excluded: the medium model's, then the levels' below."""
        return [super().calls, *getattr(self.draft, "calls_by_level", [self.draft.calls])]

    def start(self, requests: Requests) -> None:
        """Run the prompts but their last tokens on every level."""
        super().start(requests)
        self._level = replace(
            requests,
            needs_law=not (requests.greedy or requests.coupled),
            process=None,  # it knows what the target has, not what this level proposes
            stream=requests.stream if requests.coupled else requests.stream + 1,
        )
        self.draft.start(self._level)
        ids, mask = requests.input_ids, requests.attention_mask
        self._text = ids if mask is None else ids.masked_fill(mask == 0, -1)
        self._ends = requests.ends.tolist()
        self._found = _Proposals([0] * len(self._ends), ids.device)

    def propose(  # type: ignore[override]  # it cannot go on behind others' tokens
        self, gamma: int, positions: Tensor, go_on: GoOn | None = None
    ) -> Draft:
        """Propose up to ``gamma`` tokens, each drawn from the medium model's law."""
        self._take_in()
        gamma = min(gamma, MOST_ROUNDS)
        wanted = [min(gamma, room) for room in self._room()]
        keep_rows = self._requests.needs_law or go_on is not None
        self._found = found = _Proposals(wanted, positions.device, keep_rows)
        rounds = 0
        while not found.complete:
            self._round(rounds, positions, found)
            rounds += 1
            if go_on is not None:
                found.ask(go_on)
        width = max(found.wanted)
        if found.rows is None or not self._requests.needs_law:
            return Draft(found.tokens[:, :width])
        return Draft(found.tokens[:, :width], found.rows[:, :width])

    def _lengths(self) -> list[int]:
        """Return how long each text is, with what this level has emitted or heard."""
        assert self._cached is not None, "start() comes first"
        missing = self._missing.shape[1]
        heard = [sum(n) for n in zip(*(heard.gained for heard in self._heard), strict=True)]
        lengths = [n + missing for n in self._cached.lengths]
        return [n + m for n, m in zip(lengths, heard, strict=True)] if heard else lengths

    def _room(self) -> list[int]:
        """Return how many draft tokens each request may take, if a final token is to follow."""
        return [max(end - n - 1, 0) for end, n in zip(self._ends, self._lengths(), strict=True)]

    def _round(self, number: int, positions: Tensor, found: _Proposals) -> None:
        """Have the drafter propose; take what the medium model makes of it."""
        assert self._cached is not None, "start() comes first"
        positions = self._keys(positions, number, found)
        lengths = [min(self.gamma, room) for room in self._room()]
        asked = max(n for n, more in zip(lengths, found.unfinished, strict=True) if more)
        draft = self.draft.propose(0 if self.refill and number else asked, positions)
        gamma = draft.tokens.shape[1]
        feed = torch.cat([self._missing, draft.tokens], 1)
        logits = self._cached.forward(feed, last_only=gamma == 0)[:, -1 - gamma :]
        tokens, num_accepted = self._verify(logits, draft, lengths, positions)
        accepted = num_accepted.tolist()
        self._cached.rollback([gamma - n for n in accepted], gamma - num_accepted)
        self.draft.commit(tokens, accepted, num_accepted)
        self._missing = last_tokens(tokens, accepted, num_accepted, 1)
        found.add(tokens, logits, accepted, num_accepted)

    def _keys(self, positions: Tensor, number: int, found: _Proposals) -> Tensor:
        """Return the positions that a round draws at: no round of any call has the same."""
        if self._level.coupled:  # races are keyed by where a token stands
            return positions + found.heard_tensor
        return positions * MOST_ROUNDS + number

    def _verify(
        self, logits: Tensor, draft: Draft, lengths: list[int], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the burst ``[B, G + 1]`` and how many of its tokens were accepted."""
        level, gamma = self._level, draft.tokens.shape[1]
        rule = "greedy" if level.greedy else "coupled" if level.coupled else self.rule
        limits = None
        if min(lengths) < gamma:
            limits = torch.tensor(lengths, device=logits.device).clamp(max=gamma)
        verified = ops.verify(
            logits,
            draft.tokens,
            draft.logits,
            draft_kinds=draft.kinds if level.needs_law else None,
            draft_lengths=limits,
            seeds=level.seeds,
            positions=positions,
            stream=level.stream,
            rule=rule,
            **level.filters,
        )
        return verified.tokens, verified.num_accepted

    def commit(self, tokens: Tensor, accepted: Sequence[int], num_accepted: Tensor) -> None:
        """Roll every level back to what was accepted, and take the final token."""
        found = self._found
        drop = [n - kept for n, kept in zip(found.heard, accepted, strict=True)]
        before = [n - m for n, m in zip(self._lengths(), found.heard, strict=True)]
        gained = [n + 1 for n in accepted]
        text = self._longer(before, tokens, gained, num_accepted + 1)
        self.revise(text, drop, found.heard_tensor - num_accepted)

    def hear(self, tokens: Tensor, gained: Sequence[int], num_gained: Tensor) -> None:
        """Note, on every level, tokens that others' rounds added."""
        self._text = self._longer(self._lengths(), tokens, gained, num_gained)
        super().hear(tokens, gained, num_gained)
        if isinstance(self.draft, _Restarted):
            self.draft.restart(self._text)
        else:
            self.draft.hear(tokens, gained, num_gained)

    def _longer(
        self, lengths: list[int], tokens: Tensor, gained: Sequence[int], num_gained: Tensor
    ) -> Tensor:
        """Return what the target has, ``lengths`` long, with the first ``gained[b]`` tokens."""
        known = self._text.shape[1]
        longest = max(n + m for n, m in zip(lengths, gained, strict=True))
        last = [known - 1 + n for n in gained]
        short = max(longest - 1 - min(last), 0)  # columns that the padding must grow by
        history = torch.nn.functional.pad(torch.cat([self._text, tokens], 1), (short, 0), value=-1)
        last = [n + short for n in last]
        return last_tokens(history, last, known - 1 + short + num_gained, longest)

    def revise(self, text: Tensor, drop: Sequence[int], drop_tensor: Tensor) -> None:
        """Take tokens back on every level, and take one in their place."""
        super().revise(text, drop, drop_tensor)
        self.draft.revise(text, drop, drop_tensor)
        self._text = text

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests, on every level."""
        super().select(rows, indices)
        self.draft.select(rows, indices)
        self._level = self._level.select(rows)
        self._ends = [self._ends[i] for i in indices]
        self._text = self._text[rows]
        self._found.select(rows, indices)


class _Proposals:
    """What one call of `propose` gathers; the requests of a batch fill up at their own pace.

    Parameters
    ----------
    wanted : list of int
        Tokens that each request is to propose; fewer where it is told to stop.
    device : torch.device
        Where the tokens are.
    keep_rows : bool
        Whether the rows that tokens were drawn from are asked for.
    """

    def __init__(self, wanted: list[int], device: torch.device, keep_rows: bool = False) -> None:
        self.wanted = wanted
        self.keep_rows = keep_rows
        self.heard = [0] * len(wanted)  # tokens that the medium model emitted, cut off or not
        self.heard_tensor = torch.zeros(len(wanted), dtype=torch.int64, device=device)
        self.tokens = self.heard_tensor.new_full((len(wanted), max(wanted)), -1)
        self.rows: Tensor | None = None  # [B, G, V], the law of each token, if it is kept
        self._asked = 0  # tokens of each request that go_on has seen

    @property
    def unfinished(self) -> list[bool]:
        """Which requests lack tokens."""
        return [n < wanted for n, wanted in zip(self.heard, self.wanted, strict=True)]

    @property
    def complete(self) -> bool:
        """Whether every request has its tokens."""
        return not any(self.unfinished)

    def add(
        self, tokens: Tensor, logits: Tensor, accepted: list[int], num_accepted: Tensor
    ) -> None:
        """Add a burst, ``[B, n]`` tokens drawn from ``[B, n, V]``; cut what is too much."""
        if self.keep_rows and self.rows is None:
            self.rows = logits.new_zeros(*self.tokens.shape, logits.shape[2])
        places = [
            (b, self.heard[b] + i, i)
            for b, n in enumerate(accepted)
            for i in range(min(n + 1, self.wanted[b] - self.heard[b]))
        ]
        b, to, i = torch.tensor(places, device=tokens.device).T
        self.tokens[b, to] = tokens[b, i]
        if self.rows is not None:
            self.rows[b, to] = logits[b, i]
        self.heard = [n + more + 1 for n, more in zip(self.heard, accepted, strict=True)]
        self.heard_tensor = self.heard_tensor + num_accepted + 1

    def ask(self, go_on: GoOn) -> None:
        """Ask about each token but the last, when every request that has it to propose has it."""
        assert self.rows is not None, "add() comes first"
        while self._asked < max(self.wanted) - 1 and self._has(self._asked):
            seen = self._asked + 1
            more = go_on(self.tokens[:, self._asked], self.rows[:, self._asked])
            self.tokens[:, seen:].masked_fill_(~more[:, None], -1)
            self.wanted = [
                n if goes else min(n, seen)
                for n, goes in zip(self.wanted, more.tolist(), strict=True)
            ]
            self._asked = seen

    def _has(self, i: int) -> bool:
        """Tell whether token ``i`` is there, of each request that is to propose it."""
        return all(n > i or wanted <= i for n, wanted in zip(self.heard, self.wanted, strict=True))

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep the counts of these requests."""
        self.heard = [self.heard[i] for i in indices]
        self.heard_tensor = self.heard_tensor[rows]


class _Restarted:
    """A drafter that cannot take tokens back: it is started again on what the text is then.

    Parameters
    ----------
    draft : Drafter
        Any.
    """

    def __init__(self, draft: Drafter) -> None:
        self.draft = draft
        self._calls = 0  # before it was started again
        self._requests: Requests

    @property
    def calls(self) -> int:
        """Model calls so far, prefill excluded."""
        return self._calls + self.draft.calls

    def start(self, requests: Requests) -> None:
        """Take the prompts."""
        self._requests = requests
        self.draft.start(requests)

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Propose up to ``gamma`` tokens."""
        return self.draft.propose(gamma, positions, go_on)

    def commit(self, tokens: Tensor, accepted: Sequence[int], num_accepted: Tensor) -> None:
        """Hear what was emitted."""
        self.draft.commit(tokens, accepted, num_accepted)

    def revise(self, text: Tensor, drop: Sequence[int], drop_tensor: Tensor) -> None:
        """Take tokens back that commits emitted, and take one in their place."""
        self.restart(text)

    def restart(self, text: Tensor) -> None:
        """Start again on ``text`` ``[B, n]``, left-padded with -1."""
        calls = self.draft.calls
        known = text >= 0
        self.draft.start(
            replace(
                self._requests,
                input_ids=text.clamp(min=0),
                attention_mask=None if bool(known.all()) else known.long(),
            )
        )
        self._calls += calls - self.draft.calls

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        self._requests = self._requests.select(rows)
        self.draft.select(rows, indices)
