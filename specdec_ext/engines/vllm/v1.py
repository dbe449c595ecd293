"""The V1 model runner (CPUs, and GPUs without Triton): its rejection sampler and its drafting.

Of vLLM stay what comes before a law (penalties, bad words, allowed ids, min_tokens, grammar masks)
and what comes after the tokens. Temperature, filters, the accept tests and all random numbers are
`specdec_ext.verify`'s; the draft model's tokens are drawn by `specdec_ext.sample`, and what is kept
of its laws are the logits. Nothing here imports vLLM before `install`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._ops import ops
from .layout import Kept, Layout, Layouts
from .requests import Facts, Requests
from .settings import Settings

__all__ = ["DraftRows", "Draws", "Outstanding", "Step", "install", "sampler_class"]

_logger = logging.getLogger("vllm.specdec_ext")
_warned: list[int] = []

#: Instead of a row of the drafter's laws: the tokens were chosen, not drawn; or they were drawn and
#: their laws are gone.
CHOSEN, LOST = -1, -2


class DraftRows(NamedTuple):
    """Where the laws are that draft tokens were drawn from.

    Attributes
    ----------
    laws : Tensor
        ``[R, Vd]`` logits before temperature, or probabilities.
    rows : Tensor
        ``[B, G]`` int64, the row of each draft token.
    are_logits : bool
        Which of the two.
    """

    laws: Tensor
    rows: Tensor
    are_logits: bool


class Step(NamedTuple):
    """What `sampler_class`'s sampler needs for one step beside what vLLM passes to it.

    Attributes
    ----------
    facts : Facts
        Seeds, min-p and grammars of the batch.
    positions : Tensor
        ``[B]`` int64, where each request's first draft token goes in its text.
    draft : DraftRows or None
        None where all draft tokens were chosen.
    kinds : Tensor or None
        ``[B, G]`` int8 as in `specdec_ext.verify`, where some were chosen.
    lengths : Tensor or None
        ``[B]`` int64, where drafts have to end early.
    """

    facts: Facts
    positions: Tensor
    draft: DraftRows | None = None
    kinds: Tensor | None = None
    lengths: Tensor | None = None


# -------------------------------------------------------------------------------------------------
# Drafting
# -------------------------------------------------------------------------------------------------


class Draws:
    """Draws one round's tokens of a draft model, by `specdec_ext.sample`.

    The target's temperature and filters apply to the draft as well. Where a grammar binds a text,
    vLLM's scheduler cuts the draft before the first token that the grammar forbids; a token that
    was drawn must not be dropped for its value, so that there the likeliest token is taken (but not
    for races, whose outcome no draft can change).
    """

    def __init__(self, settings: Settings, facts: Facts, positions: Tensor) -> None:
        self._domain = settings.draft_domain
        self._facts = facts
        self._bound = None if settings.traits.races else facts.bound
        self._positions = positions
        self._index = 0

    def draw(self, logits: Tensor, sampling: Any) -> Tensor:
        """Draw the next token of each request, or the next K where K rows of each come at once.

        Parameters
        ----------
        logits : Tensor
            ``[B * K, V]``, the rows of a request one after the other.
        sampling : SamplingMetadata
            vLLM's.

        Returns
        -------
        Tensor
            ``[B * K]`` int64.
        """
        seeds = self._facts.seeds
        per_request, left = divmod(len(logits), max(len(seeds), 1))
        if left:
            raise ValueError(
                f"logits must have [B * K, V] rows for B = {len(seeds)} requests, "
                f"got {list(logits.shape)}"
            )
        temperature = sampling.temperature
        if self._bound is not None:
            temperature = torch.where(self._bound, 0.0, temperature)
        drawn = []
        for k in range(per_request):
            tokens, _ = ops.sample(
                logits[k::per_request],
                seeds=seeds,
                positions=self._positions,
                draft_index=self._index,
                domain=self._domain,
                temperature=temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=self._facts.min_p,
            )
            # A row of NaN gives -1, which is no token; verify ends the draft at such a row.
            drawn.append(tokens.clamp_(min=0))
            self._index += 1
        return drawn[0] if per_request == 1 else torch.stack(drawn, 1).flatten()


class Outstanding:
    """Knows whose draft tokens were drawn, until they are verified.

    vLLM keeps the laws of its drafter's last round. A request that was left out of the step in
    between still has draft tokens of the round before, whose laws are gone: they can neither be
    verified as drawn nor as chosen.
    """

    def __init__(self) -> None:
        self._drawn: set[str] = set()

    def rows(
        self, last: Sequence[str] | None, batch: Sequence[str], running: Collection[str]
    ) -> list[int]:
        """Give the row of each request in the last round's laws, `CHOSEN` or `LOST`.

        Parameters
        ----------
        last : sequence of str, optional
            The requests of the last round, in the order of its laws; None where there are none.
        batch : sequence of str
            Those whose draft tokens are verified now.
        running : collection of str
            Those that have not ended.
        """
        if last == batch and not self._drawn:  # nobody came or went
            return list(range(len(batch)))
        row_of = {request: row for row, request in enumerate(last or ())}
        if len(self._drawn) > len(running):
            self._drawn.intersection_update(running)
        rows = [row_of.get(r, LOST if r in self._drawn else CHOSEN) for r in batch]
        self._drawn.update(row_of)
        self._drawn.difference_update(batch)
        return rows


# -------------------------------------------------------------------------------------------------
# Verification
# -------------------------------------------------------------------------------------------------


class State:
    """What a rejection sampler keeps from step to step; no attributes of a module, which are slow.

    Attributes
    ----------
    step : Step or None
        Set before each call but the profiling run's.
    requests : Requests or None
        Made with the first step.
    layouts, tables, outstanding
        What was built for batches before, and whose draft tokens were drawn.
    draws_logits : bool
        Whether the last round of drafts was drawn by `Draws`.
    """

    def __init__(self) -> None:
        self.step: Step | None = None
        self.requests: Requests | None = None
        self.layouts = Layouts()
        self.tables: Kept[DraftTable] = Kept()
        self.outstanding = Outstanding()
        self.draws_logits = False


def sampler_class(base: Any, output_class: Any, settings: Settings) -> Any:
    """Make a subclass of vLLM's rejection sampler that verifies by `specdec_ext.verify`.

    Parameters
    ----------
    base : type
        ``vllm.v1.sample.rejection_sampler.RejectionSampler``.
    output_class : type
        ``vllm.v1.outputs.SamplerOutput``.
    settings : Settings
        The rule.
    """

    class SpecdecRejectionSampler(base):  # type: ignore[misc]
        """vLLM's rejection sampler with one call in place of what it does to the logits."""

        def __init__(self, sampler: Any, spec_config: Any = None, device: Any = None) -> None:
            super().__init__(sampler, spec_config, device)
            self.specdec = State()

        def forward(
            self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any
        ) -> Any:
            if self.synthetic_mode:  # it is to accept at a rate that was set, whatever the laws are
                return super().forward(metadata, draft_probs, logits, sampling_metadata)
            layout = self.specdec.layouts.of(metadata.num_draft_tokens, logits.device)
            step, self.specdec.step = self.specdec.step, None
            if step is None:
                step = _profiling_step(layout, draft_probs)
            source = self._specdec_processed(metadata, logits, sampling_metadata)
            filters = _filters(sampling_metadata, step.facts, layout)
            tokens = self._specdec_verify(metadata, layout, step, source, filters)
            logprobs = None
            if sampling_metadata.max_num_logprobs is not None:
                if self.is_processed_logprobs_mode:
                    raw = sampling_metadata.all_greedy
                    scored = source if raw else _under_filters(source, layout, filters)
                else:
                    scored = logits
                logprobs = self._specdec_logprobs(
                    scored, layout, tokens, sampling_metadata.max_num_logprobs
                )
            return output_class(sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=logprobs)

        def _specdec_verify(
            self,
            metadata: Any,
            layout: Layout,
            step: Step,
            source: Tensor,
            filters: dict[str, Tensor | None],
        ) -> Tensor:
            """Give the tokens to emit, ``[B, G+1]`` int64, -1 behind the end."""
            drafted = metadata.draft_token_ids
            # Nothing to index where no request has a draft.
            tokens = drafted[layout.draft_slots] if len(drafted) else layout.draft_slots
            draft = {}
            if step.draft is not None:
                name = "draft_logits" if step.draft.are_logits else "draft_probs"
                draft = {name: step.draft.laws, "draft_rows": step.draft.rows}
            emitted, _, _, _, status = ops.verify(
                source,
                tokens,
                **draft,
                target_rows=layout.target_rows,
                draft_kinds=step.kinds,
                draft_lengths=layout.lengths if step.lengths is None else step.lengths,
                seeds=step.facts.seeds,
                positions=step.positions,
                rule=settings.rule,
                **filters,
                **settings.numbers,
            )
            _report(status)
            result: Tensor = emitted
            return result

        def _specdec_processed(self, metadata: Any, logits: Tensor, sampling: Any) -> Tensor:
            """Apply vLLM's processors to a copy of the logits, if there is anything to apply."""
            if not _has_processors(sampling):
                return logits
            source = logits.to(torch.float32, copy=True)
            bonus = metadata.bonus_logits_indices
            source[bonus] = self.sampler.apply_logits_processors(source[bonus], sampling, True)
            if len(metadata.draft_token_ids):
                inner = metadata.target_logits_indices
                source[inner] = self.apply_logits_processors(source[inner], sampling, metadata)
            return source

        def _specdec_logprobs(
            self, scored: Tensor, layout: Layout, tokens: Tensor, count: int
        ) -> Any:
            """Give what vLLM reports of each slot; it drops those behind the end."""
            rows = scored[layout.target_rows.flatten()].to(torch.float32)
            if not self.is_logits_logprobs_mode:
                rows = self.sampler.compute_logprobs(rows)
            return self.sampler.gather_logprobs(rows, count, tokens.flatten().clamp(min=0))

    return SpecdecRejectionSampler


def _profiling_step(layout: Layout, draft_probs: Tensor | None) -> Step:
    """Make up what vLLM's profiling run, which has no requests, does not say."""
    zeros = torch.zeros_like(layout.lengths)
    draft = None
    if draft_probs is not None:
        draft = DraftRows(draft_probs, layout.draft_slots, are_logits=False)
    return Step(Facts(zeros), zeros, draft)


def _filters(sampling: Any, facts: Facts, layout: Layout) -> dict[str, Tensor | None]:
    temperature = sampling.temperature
    if temperature is None:  # all are greedy
        temperature = torch.zeros_like(layout.lengths, dtype=torch.float32)
    return {
        **dict(temperature=temperature, top_k=sampling.top_k),
        **dict(top_p=sampling.top_p, min_p=facts.min_p),
    }


def _has_processors(sampling: Any) -> bool:
    """Whether anything changes the logits before they are a law."""
    holder = sampling.thinking_budget_state_holder
    return bool(
        not sampling.no_penalties
        or sampling.bad_words_token_ids
        or sampling.allowed_token_ids_mask is not None
        # Under speculation vLLM has one of these, for min_tokens, with the requests that use it.
        or any(getattr(p, "min_toks", True) for p in sampling.logitsprocs.non_argmax_invariant)
        or (holder is not None and holder.has_tracked_requests())
    )


def _under_filters(source: Tensor, layout: Layout, filters: dict[str, Tensor | None]) -> Tensor:
    """Give the rows as vLLM's "processed" modes report them: over T, -inf where filtered out."""
    by_row = {name: x[layout.owners] for name, x in filters.items() if x is not None}
    temperature = by_row["temperature"]
    by_row["temperature"] = torch.where(temperature < _VLLM_GREEDY, 1.0, temperature)
    cutoff = ops.row_law(source, **by_row)[2]
    kept = torch.where(source >= cutoff[:, None], source, -torch.inf)
    return kept.to(torch.float32) / by_row["temperature"][:, None]


#: vLLM takes a temperature below this for 0.
_VLLM_GREEDY = 1e-5


def _report(status: Tensor) -> None:
    """Say once a process that data were wrong; on a GPU nothing waits for the status."""
    if status.device.type == "cpu" and not _warned and status.any():
        _warned.append(int(status.max()))
        _logger.warning(
            "specdec_ext: verify reports status %s (see specdec_ext.STATUS_...)", status
        )


# -------------------------------------------------------------------------------------------------
# Where they go in vLLM
# -------------------------------------------------------------------------------------------------


def _is_ours(sampler: Any) -> bool:
    return hasattr(sampler, "specdec") and not sampler.synthetic_mode


def make_step(runner: Any, metadata: Any) -> Step:
    """Collect what one step needs from vLLM's model runner.

    Parameters
    ----------
    runner : GPUModelRunner
        vLLM's, or its CPU subclass.
    metadata : SpecDecodeMetadata
        vLLM's, of this step.
    """
    state: State = runner.rejection_sampler.specdec
    ids = runner.input_batch.req_ids
    if state.requests is None:
        state.requests = Requests(runner.model_config.seed, runner.device)
    facts = state.requests.facts([runner.requests[request] for request in ids])
    layout = state.layouts.of(metadata.num_draft_tokens, runner.device)
    # Exact on the device also where the host does not know yet what was accepted.
    positions = runner.seq_lens[: len(ids)] - layout.lengths
    step = Step(facts, positions)
    laws = runner._draft_probs
    last = None if laws is None else runner._draft_prob_req_ids
    rows = state.outstanding.rows(last, ids, runner.requests)
    if rows.count(CHOSEN) == len(rows):
        return step
    gamma, width = layout.draft_slots.shape[1], 0 if laws is None else laws.shape[1]
    key = (*rows, gamma, width)
    table = state.tables.of(key, lambda: make_table(rows, gamma, width, runner.device))
    return _with_laws(step, layout, table, laws, state.draws_logits)


class DraftTable(NamedTuple):
    """Index tensors that follow from where the requests' laws are.

    Attributes
    ----------
    rows : Tensor
        ``[B, G]`` int64, in the laws of the last round, ``[B' * width, V]``.
    drawn : Tensor or None
        ``[B]`` bool; None: the tokens of all requests were drawn.
    kept : Tensor or None
        ``[B]`` bool: the draft counts; None: all do.
    """

    rows: Tensor
    drawn: Tensor | None
    kept: Tensor | None


def make_table(rows: Sequence[int], gamma: int, width: int, device: torch.device) -> DraftTable:
    """Make the index tensors of requests whose laws are the given rows, `CHOSEN` or `LOST`.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.engines.vllm.v1 import LOST, make_table
    >>> table = make_table([1, LOST], 2, 4, torch.device("cpu"))
    >>> table.rows, table.kept
    (tensor([[4, 5],
            [0, 1]]), tensor([ True, False]))
    """
    row = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    lane = torch.arange(gamma, device=device)
    return DraftTable(
        row.clamp(min=0)[:, None] * width + lane,
        row != CHOSEN if CHOSEN in rows else None,
        row != LOST if LOST in rows else None,
    )


def _with_laws(
    step: Step, layout: Layout, table: DraftTable, laws: Tensor | None, are_logits: bool
) -> Step:
    """Add where the drafts' laws are, which tokens were chosen, and which drafts must not count."""
    lengths = None if table.kept is None else layout.lengths * table.kept
    if laws is None or table.rows.shape[1] == 0:
        return step._replace(lengths=lengths)
    drawn, bound = table.drawn, step.facts.bound
    if bound is not None and are_logits:
        drawn = ~bound if drawn is None else drawn & ~bound
    kinds = None
    if drawn is not None:
        kinds = drawn.to(torch.int8)[:, None].expand(table.rows.shape)
    draft = DraftRows(laws.flatten(0, 1), table.rows, are_logits)
    return step._replace(draft=draft, kinds=kinds, lengths=lengths)


def _wrap_sample(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None and _is_ours(self.rejection_sampler):
            self.rejection_sampler.specdec.step = make_step(self, spec_decode_metadata)
            self.drafter.specdec_runner = self  # which vLLM's drafters do not know
            # Nobody draws from them; winding one back after a piece of a prompt fails on CPUs.
            self.input_batch.generators.clear()
        return inner(self, logits, spec_decode_metadata)

    return _sample


def _wrap_get_draft_probs(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def _get_spec_decode_draft_probs(self: Any, spec_decode_metadata: Any) -> Any:
        if _is_ours(self.rejection_sampler):
            return None  # the step has them, where they lie: no copy is made
        return inner(self, spec_decode_metadata)

    return _get_spec_decode_draft_probs


def _wrap_propose(inner: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner = getattr(self, "specdec_runner", None)
        if runner is None:
            return inner(self, *args, **kwargs)
        if self._enable_probabilistic_draft_probs:
            given = signature.bind(self, *args, **kwargs).arguments
            self.specdec_draws = _round(runner, given, settings)
        runner.rejection_sampler.specdec.draws_logits = True
        try:
            return inner(self, *args, **kwargs)
        finally:
            self.specdec_draws = None

    return propose


def _round(runner: Any, given: dict[str, Any], settings: Settings) -> Draws:
    """Find where the round's first draft token goes: behind what this step has emitted."""
    states = [runner.requests[request] for request in runner.input_batch.req_ids]
    positions = given["common_attn_metadata"].seq_lens[: len(states)].to(torch.int64) + 1
    rejected = given.get("num_rejected_tokens_gpu")
    if rejected is not None:
        positions -= rejected[: len(states)]
    return Draws(settings, runner.rejection_sampler.specdec.requests.facts(states), positions)


def _wrap_sample_from_logits(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def _sample_from_logits(self: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        draws = getattr(self, "specdec_draws", None)
        if draws is None or sampling_metadata.all_greedy:
            runner = getattr(self, "specdec_runner", None)
            if draws is None and runner is not None:
                # A drafter with a loop of its own: probabilities, drawn by vLLM.
                runner.rejection_sampler.specdec.draws_logits = False
            return inner(self, logits, sampling_metadata)
        return draws.draw(logits, sampling_metadata), logits

    return _sample_from_logits


def _wrap_validate(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        """Refuse what vLLM refuses, but for min-p, which `specdec_ext.verify` has."""
        synthetic = getattr(speculative_config, "rejection_sample_method", "") == "synthetic"
        if self.logit_bias or synthetic:
            inner(self, speculative_config)

    return _validate_spec_decode


def install(settings: Settings) -> None:
    """Put everything in place; the engine must not have been built yet."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker import gpu_model_runner

    def wrap(owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
        setattr(owner, name, wrapped(getattr(owner, name)))

    runner = gpu_model_runner.GPUModelRunner
    gpu_model_runner.RejectionSampler = sampler_class(RejectionSampler, SamplerOutput, settings)
    wrap(runner, "_sample", _wrap_sample)
    wrap(runner, "_get_spec_decode_draft_probs", _wrap_get_draft_probs)
    wrap(SpecDecodeBaseProposer, "propose", functools.partial(_wrap_propose, settings=settings))
    wrap(SpecDecodeBaseProposer, "_sample_from_logits", _wrap_sample_from_logits)
    wrap(SamplingParams, "_validate_spec_decode", _wrap_validate)
