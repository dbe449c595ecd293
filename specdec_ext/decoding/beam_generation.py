"""Speculative beam search: the draft searches ahead, one target call decides several levels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..contract import (
    RULES,
    STATUS_INVALID_TREE,
    STATUS_NO_TARGET_LAW,
    STATUS_PARAMETER_OUT_OF_RANGE,
)
from . import arguments
from .alpha import AlphaSamples
from .beam_drafter import BeamDrafter, draft_model
from .beam_trees import BeamSlots, BeamTree, LiveBeams
from .beams import BeamOptions, Level, Search
from .chain_generation import FATAL, ROOM, GeneratedPair, GenerationError
from .checks import flag
from .drafters.hosted import reduced_vocabulary
from .hosting import HostedModel, host_model
from .options import Options
from .processors import Processors
from .stats import Clock, Statistics
from .texts import Texts, on_the_host
from .transfer import Transfer

__all__ = ["BeamGeneration", "GeneratedBeams"]

#: Why a level is not decided though there are beams.
_UNDECIDED = STATUS_NO_TARGET_LAW | STATUS_INVALID_TREE | STATUS_PARAMETER_OUT_OF_RANGE


class GeneratedBeams(GeneratedPair):
    """Result of `generate` with beams: that of `Generated`, with a score for each sequence.

    Attributes
    ----------
    sequences : Tensor
        ``[B R, P + N]``, the R best hypotheses of each request, best first.
    statistics : Statistics
        As ever; a *level* of the search takes the place of a token, so that
        ``tokens_per_target_call`` are levels a target call.
    scores : Tensor
        ``[B R]`` float32: the sum of the log-probabilities of the new tokens, divided by their
        number to the power of ``length_penalty``. -1e9, as in transformers, where a request has
        fewer than R hypotheses; its row is then the prompt alone.
    """

    scores: Tensor

    def __new__(cls, sequences: Tensor, statistics: Statistics, scores: Tensor) -> GeneratedBeams:
        """Put all three together."""
        result = super().__new__(cls, sequences, statistics)
        result.scores = scores
        return result

    def __getnewargs__(self) -> tuple[Tensor, Statistics, Tensor]:
        """Give what copies and pickles are made of."""
        return self.sequences, self.statistics, self.scores


class BeamGeneration:
    """The state of one beam search; `step` is the algorithm.

    Rows of the batch are the running requests, each with all of its beams (see `beam_trees`).

    Parameters
    ----------
    given : Options
        The arguments of `generate`.
    options : BeamOptions
        Those about beams, checked.
    """

    def __init__(self, given: Options, options: BeamOptions) -> None:
        ids, batch = given.input_ids, given.input_ids.shape[0]
        self.options = options
        self.target_model = given.target
        self.draft_model = None if given.draft is None else draft_model(given.draft)
        self.prompts, self.attention_mask = ids, given.attention_mask
        self.limits = arguments.new_token_limits(given.max_new_tokens, batch)
        self.ends = arguments.stop_tokens(given.target, given.eos_token_id)
        self.pad = arguments.pad_token(given.target, given.pad_token_id, self.ends, ids.dtype)
        self.searches = [Search(options, limit) for limit in self.limits]
        self.running = [b for b, search in enumerate(self.searches) if not search.over]
        self.policy = options.policy
        # Levels are decided or not, one by one, as "greedy" accepts tokens.
        self.alpha = AlphaSamples(RULES["greedy"], self.policy, measured=False)
        self.statistics = Statistics(self.policy.limit, new_tokens=[0] * batch)
        self.clock = Clock(ids.device)
        self.eos = torch.tensor(self.ends, dtype=torch.int64, device=ids.device)
        self.processors: Processors | None = None
        self._show_texts(
            arguments.callables("logits_processor", given.logits_processor),
            padded=flag("generate: padded_texts", given.padded_texts),
        )
        self.drafter: BeamDrafter | None = None

    def _show_texts(self, processors: list[Any], *, padded: bool) -> None:
        """Bring the prompts to the host, if processors are to see texts.

        A text for each beam, those of a request together: so transformers has its batches, and so
        processors that know rows by their numbers want it.
        """
        if not processors:
            return
        width = self.options.width
        prompts = on_the_host(self.prompts, None if padded else self.attention_mask)
        several = [prompt for prompt in prompts for _ in range(width)]
        self.live_texts: list[list[int]] = [[] for _ in several]
        self.texts = Texts(several, self.live_texts, self.pad, self.prompts.device)
        self.processors = Processors(processors, self.texts, whole_batch=padded)

    def run(self) -> GeneratedBeams:
        """Search to the end."""
        with torch.inference_mode():
            self.start()
            while self.running:
                self.step()
        return self.result()

    def start(self) -> None:
        """Run the prompts but their last tokens through both models."""
        if not self.running:
            return
        self.clock.start("prefill")
        ids, mask = arguments.trimmed(self.prompts.long(), self.attention_mask)
        batch, width, device = len(ids), self.options.width, ids.device
        self.target = BeamSlots(self._host(self.target_model, ids, mask), batch, width, device)
        if self.draft_model is not None and self.policy.limit > 0:
            self.drafter = BeamDrafter(
                self._host(self.draft_model, ids, mask),
                batch,
                width,
                device,
                draft_width=self.options.draft_width,
                ends=[token for token in self.ends if token >= 0],
                token_ids=reduced_vocabulary(self.draft_model),
            )
        self.policy.start(batch)
        scores = torch.full((batch, width), -torch.inf, device=device)
        scores[:, 0] = 0.0  # a search begins with one beam
        levels = torch.zeros(batch, dtype=torch.int64, device=device)
        self.live = LiveBeams(ids[:, -1:].expand(-1, width), scores, levels)
        if len(self.running) < batch:
            self._keep(self.running)
        self.clock.start("rest")

    def _host(self, model: Any, ids: Tensor, mask: Tensor | None) -> HostedModel:
        """Begin with a model: run the prompts but their last tokens."""
        batch, prompt = ids.shape
        lengths = torch.full((batch,), prompt, device=ids.device) if mask is None else mask.sum(1)
        hosted = host_model(
            model,
            lengths + torch.tensor(self.limits, device=ids.device),
            room=prompt + min(max(self.limits) + self._most_nodes(), ROOM),
            trees=True,
            verifies=True,
        )
        hosted.prefill(ids[:, :-1], None if mask is None else mask[:, :-1])
        return hosted

    def _most_nodes(self) -> int:
        return 2 * self.options.width + self.policy.limit * self.options.draft_width

    def step(self) -> None:
        """One round: every running request's search goes on by 1 to gamma + 1 levels."""
        self.clock.start("draft")
        tree = self._draft()

        self.clock.start("target")
        logits = self.target.run(tree, self.live)

        self.clock.start("rest")
        rows = self._process(tree, logits)

        self.clock.start("verify")
        found = ops.beam_verify(
            rows,
            self._scores(rows),
            tree.tokens,
            tree.parents,
            len(tree.sizes),
            eos_token_ids=self.eos,
            log_probs=self.processors is not None,
            # What a processor makes of a row nobody has seen may be above 0: see `beam_verify`.
            rule="bound" if self.processors is None else "subset",
        )

        self.clock.start("rest")
        outcomes = Transfer.pack(
            found.num_levels, found.status, *(part.flatten(1) for part in _of_levels(found))
        ).unpack()
        self.statistics.rounds += 1
        self._raise_if_fatal([(levels, status) for levels, status, *_ in outcomes])
        drafted = len(tree.sizes)
        accepted = [
            self._take(b, self._levels(parts)[:levels], drafted)
            for b, (levels, _, *parts) in zip(self.running, outcomes, strict=True)
        ]
        self.alpha.end_round()
        self.policy.commit([drafted] * len(accepted), accepted)
        self._commit(tree, found, [levels for levels, *_ in outcomes])

    def _draft(self) -> BeamTree:
        """Search ahead, as far as the policy lets the request that may go furthest."""
        left = max(self.limits[b] - self.searches[b].levels for b in self.running)
        # The level behind the tree counts, too.
        gamma = min(max(self.policy.lengths()), left - 1)
        if self.drafter is None or gamma == 0:
            return BeamTree.of_beams(self.live)
        return self.drafter.propose(self.live, gamma, self.policy.go_on)

    def _process(self, tree: BeamTree, logits: Tensor) -> Tensor:
        """Run the logits processors on log-probabilities, as transformers does in beam search."""
        if self.processors is None:
            return logits
        width = self.options.width
        for b in self.running:
            for j, text in enumerate(self.searches[b].live):
                self.live_texts[b * width + j] = text
        self.texts.forget()
        return self.processors.beams(
            self.running,
            (self.live.scores > -torch.inf).tolist(),
            tree.tokens.tolist(),
            tree.parents.tolist(),
            torch.log_softmax(logits.float(), -1),
        )

    def _scores(self, rows: Tensor) -> Tensor:
        """Return the live beams' scores: none for one that processors leave no token to go on by.

        So it drops out, as in transformers, where all its offers have a score of -inf. To the
        operator a row of nothing but -inf is none.
        """
        if self.processors is None:
            return self.live.scores
        dead = rows[:, : self.options.width].amax(-1) == -torch.inf
        return self.live.scores.masked_fill(dead, -torch.inf)

    def _levels(self, parts: list[list[Any]]) -> list[Level]:
        """Divide what the operator gave for a request into levels."""
        width = self.options.width
        return [
            Level(*(part[start : start + width] for part in parts))
            for start in range(0, len(parts[0]), width)
        ]

    def _take(self, b: int, levels: list[Level], drafted: int) -> int:
        """Let request ``b`` go on by decided levels, up to the end of its search; count them.

        Returns how many of the drafted ones were decided.
        """
        search, before = self.searches[b], self.searches[b].levels
        for level in levels:
            if search.over:
                break
            search.take(level)
        search.over |= not levels  # no beam can go on
        taken = search.levels - before
        accepted = max(min(taken - 1, drafted), 0)
        rejected = not search.over and taken <= drafted
        self.statistics.record(
            b, drafted=drafted, accepted=accepted, emitted=taken, rejected=rejected
        )
        self.alpha.add(accepted, rejected)
        return accepted

    def _commit(self, tree: BeamTree, found: ops.BeamVerifyResult, levels: list[int]) -> None:
        """Drop the requests that ended; of both caches keep what the live beams need."""
        going = [i for i, b in enumerate(self.running) if not self.searches[b].over]
        if not going:
            self.running = []
            return
        if len(going) < len(self.running):
            rows = self._keep(going)
            tree, found = tree.select(rows), ops.BeamVerifyResult(*(part[rows] for part in found))
            self.running = [self.running[i] for i in going]
            levels = [levels[i] for i in going]
        last = found.num_levels.long() - 1
        rows = torch.arange(len(last), device=last.device)
        tokens, scores = found.tokens[rows, last], found.scores[rows, last]
        places = found.parents[rows, last].clamp(min=0)
        above = found.nodes[rows, (last - 1).clamp(min=0)].gather(1, places)
        nodes = places.where(last[:, None] == 0, above).clamp(min=0)
        alive = scores > -torch.inf
        self.target.keep(nodes, alive)
        if self.drafter is not None:
            deepest = max(levels) > len(tree.sizes)
            self.drafter.note(tree, self.live, nodes, alive, deepest=deepest)
        self.live = LiveBeams(tokens.clamp(min=0), scores, self.live.levels + last + 1)

    def _keep(self, indices: list[int]) -> Tensor:
        """Keep only these rows of the batch."""
        rows = torch.tensor(indices, device=self.live.tokens.device)
        self.target.select(rows, indices)
        if self.drafter is not None:
            self.drafter.select(rows, indices)
        self.policy.select(indices)
        self.live = self.live.select(rows)
        return rows

    def _raise_if_fatal(self, outcomes: list[tuple[int, int]]) -> None:
        """Refuse to go on where not one level could be decided.

        But a search whose beams all dropped out is over, if some hypothesis has ended.
        """
        failed = [
            (b, status)
            for b, (levels, status) in zip(self.running, outcomes, strict=True)
            if (levels == 0 and (status & _UNDECIDED or not self.searches[b].kept))
            or status & STATUS_INVALID_TREE
        ]
        if not failed:
            return
        b, status = failed[0]
        reason = FATAL.get(status & (STATUS_NO_TARGET_LAW | STATUS_INVALID_TREE), "no beam is left")
        result = self.result()
        raise GenerationError(
            f"generate: request {b}: {reason} (status {status}) after {self.searches[b].levels} "
            f"levels of the beam search; what has ended is in this error's .sequences",
            [b for b, _ in failed],
            [bits for _, bits in failed],
            result.sequences,
            result.statistics,
        )

    def result(self) -> GeneratedBeams:
        """Return what has ended by now."""
        self.statistics.seconds = self.clock.stop()
        if self.drafter is not None:
            self.statistics.draft_calls = self.drafter.hosted.calls
        best = [hypothesis for search in self.searches for hypothesis in search.results()]
        width = max((len(hypothesis.tokens) for hypothesis in best), default=0)
        new = [h.tokens + [self.pad] * (width - len(h.tokens)) for h in best]
        like = self.prompts.new_tensor
        prompts = self.prompts.repeat_interleave(self.options.returned, 0)
        return GeneratedBeams(
            torch.cat([prompts, like(new).reshape(len(best), width)], 1),
            self.statistics,
            like([hypothesis.score for hypothesis in best], dtype=torch.float32),
        )


def _of_levels(found: ops.BeamVerifyResult) -> tuple[Tensor, ...]:
    """Return the parts of `Level`, ``[B, G+1, W]`` each."""
    return (
        found.tokens,
        found.parents,
        found.scores,
        found.finished_tokens,
        found.finished_parents,
        found.finished_scores,
    )
