"""The rounds of `generate` with chains: propose, verify, commit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..contract import (
    RULES,
    STATUS_INVALID_DRAFT_TOKEN,
    STATUS_INVALID_TREE,
    STATUS_NO_DRAFT_LAW,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
)
from . import arguments
from .alpha import AlphaSamples
from .counts import Counts
from .drafters import Draft, Requests, last_tokens, reads_features
from .drafting import Allowed, allowed, draft_allowed
from .grammar_masks import GrammarMasks, hidden
from .options import Settings
from .policies import GammaPolicy
from .processors import Processors
from .stats import Clock, Statistics
from .texts import Texts, on_the_host
from .transfer import ChainOutcome, Transfer, TreeOutcome

__all__ = ["Burst", "ChainGeneration", "Generated", "GenerationError"]

DRAFT_ENDED_EARLY = STATUS_INVALID_DRAFT_TOKEN | STATUS_NO_DRAFT_LAW
ROOM = 512  # slots that the caches allocate beyond the prompt; they double when it is used up
FATAL = {
    STATUS_NO_TARGET_LAW: "the target's logits hold NaN, +inf or nothing finite",
    STATUS_PARAMETER_OUT_OF_RANGE: "a sampling parameter is out of range",
    STATUS_INVALID_TREE: "the draft is no valid tree",
}


class Burst(NamedTuple):
    """What one round added to one request.

    Attributes
    ----------
    request : int
        Which.
    tokens : list of int
        The tokens added: ``accepted`` draft tokens, then at most one token of the target's own.
    accepted : int
        How many of them are draft tokens.
    replaced : int or None
        The draft token in whose place the target's own stands; None where it replaces nothing.
    logprobs : list of float
        Log-probabilities of the tokens, as `specdec_ext.verify` gives them.
    """

    request: int
    tokens: list[int]
    accepted: int
    replaced: int | None
    logprobs: list[float]

    @property
    def flags(self) -> list[bool]:
        """Whether each token is an accepted draft token."""
        return [i < self.accepted for i in range(len(self.tokens))]


class GeneratedPair(NamedTuple):
    """What every kind of generation gives: sequences and statistics."""

    sequences: Tensor
    statistics: Statistics


class Generated(GeneratedPair):
    """Result of `generate`: the pair ``(sequences, statistics)``, with log-probabilities beside it.

    Attributes
    ----------
    sequences : Tensor
        ``[B, P + N]``, the prompts as given and the new tokens, ``pad_token_id`` after the end.
    statistics : Statistics
        Counts and times, with definitions.
    logprobs : Tensor
        ``[B, N]`` float32, of the new tokens, as in `Burst`: under the law that they were sampled
        from, or of the target's raw rows under ``raw_logprobs=True``. 0 after the end, so that a
        row's sum is the log-probability of its text.
    """

    logprobs: Tensor

    def __new__(cls, sequences: Tensor, statistics: Statistics, logprobs: Tensor) -> Generated:
        """Make the pair, and keep the log-probabilities beside it."""
        made = super().__new__(cls, sequences, statistics)
        made.logprobs = logprobs
        return made

    def __getnewargs__(self) -> tuple[Tensor, Statistics, Tensor]:
        """Give what copies and pickles are made of."""
        return self.sequences, self.statistics, self.logprobs


class GenerationError(RuntimeError):
    """Verification reported a request that cannot go on.

    Attributes
    ----------
    requests : list of int
        Which requests.
    status : list of int
        The status bits of each of them.
    sequences : Tensor
        As in `Generated`: what every request had when the error came.
    statistics : Statistics
        As in `Generated`.
    """

    def __init__(
        self,
        message: str,
        requests: list[int],
        status: list[int],
        sequences: Tensor,
        statistics: Statistics,
    ) -> None:
        super().__init__(message)
        self.requests = requests
        self.status = status
        self.sequences = sequences
        self.statistics = statistics


class ChainGeneration:
    """The state of one call of `generate`; `step` is the algorithm.

    Rows of the batch are the running requests: a request that ends leaves the batch.
    """

    trees = False  # whether a round's draft is a tree

    def __init__(
        self,
        target: Any,
        drafter: Any,
        policy: GammaPolicy,
        settings: Settings,
    ) -> None:
        self.target_model = target
        self.drafter: Any = drafter  # a `Drafter`, in a chain
        self.reads_features = reads_features(drafter)
        self.policy = policy
        self.settings = settings
        rule = RULES[settings.rule]
        # At temperature 0 a lossless rule is the same as "greedy", which reads no draft law.
        self.rule = RULES["greedy"] if settings.laws.greedy and rule.lossless else rule
        greedy_rule = self.rule.name == "greedy"
        self.laws = settings.laws.of_greedy_target() if greedy_rule else settings.laws
        self.seeds = settings.seeds
        self.alpha = AlphaSamples(self.rule, policy, measured=settings.measure_alpha)
        self.processors: Processors | None = None  # they are shown texts, which come later
        self.grammars: GrammarMasks | None = None
        self.misled: dict[int, int] = {}  # requests to which a token came that no grammar allows
        self.stops = settings.stops
        self.limits = limits = settings.limits
        self.new: list[list[int]] = [[] for _ in limits]
        self.logprobs: list[list[float]] = [[] for _ in limits]  # of the same tokens
        self.running = [b for b, limit in enumerate(limits) if limit > 0]
        self.ended: set[int] = set()  # requests that met a stop
        self.texts: list[list[int]] = [[] for _ in limits]  # the prompts, if someone asks for them
        self.width = getattr(getattr(target, "config", None), "vocab_size", None)
        self.statistics = Statistics(policy.limit, new_tokens=[0] * len(limits))
        self.clock = Clock(settings.prompts.device)

    def start(self) -> None:
        """Take the prompts.

        The first round's calls run them, with what they draft and verify: so no call is spent on
        prompts alone, but by a drafter that reads the target's states of them.
        """
        from .hosting import host_model

        if not self.running:
            return
        self.clock.start("prefill")
        settings = self.settings
        ids, mask = arguments.trimmed(settings.prompts.long(), settings.attention_mask)
        device = ids.device
        lengths = [ids.shape[1]] * len(self.limits) if mask is None else mask.sum(1).tolist()
        self.positions = torch.tensor(lengths, device=device)  # [B], where the next token goes
        self.ends = self.positions + torch.tensor(self.limits, device=device)
        self._show_texts()
        if settings.matchers is not None:
            self.grammars = GrammarMasks(
                settings.matchers, self.new, self.stops.tokens, self.width, device
            )
        room = self._room(ids.shape[1])
        self.target = host_model(
            self.target_model,
            self.ends,
            room=room,
            static=settings.static_cache,
            uneven=mask is not None or self.policy.limit > 0,
            trees=self.trees,
            verifies=self.policy.limit > 0,
            features=self.reads_features,
        )
        self.target.prefill(
            ids[:, :-1],
            None if mask is None else mask[:, :-1],
            rides=not self.reads_features,
        )
        self.drafter.start(
            Requests(
                ids,
                mask,
                self.ends,
                room,
                self.seeds,
                self.laws.draft,
                self.laws.draft_greedy or (self.rule.ignores_sampling and not self.laws.own),
                self.alpha.needs_law,
                coupled=self.rule.races,
                static_cache=settings.static_cache,
                process=self._process_draft if self.looks_at_drafts else None,
                tree=settings.tree,
                mask_nodes=self._mask_nodes if self.grammars is not None else None,
                features=self.target.features,
            )
        )
        self.policy.start(len(self.limits))
        self.last = ids[:, -1:]  # [B, 1], each row's last token, which no cache holds
        if len(self.running) < len(self.limits):
            self._keep(self.running)
        self.clock.start("rest")

    def _show_texts(self) -> None:
        """Bring the prompts to the host, and to whatever looks at texts, if something does."""
        settings = self.settings
        if not (settings.processors or self.stops.criteria):
            return
        whole = settings.padded_texts
        self.texts = on_the_host(settings.prompts, None if whole else settings.attention_mask)
        texts = Texts(self.texts, self.new, settings.pad, settings.prompts.device)
        if settings.processors:
            self.processors = Processors(
                settings.processors, texts, whole_batch=whole, ends=self.stops.tokens
            )
        self.stops.start(texts, whole_batch=whole)

    def _room(self, prompt: int) -> int:
        """Return how many slots the caches allocate at first."""
        new = max(self.limits) + self.policy.limit
        if self.settings.static_cache:
            return (prompt + new + 1) * 4 // 3  # a quarter of the slots may be holes
        return prompt + min(new, ROOM)

    def step(self) -> list[Burst]:
        """One round: every running request gains between 1 and gamma + 1 tokens."""
        most = self._allowed()
        lengths = most.lengths
        ragged = min(lengths) < max(lengths)
        # Copied while the device is idle: later, the copy would wait for both models.
        cut = torch.tensor(lengths, device=self.positions.device) if ragged else None

        self.clock.start("draft")
        draft = draft_allowed(self.policy, self.drafter, most, self.positions, self.policy.go_on)
        gamma = draft.tokens.shape[1]  # it may have had fewer to propose
        # Read before the target runs: later, the host would wait for that as well.
        drafted_ids = draft.tokens.tolist() if self.looks_at_drafts else []

        self.clock.start("target")
        logits = self.target.forward(torch.cat([self.last, draft.tokens], 1))  # [B, gamma + 1, V]

        self.clock.start("rest")
        rows = draft.logits if self.rule.reads_draft_law else None
        logits, masks = self._process(logits, draft, drafted_ids)

        self.clock.start("verify")
        verified = ops.verify(
            logits,
            draft.tokens,
            rows,
            allowed_mask=masks,
            draft_kinds=draft.kinds if self.rule.reads_draft_law else None,
            draft_token_ids=None if rows is None else draft.token_ids,
            draft_lengths=None if cut is None else cut.clamp(max=gamma),
            seeds=self.seeds,
            positions=self.positions,
            rule=self.rule.name,
            **self.laws.compared(rows),
            **self.settings.rule_options,
        )

        self.clock.start("rest")
        overlaps = self.alpha.overlaps(logits, draft, self.laws.compared(draft.logits))
        outcomes = [
            ChainOutcome(*row)
            for row in Transfer.pack(
                verified.tokens,
                draft.tokens,
                verified.logprobs,
                verified.num_accepted,
                verified.status,
                *([] if overlaps is None else [overlaps]),
            ).unpack()  # the round's one host synchronisation
        ]
        self.statistics.rounds += 1
        drafted = [
            _drafted(outcome.drafted[:length])
            for outcome, length in zip(outcomes, lengths, strict=True)
        ]
        bursts = [
            self._append(i, outcome, n, verified.accept_probs)
            for i, (outcome, n) in enumerate(zip(outcomes, drafted, strict=True))
        ]
        accepted = Counts([outcome.accepted for outcome in outcomes], verified.num_accepted)
        self.alpha.end_round()
        self.policy.commit(drafted, accepted.host)
        self._raise_if_fatal([outcome.status for outcome in outcomes])
        self._commit(verified.tokens, accepted, bursts)
        return bursts

    def _allowed(self) -> Allowed:
        """Return how many draft tokens each request may take; the final token counts, too."""
        rooms = [self.limits[b] - len(self.new[b]) - 1 for b in self.running]
        return allowed(self.policy, self.drafter, rooms)

    @property
    def looks_at_drafts(self) -> bool:
        """Whether the host is to see draft tokens before they are verified."""
        return self.processors is not None or self.grammars is not None

    def _process(
        self, logits: Tensor, draft: Draft, drafted: list[list[int]]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the logits processors on the target's rows, ``[B, gamma + 1, V]``, and mask them.

        The masks are the operator's to apply, which would cut the draft's law as well: where that
        is read, and was not drawn from under them, the target's rows alone are cut here.
        """
        size, drafted = logits.shape[2], self._without_ends(drafted)
        if self.processors is not None:
            shown = drafted if self.grammars is None else self.grammars.legal(self.running, drafted)
            logits = self.processors.chain(self.running, shown, logits)
        if self.grammars is None:
            return logits, None
        masks = self.grammars.chain(self.running, drafted, logits.shape[1], size)
        is_law_read = self.rule.reads_draft_law and draft.logits is not None
        if self.alpha.measures or (is_law_read and not draft.masked):
            return hidden(logits, masks), None
        return logits, masks

    def _without_ends(self, drafted: list[list[int]]) -> list[list[int]]:
        """Return drafts with -1 for tokens that end a request, so that nothing goes on there.

        Nothing behind them is kept, and plain decoding asks for no row there: rows are left as they
        are, under grammars and processors alike.
        """
        ends = self.stops.tokens
        if not ends:
            return drafted
        return [[-1 if token in ends else token for token in row] for row in drafted]

    def _process_draft(
        self, logits: Tensor, drafted: Tensor, emitted: Sequence[Sequence[int]] | None = None
    ) -> Tensor:
        """Run processors on a drafter's rows, if those are over the target's tokens, and mask them.

        See `Process`.
        """
        rows = drafted.tolist()
        if emitted is not None:
            rows = [[*before, *row] for before, row in zip(emitted, rows, strict=True)]
        rows = self._without_ends(rows)
        if self.processors is not None and logits.shape[-1] == self.width:
            shown = rows if self.grammars is None else self.grammars.legal(self.running, rows)
            logits = self.processors.chain(self.running, shown, logits, of_draft=True)
        if self.grammars is None:
            return logits
        masks = self.grammars.chain(self.running, rows, logits.shape[1], logits.shape[2])
        return hidden(logits, masks)

    def _mask_nodes(self, logits: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
        """Mask a drafter's rows of the last m of a tree's nodes: see `MaskNodes`."""
        assert self.grammars is not None, "drafters have it where there are grammars"
        nodes = self._without_ends(tokens.tolist())
        masks = self.grammars.tree(self.running, nodes, parents.tolist(), logits.shape[2])
        return hidden(logits, masks[:, -logits.shape[1] :])

    def _gain(self, b: int, outcome: ChainOutcome | TreeOutcome) -> list[int]:
        """Add to a request what a round emitted, up to its end, and return it."""
        tokens = self._emitted(b, outcome)
        self.new[b] += tokens
        self.logprobs[b] += outcome.logprobs[: len(tokens)]
        if self.grammars is not None:
            wrong = self.grammars.advance(b)
            if wrong is not None:
                self.misled[b] = wrong
        return tokens

    def _emitted(self, b: int, outcome: ChainOutcome | TreeOutcome) -> list[int]:
        """Return what a round emitted, up to the request's end; without a law, no final token."""
        final = 0 if outcome.status & STATUS_NO_TARGET_LAW else 1
        tokens = outcome.tokens[: outcome.accepted + final]
        tokens = tokens[: self.limits[b] - len(self.new[b])]
        end = self.stops.kept(self.texts[b], self.new[b], tokens, b)
        if end is None:
            return tokens
        self.ended.add(b)
        return tokens[:end]

    def _append(self, i: int, outcome: ChainOutcome, length: int, accept_probs: Tensor) -> Burst:
        """Add to running request ``i`` what the round emitted, up to its end; count it."""
        b, accepted = self.running[i], outcome.accepted
        # The draft may have ended where its law failed: what stands there then replaces nothing.
        # Columns that verification did not test hold NaN (a second synchronisation, in this case).
        rejected = accepted < length and not (
            outcome.status & DRAFT_ENDED_EARLY and math.isnan(accept_probs[i, accepted].item())
        )
        tokens = self._gain(b, outcome)
        rejected = rejected and len(tokens) == accepted + 1
        accepted = min(accepted, len(tokens))
        self.statistics.record(
            b, drafted=length, accepted=accepted, emitted=len(tokens), rejected=rejected
        )
        self.statistics.record_alpha(self.alpha.add(accepted, rejected, outcome.overlaps))
        return Burst(
            b,
            tokens,
            accepted,
            outcome.drafted[accepted] if rejected else None,
            outcome.logprobs[: len(tokens)],
        )

    def _commit(self, tokens: Tensor, accepted: Counts, bursts: list[Burst]) -> None:
        """Drop the requests that ended; roll both caches back to what the others accepted."""
        going = self._going(bursts)
        if not going:
            self.running = []
            return
        features = self.target.features  # [B, gamma + 1, D]
        if len(going) < len(bursts):
            kept = self._keep(going)
            tokens, accepted = tokens[kept], accepted.select(kept, going)
            features = None if features is None else features[kept]
            self.running = [self.running[i] for i in going]
        if features is not None:
            self.drafter.take_features(features, tokens, accepted + 1)
        self.target.rollback(tokens.shape[1] - 1 - accepted)
        self.drafter.commit(tokens, accepted)
        self.last = last_tokens(tokens, accepted, 1)
        self.positions = self.positions + accepted.device + 1

    def _going(self, bursts: list[Burst]) -> list[int]:
        """Which of the running requests go on."""
        return [
            i
            for i, burst in enumerate(bursts)
            if burst.request not in self.ended
            and len(self.new[burst.request]) < self.limits[burst.request]
        ]

    def _keep(self, indices: list[int]) -> Tensor:
        """Keep only these rows of the batch."""
        rows = torch.tensor(indices, device=self.last.device)
        self.target.select(rows, indices)
        self.drafter.select(rows, indices)
        self.policy.select(indices)
        self.last, self.positions, self.ends = (
            self.last[rows],
            self.positions[rows],
            self.ends[rows],
        )
        self.seeds = self.seeds[rows]
        self.laws = self.laws.select(rows)
        return rows

    def _raise_if_fatal(self, status: list[int]) -> None:
        failed = [
            (b, bits)
            for b, bits in zip(self.running, status, strict=True)
            if bits & self._fatal(b) or b in self.misled
        ]
        if not failed:
            return
        b, bits = failed[0]
        reasons = " and ".join(self._reasons(b, bits))
        others = f" ({len(failed) - 1} more requests failed)" if len(failed) > 1 else ""
        sequences, statistics = self.result()
        raise GenerationError(
            f"generate: request {b}: {reasons} (status {bits}) after {len(self.new[b])} new "
            f"tokens{others}; what was generated is in this error's .sequences",
            [b for b, _ in failed],
            [bits for _, bits in failed],
            sequences,
            statistics,
        )

    def _fatal(self, b: int) -> int:
        """Return the status bits with which a request cannot go on.

        A row without a law that lies behind a request's end is nothing that it needed.
        """
        is_over = b in self.ended or len(self.new[b]) >= self.limits[b]
        return sum(FATAL) & ~(STATUS_NO_TARGET_LAW if is_over else 0)

    def _reasons(self, b: int, status: int) -> list[str]:
        """Say why a request cannot go on."""
        reasons = [text for bit, text in FATAL.items() if status & bit]
        if b in self.misled:
            return [
                f'the rule "{self.rule.name}" emitted token {self.misled[b]} against the grammar'
            ]
        if self.grammars is None or not status & STATUS_NO_TARGET_LAW:
            return reasons
        if self.grammars.allows_nothing(b):
            return ["the grammar allows no token of the target's"]
        return [*reasons, "the grammar allows some tokens, so that nothing else hides them"]

    def finish(self) -> None:
        """Leave processors and criteria that keep state as plain decoding would leave them."""
        if self.processors is not None:
            self.processors.finish()
        self.stops.finish()

    def result(self) -> Generated:
        """Return what there is by now."""
        self.statistics.seconds = self.clock.stop()
        self.statistics.draft_calls = self.drafter.calls
        width = max(map(len, self.new), default=0)
        prompts = self.settings.prompts

        def filled(rows: Sequence[Sequence[float]], pad: float, dtype: torch.dtype) -> Tensor:
            whole = [[*row, *[pad] * (width - len(row))] for row in rows]
            return torch.tensor(whole, dtype=dtype, device=prompts.device).reshape(len(rows), width)

        with torch.inference_mode(False):
            new = filled(self.new, self.settings.pad, prompts.dtype)
            logprobs = filled(self.logprobs, 0.0, torch.float32)
            return Generated(torch.cat([prompts, new], 1), self.statistics, logprobs)


def _drafted(tokens: list[int]) -> int:
    """Count the tokens before the draft's end."""
    return next((n for n, token in enumerate(tokens) if token < 0), len(tokens))
