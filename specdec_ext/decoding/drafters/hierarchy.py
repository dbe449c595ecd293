"""Levels of models: a drafter's proposals pass a medium model before the target sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.contract import RULES, rule_names
from specdec_ext.decoding.alpha import AlphaSamples
from specdec_ext.decoding.checks import flag
from specdec_ext.decoding.counts import Counts
from specdec_ext.decoding.drafters import (
    Draft,
    Drafter,
    GoOn,
    Requests,
    RevisableDrafter,
    as_drafter,
    asked_for_some,
    check_distinct,
    last_tokens,
)
from specdec_ext.decoding.drafters.model import ModelDrafter
from specdec_ext.decoding.drafters.proposals import Proposals
from specdec_ext.decoding.drafters.restarted import Restarted
from specdec_ext.decoding.policies import GammaPolicy, as_policy
from specdec_ext.decoding.transfer import Transfer

__all__ = ["HierarchicalDrafter"]

# The rules that pass on a law which proposals come from.
OWN_RULES = rule_names(chains=True, lossless=True, reads_draft_law=True)
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

    What a draft begins with does not depend on how many tokens are asked for, nor, unless a policy
    below makes it, on the other requests of the batch. The drafter may be of any kind. A
    `RevisableDrafter`, as all that propose something here are, is rolled back; any other one is
    started again on the text after every round of the target. The host waits for the device once a
    round of the medium model, and where the drafter has it wait.

    The caller's logits processors bind the rows of every level whose vocabulary is the target's,
    each row behind what the target has, what the levels above it have emitted in this call, and
    what is drafted. That is one wait more for the medium model's rows, and one for each row that
    is drafted from.

    A policy may say how many tokens the drafter proposes to the medium model. Its rounds are those
    of the medium model in which the drafter is asked (with ``refill``, the first of each call). It
    hears how many tokens the medium model accepted, whatever the target takes of them. A request
    that has its tokens while others of the batch go on drafts nothing: the policy hears 0 of 0,
    and `go_on` sees -1. Stops are asked about tokens that all stay in the draft that the medium
    model verifies, as `policies` wants it; so the medium model's law is kept. Where the level above
    asks its requests for different numbers of tokens, or ends their drafts early, a policy that
    learns hears of rounds that only batch mates had use for; what a request emits then depends on
    them, if not in law. (`RenewalRule` goes by batch mates anyway.)

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
    gamma : int or GammaPolicy
        Draft tokens in a round of the medium model, at least 1, or the policy that chooses them for
        each request and round: one of its own, which no other level nor `generate` uses.
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
        gamma: int | GammaPolicy = 4,
        *,
        rule: str = "block",
        refill: bool = False,
    ) -> None:
        policy = as_policy("HierarchicalDrafter: gamma", gamma, low=1)
        if rule not in OWN_RULES:
            known = " or ".join(map(repr, OWN_RULES))
            raise ValueError(f"HierarchicalDrafter: rule must be {known}, got {rule!r}")
        super().__init__(model)
        drafter: Any = as_drafter(draft, "HierarchicalDrafter: draft")
        self.draft: RevisableDrafter | Restarted
        revisable = hasattr(drafter, "revise") and hasattr(drafter, "observe")
        self.draft = drafter if revisable else Restarted(drafter)
        self.policy = policy
        self.rule = rule
        self.refill = flag("HierarchicalDrafter: refill", refill)
        check_distinct("HierarchicalDrafter: draft", self)
        self._level: Requests  # as this level's verification and drafter have it
        self._ends: list[int]
        self._text: Tensor  # [B, n], what the target has, left-padded with -1
        self._found: Proposals

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
            process=None if requests.process is None else self._process,
            stream=requests.stream if requests.coupled else requests.stream + 1,
        )
        self.draft.start(self._level)
        ids, mask = requests.input_ids, requests.attention_mask
        self._text = ids if mask is None else ids.masked_fill(mask == 0, -1)
        self._ends = requests.ends.tolist()
        self._found = Proposals([0] * len(self._ends), ids.device)
        self.policy.start(len(self._ends))
        self._alpha = AlphaSamples(RULES[self._rule_of(self._level)], self.policy, measured=False)

    def propose(  # type: ignore[override]  # it cannot go on behind others' tokens
        self, gamma: int, positions: Tensor, go_on: GoOn | None = None
    ) -> Draft:
        """Propose up to ``gamma`` tokens, each drawn from the medium model's law."""
        self._take_in()
        gamma = min(gamma, MOST_ROUNDS)
        wanted = [min(gamma, room) for room in self._room()]
        keep_rows = self._requests.needs_law or go_on is not None
        self._found = found = Proposals(wanted, positions.device, keep_rows)
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
        """Return how long each text is, with what this level has emitted or observed."""
        assert self._cached is not None, "start() comes first"
        missing = self._missing.shape[1]
        lengths = [n + missing for n in self._cached.lengths]
        for _, gained in self._observed:
            lengths = [n + m for n, m in zip(lengths, gained.host, strict=True)]
        return lengths

    def _room(self) -> list[int]:
        """Return how many draft tokens each request may take, if a final token is to follow."""
        return [max(end - n - 1, 0) for end, n in zip(self._ends, self._lengths(), strict=True)]

    def _process(
        self, logits: Tensor, drafted: Tensor, emitted: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Process rows behind what the target has, what this call has emitted, and a draft."""
        assert self._requests.process is not None, "of a level that has processors"
        texts = self._found.emitted
        if emitted is not None:  # by the level below
            texts = [[*mine, *more] for mine, more in zip(texts, emitted, strict=True)]
        return self._requests.process(logits, drafted, texts)

    def _round(self, number: int, positions: Tensor, found: Proposals) -> None:
        """Have the drafter propose; take what the medium model makes of it."""
        assert self._cached is not None, "start() comes first"
        positions = self._keys(positions, number, found)
        asked = not (self.refill and number)
        lengths = self._draft_lengths(found) if asked else [0] * len(found.wanted)
        draft = self._draft(lengths, positions)
        gamma = draft.tokens.shape[1]
        feed = torch.cat([self._missing, draft.tokens], 1)
        logits = self._cached.forward(feed, last_only=gamma == 0)[:, -1 - gamma :]
        if self._level.process is not None:
            logits = self._level.process(logits, draft.tokens)
        tokens, num_accepted = self._verify(logits, draft, lengths, positions)
        drafted = (draft.tokens >= 0).long().cumprod(1).sum(1)
        overlaps = self._alpha.overlaps(logits, draft, self._level.filters) if asked else None
        rows = Transfer.pack(
            tokens, num_accepted, drafted, *([] if overlaps is None else [overlaps])
        ).unpack()
        accepted = Counts([row[1] for row in rows], num_accepted)
        bursts = [row[0][: row[1] + 1] for row in rows]
        if asked:
            counts = [min(row[2], length) for row, length in zip(rows, lengths, strict=True)]
            for (_, taken, _, *measured), count in zip(rows, counts, strict=True):
                self._alpha.add(taken, taken < count, *measured)
            self._alpha.end_round()
            self.policy.commit(counts, accepted.host)
        self._cached.rollback(gamma - accepted)
        self.draft.commit(tokens, accepted)
        self._missing = last_tokens(tokens, accepted, 1)
        found.add(tokens, logits, bursts)

    def _draft_lengths(self, found: Proposals) -> list[int]:
        """Return how many tokens each request may draft; none where it has its tokens."""
        allowed = zip(self.policy.lengths(), self._room(), found.unfinished, strict=True)
        return [min(length, room) if more else 0 for length, room, more in allowed]

    def _draft(self, lengths: list[int], positions: Tensor) -> Draft:
        """Have the drafter propose so many tokens."""
        go_on = self.policy.go_on
        if go_on is not None and min(lengths) == 0:
            go_on = asked_for_some(go_on, torch.tensor(lengths, device=positions.device) > 0)
        return self.draft.propose(max(lengths), positions, go_on)

    def _keys(self, positions: Tensor, number: int, found: Proposals) -> Tensor:
        """Return the positions that a round draws at: no round of any call has the same."""
        if self._level.coupled:  # races are keyed by where a token stands
            return positions + found.lengths.device
        return positions * MOST_ROUNDS + number

    def _rule_of(self, level: Requests) -> str:
        return "greedy" if level.greedy else "coupled" if level.coupled else self.rule

    def _verify(
        self, logits: Tensor, draft: Draft, lengths: list[int], positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the burst ``[B, G + 1]`` and how many of its tokens were accepted."""
        level, gamma = self._level, draft.tokens.shape[1]
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
            rule=self._rule_of(level),
            **level.filters,
        )
        return verified.tokens, verified.num_accepted

    def commit(self, tokens: Tensor, accepted: Counts) -> None:
        """Roll every level back to what was accepted, and take the final token."""
        emitted = self._found.lengths
        before = [n - m for n, m in zip(self._lengths(), emitted.host, strict=True)]
        self.revise(self._longer(before, tokens, accepted + 1), emitted - accepted)

    def observe(self, tokens: Tensor, gained: Counts) -> None:
        """Note, on every level, tokens that others' rounds added."""
        self._text = self._longer(self._lengths(), tokens, gained)
        super().observe(tokens, gained)
        if isinstance(self.draft, Restarted):
            self.draft.restart(self._text)
        else:
            self.draft.observe(tokens, gained)

    def _longer(self, lengths: list[int], tokens: Tensor, gained: Counts) -> Tensor:
        """Return what the target has, ``lengths`` long, with the first ``gained`` tokens."""
        known = self._text.shape[1]
        longest = max(n + m for n, m in zip(lengths, gained.host, strict=True))
        short = max(longest - known - min(gained.host), 0)  # columns that the padding must grow by
        history = torch.nn.functional.pad(torch.cat([self._text, tokens], 1), (short, 0), value=-1)
        return last_tokens(history, gained + (known - 1 + short), longest)

    def revise(self, text: Tensor, drop: Counts) -> None:
        """Take tokens back on every level, and take one in their place."""
        super().revise(text, drop)
        self.draft.revise(text, drop)
        self._text = text

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests, on every level."""
        super().select(rows, indices)
        self.draft.select(rows, indices)
        self.policy.select(indices)
        self._level = self._level.select(rows)
        self._ends = [self._ends[i] for i in indices]
        self._text = self._text[rows]
        self._found.select(rows, indices)
