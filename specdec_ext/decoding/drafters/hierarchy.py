"""Levels of models: a medium model verifies a drafter's proposals before the target sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...contract import RULES, rule_names
from ..alpha import AlphaSamples
from ..checks import flag
from ..counts import Counts
from ..drafting import Allowed, allowed, draft_allowed
from ..policies import GammaPolicy, as_policy
from ..transfer import Transfer
from . import (
    Draft,
    Drafter,
    GoOn,
    Requests,
    RevisableDrafter,
    as_drafter,
    asked_for_some,
    check_distinct,
    last_tokens,
    reads_features,
)
from .model import ModelDrafter
from .proposals import Proposals
from .restarted import Restarted

__all__ = ["HierarchicalDrafter"]

# Rules under which what a round emits is distributed by the medium model's rows.
OWN_RULES = rule_names(chains=True, lossless=True, reads_draft_law=True)
# The most inner rounds of one call of `propose`: their keys are position * MOST_ROUNDS + number.
MOST_ROUNDS = 1024


class HierarchicalDrafter(ModelDrafter):
    """Draws draft tokens from a medium model, which itself decodes speculatively.

    Three levels, say: small, medium, target. In an *inner round* the small model proposes tokens,
    the medium model verifies them and adds one: a *burst* of the medium model's own text. Inner
    rounds go on until there are as many tokens as the target was to be offered; of a burst that has
    more, the first are taken. They are passed to the level above with the medium model's rows, as
    tokens drawn from these. Any number of levels may lie below: the drafter may be a hierarchy.

    **Why the output has the target's law.** Verification above needs every proposed token to be
    distributed, given the tokens before it, by the row that is passed with it. An inner round under
    a lossless rule emits text that is distributed as the medium model's: what it emits, continued
    by draws from the medium's law p, is a text of p. Take all texts that begin with x_1 .. x_j. In
    some of them the burst ended there, and the next token was drawn from p; over all of them the
    next token follows p; hence also in those where the burst goes on. Which lossless rule it was
    does not matter. And where bursts and drafts are cut depends on counts and on tokens that are
    proposed, never on a token that is cut off.

    **Randomness.** Each level verifies and draws in a `Requests.stream` of its own (only the races
    of the rule "coupled" are shared by all levels). The randomness of an inner round is keyed by
    position x 1024 + the number of the round within this call, not by where the round begins: a
    round whose tokens the target then rejects is followed by another one that begins at the same
    place, and would flip the same coins; but the target's block rule has already looked at tokens
    that those coins decided, so the output would be biased.

    **Batches.** What a request proposes first does not depend on how many tokens are asked for, nor
    on the other requests, unless a policy below makes it. The host waits for the device once an
    inner round, and wherever the drafter makes it wait.

    **Which drafters.** Of any kind. When the target rejects tokens, a `RevisableDrafter` (all that
    propose something in this package are) is rolled back; any other one is started again on the
    text after every round of the target.

    **Logits processors** of the caller bind the rows of every level whose vocabulary is the
    target's. Each row is processed after the text that leads to it: what the target has, what the
    levels above have emitted in this call, and what is drafted. That makes the host wait once more
    for the medium model's rows, and once for each row that is drafted from.

    **A policy for gamma** says how many tokens the drafter proposes in an inner round. Its rounds
    are the inner rounds in which the drafter is asked (with ``refill``, the first one of each
    call), and it is told how many tokens the medium model accepted, whatever the target takes of
    them. A request that has all its tokens while others of the batch go on drafts nothing: the
    policy is told 0 of 0, and `go_on` sees -1. `go_on` is asked about tokens that all stay in the
    draft, as `policies` demands, so that the medium model's law is kept. Where the level above asks
    for different numbers of tokens, or ends some drafts early, a policy that learns is also told of
    inner rounds that only other requests needed; what a request emits then depends on them, though
    its law does not. (`RenewalRule` goes by the other requests anyway.)

    **Source.** Algorithm 3 of the follow-up report among the project's sources, in which the medium
    model verifies once and then fills the draft up token by token (``refill``). As printed there
    the first token after a rejection is drawn from the medium's law instead of the residual, which
    is biased; here it is the residual token.

    Parameters
    ----------
    model : torch.nn.Module
        The medium model: a causal language model with the interface of Hugging Face's.
    draft : torch.nn.Module or Drafter
        A smaller model over the same tokens, or any drafter, another hierarchy included.
    gamma : int or GammaPolicy
        Draft tokens in an inner round, at least 1, or the policy that chooses their number for each
        request and round. A policy keeps state: it must be used neither at another level nor in
        `generate`.
    rule : {"block", "token"}
        The rule of the inner rounds where tokens are sampled. ("coupled" where the target's is, and
        "greedy" at temperature 0.)
    refill : bool
        Ask the drafter in the first inner round only; later ones are plain steps of the medium
        model.

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
        if self.token_ids is not None:
            raise ValueError(
                "HierarchicalDrafter: model must know all of the target's tokens, since it "
                f"verifies what another drafter proposes, got {type(model).__name__} with "
                f"{len(self.token_ids)} of them"
            )
        drafter: Any = as_drafter(draft, "HierarchicalDrafter: draft")
        if reads_features(drafter):
            raise TypeError(
                "HierarchicalDrafter: draft must be one that reads no hidden states (a level hands "
                f"over none, and the target's are not its own), got {type(drafter).__name__}"
            )
        self.draft: RevisableDrafter | Restarted
        revisable = hasattr(drafter, "revise") and hasattr(drafter, "observe")
        self.draft = drafter if revisable else Restarted(drafter)
        self.policy = policy
        self.rule = rule
        self.refill = flag("HierarchicalDrafter: refill", refill)
        check_distinct("HierarchicalDrafter: draft", self)
        self._level: Requests  # the requests as this level's verification and drafter see them
        self._ends: list[int]  # position at which each request must stop
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
        has_processed = self._level.process is not None
        return Draft(found.tokens[:, :width], found.rows[:, :width], masked=has_processed)

    def _lengths(self) -> list[int]:
        """Return how long each text is, with what this level has emitted or been told of."""
        assert self._cached is not None, "start() comes first"
        missing = self._missing.shape[1]
        lengths = [n + missing for n in self._cached.lengths]
        for _, gained in self._observed:
            lengths = [n + m for n, m in zip(lengths, gained.host, strict=True)]
        return lengths

    def _room(self) -> list[int]:
        """Return how many draft tokens still fit into each request before a final token."""
        return [max(end - n - 1, 0) for end, n in zip(self._ends, self._lengths(), strict=True)]

    def _process(
        self, logits: Tensor, drafted: Tensor, emitted: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Run the caller's processors on rows, each after the text that leads to it.

        That is what the target has, what this call has emitted so far, and ``drafted``.
        """
        assert self._requests.process is not None, "of a level that has processors"
        texts = self._found.emitted
        if emitted is not None:  # by the level below
            texts = [[*mine, *more] for mine, more in zip(texts, emitted, strict=True)]
        return self._requests.process(logits, drafted, texts)

    def _round(self, number: int, positions: Tensor, found: Proposals) -> None:
        """Run one inner round: the drafter proposes, the medium model verifies, all take it in."""
        assert self._cached is not None, "start() comes first"
        positions = self._keys(positions, number, found)
        asked = not (self.refill and number)
        most = self._allowed(found, asked)
        lengths = most.lengths
        draft = self._draft(most, positions)
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

    def _allowed(self, found: Proposals, asked: bool) -> Allowed:
        """Return how many tokens each request may draft; 0 where it has all its tokens already."""
        if not asked:
            return Allowed([0] * len(found.wanted), [0] * len(found.wanted))
        unfinished = zip(self._room(), found.unfinished, strict=True)
        return allowed(self.policy, self.draft, [room if more else 0 for room, more in unfinished])

    def _draft(self, most: Allowed, positions: Tensor) -> Draft:
        """Have the drafter propose so many tokens."""
        go_on = self.policy.go_on
        if go_on is not None and min(most.lengths) == 0:
            going = torch.tensor(most.lengths, device=positions.device) > 0
            go_on = asked_for_some(go_on, going)
        return draft_allowed(self.policy, self.draft, most, positions, go_on)

    def _keys(self, positions: Tensor, number: int, found: Proposals) -> Tensor:
        """Return the positions that key an inner round's randomness: each round has its own."""
        if self._level.coupled:  # races are keyed by the position of the token itself
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
            draft_token_ids=None if draft.logits is None else draft.token_ids,
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
        """Take note, on every level, of tokens that were emitted in rounds of other drafters."""
        self._text = self._longer(self._lengths(), tokens, gained)
        super().observe(tokens, gained)
        if isinstance(self.draft, Restarted):
            self.draft.restart(self._text)
        else:
            self.draft.observe(tokens, gained)

    def _longer(self, lengths: list[int], tokens: Tensor, gained: Counts) -> Tensor:
        """Return each text, now ``lengths[b]`` long, with the first ``gained`` of ``tokens``."""
        known = self._text.shape[1]
        longest = max(n + m for n, m in zip(lengths, gained.host, strict=True))
        short = max(longest - known - min(gained.host), 0)  # the padding grows by so many
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
