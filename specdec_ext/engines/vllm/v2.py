"""The V2 model runner (the default where Triton is): its rejection sampler and its drafting.

It has seeds, positions and the draft's logits on the device. Batches are described on the device
alone, and so is the layout here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._ops import ops
from .settings import Settings

__all__ = ["draft_positions", "drafted_tokens", "install", "sampler_class"]

#: The fields of vLLM's `LogitsContext` in the order in which its sampler takes them.
_CONTEXT = (
    *("expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos"),
    *("input_ids", "expanded_local_pos", "seq_lens_upper_bound_np"),
)


def drafted_tokens(
    logits: Tensor, drafted: Tensor, verified: Tensor, rows: Tensor, slots: Tensor, lengths: Tensor
) -> Tensor:
    """Give the draft tokens ``[B, G]`` to verify, -1 where a draft ends.

    vLLM replaces draft tokens that a grammar forbids by -1. The first of them was drawn all the
    same: dropped, it would bias what is emitted in its place. It is kept where its row forbids it,
    so that verification rejects it.

    Parameters
    ----------
    logits : Tensor
        ``[R, V]`` rows of the target, -inf where a grammar forbids.
    drafted, verified : Tensor
        ``[R]`` integers, by row of the logits: the token that was drafted, and the same with -1.
    rows, slots : Tensor
        ``[B, G]`` int64: of each draft token, its row of logits and its entry in ``drafted``.
    lengths : Tensor
        ``[B]`` int64.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.engines.vllm.v2 import drafted_tokens
    >>> logits = torch.zeros(4, 3)
    >>> logits[1, 2] = -torch.inf
    >>> drafted, verified = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, -1, -1])
    >>> slots = torch.tensor([[1, 2, 3]])
    >>> drafted_tokens(logits, drafted, verified, slots - 1, slots, torch.tensor([3]))
    tensor([[ 1,  2, -1]])
    """
    real, kept = drafted[slots], verified[slots]
    gone = kept < 0
    first_gone = gone & (gone.cumsum(1) == 1)
    forbidden = logits[rows, real.clamp(min=0)] == -torch.inf
    tokens = torch.where(first_gone & forbidden & (real >= 0), real, kept)
    lane = torch.arange(slots.shape[1], device=slots.device)
    return torch.where(lane < lengths[:, None], tokens, -1)


def sampler_class(base: Any, context_class: Any, settings: Settings) -> Any:
    """Make a subclass of the V2 runner's rejection sampler that verifies by `specdec_ext.verify`.

    Parameters
    ----------
    base : type
        ``vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler``.
    context_class : type
        ``LogitsContext`` of that runner.
    settings : Settings
        The rule.
    """

    class SpecdecRejectionSampler(base):  # type: ignore[misc]
        """vLLM's rejection sampler with one call in place of what it does to the logits."""

        def __init__(self, sampler: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(sampler, *args, **kwargs)
            self.specdec_is_used = (
                self.synthetic_conditional_rates is None and self.watermark_key is None
            )
            if self.specdec_is_used:
                sampler.specdec_sampler = self  # for steps without any draft

        def _verify(
            self,
            logits: Tensor,
            draft_logits: Tensor | None,
            draft_sampled: Tensor,
            pos: Tensor,
            cu_num_logits: Tensor,
            idx_mapping: Tensor,
            idx_mapping_np: Any,
            expanded_idx_mapping: Tensor,
            expanded_local_pos: Tensor,
            seq_lens_upper_bound_np: Any,
            verify_draft_sampled: Tensor,
        ) -> tuple[Tensor, Tensor, Tensor]:
            batch = (
                *(expanded_idx_mapping, idx_mapping, idx_mapping_np, pos),
                *(draft_sampled, expanded_local_pos, seq_lens_upper_bound_np),
            )
            if not self.specdec_is_used:
                result: tuple[Tensor, Tensor, Tensor] = super()._verify(
                    *(logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping),
                    *(idx_mapping_np, expanded_idx_mapping, expanded_local_pos),
                    *(seq_lens_upper_bound_np, verify_draft_sampled),
                )
                return result
            source = self._specdec_processed(logits, batch)
            gamma = self.num_speculative_steps
            start = cu_num_logits[:-1].to(torch.int64)
            lengths = cu_num_logits.diff().to(torch.int64) - 1
            lane = torch.arange(gamma + 1, device=logits.device)
            target_rows = start[:, None] + torch.minimum(lane, lengths[:, None])
            slots = (start[:, None] + 1 + lane[:gamma]).clamp_(max=len(logits) - 1)
            tokens = drafted_tokens(
                source, draft_sampled, verify_draft_sampled, target_rows[:, :gamma], slots, lengths
            )
            states, slot = self.sampler.sampling_states, idx_mapping.to(torch.int64)
            emitted, accepted, _, _, _ = ops.verify(
                source,
                tokens,
                **_draft_law(draft_logits, slot, gamma),
                target_rows=target_rows,
                draft_lengths=lengths,
                seeds=states.seeds.gpu[slot],
                positions=pos[start].to(torch.int64) + 1,
                rule=settings.rule,
                **_filters(states, slot, idx_mapping_np),
                **settings.numbers,
            )
            reported = self._specdec_reported(logits, batch)
            return reported, emitted, accepted + 1

        def _specdec_processed(self, logits: Tensor, batch: tuple[Any, ...]) -> Tensor:
            """Apply vLLM's processors to a copy of the logits, if there is anything to apply."""
            sampler = self.sampler
            if not np.any(sampler.needs_logits_processing[batch[2]]) or not _has_processors(
                sampler, batch[2]
            ):
                return logits
            context = context_class(**dict(zip(_CONTEXT, batch, strict=True)))
            source = logits.to(torch.float32, copy=True)
            for processor in sampler.logits_processors:
                source = processor.apply(source, context)
            sampler.thinking_budget_state.apply(source, context)
            return source

        def _specdec_reported(self, logits: Tensor, batch: tuple[Any, ...]) -> Tensor:
            """Give the rows that log-probabilities and masks are made of, where that is asked."""
            sampler = self.sampler
            if sampler.logprobs_mode.startswith("processed") or sampler.return_sampling_mask:
                processed: Tensor = sampler.apply_sampling_params(logits, *batch)
                return processed
            return logits

    return SpecdecRejectionSampler


def _draft_law(draft_logits: Tensor | None, slot: Tensor, gamma: int) -> dict[str, Tensor]:
    """Say what drafts were drawn from: rows by request state, the target's temperature alone."""
    if draft_logits is None:
        return {}
    lane = torch.arange(gamma, device=slot.device)
    nothing = torch.zeros_like(slot, dtype=torch.float32)
    return dict(
        draft_logits=draft_logits.flatten(0, 1),
        draft_rows=slot[:, None] * draft_logits.shape[1] + lane,
        draft_top_k=torch.zeros_like(slot),
        draft_top_p=torch.ones_like(nothing),
        draft_min_p=nothing,
    )


def _filters(states: Any, slot: Tensor, slot_np: Any) -> dict[str, Tensor]:
    """Take temperature and those filters that any request has."""
    used = {
        "top_k": np.any(states.top_k.np[slot_np] != states.vocab_size),
        "top_p": np.any(states.top_p.np[slot_np] != 1.0),
        "min_p": np.any(states.min_p.np[slot_np] != 0.0),
    }
    names = ["temperature", *(name for name, any_request in used.items() if any_request)]
    return {name: getattr(states, name).gpu[slot] for name in names}


def _has_processors(sampler: Any, slot_np: Any) -> bool:
    """Whether anything changes the logits before they are a law; what is unknown may."""
    known: dict[str, Callable[[Any], Any]] = {
        "LogitBiasState": lambda p: p.use_logit_bias,
        "PenaltiesState": lambda p: p.use_penalty,
        "BadWordsState": lambda p: p.num_bad_words.np,
    }
    uses = [
        known.get(type(p).__name__, lambda _: np.ones(1 + np.max(slot_np), bool))(p)
        for p in sampler.logits_processors
    ]
    if sampler.thinking_budget_state.enabled:
        uses.append(sampler.thinking_budget_state.use_thinking_budget)
    return any(np.any(use[slot_np]) for use in uses)


def _wrap_call(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Make steps in which no request has a draft go the same way: "coupled" must not see drafts."""

    @functools.wraps(inner)
    def __call__(self: Any, logits: Tensor, input_batch: Any) -> Any:  # noqa: N807
        ours = getattr(self, "specdec_sampler", None)
        dims = self.get_logprobs_dims(input_batch.idx_mapping_np) if ours is not None else None
        token_ids = dims is not None and dims[1] > 0  # which vLLM reports on this path alone
        if ours is None or token_ids or self.trace_replay_state is not None:
            return inner(self, logits, input_batch)
        return ours(logits, input_batch)

    return __call__


def draft_positions(before: Tensor, step: Tensor, is_race: bool) -> Tensor:
    """Give positions for `specdec_ext.sample` that make each draft token's randomness its own.

    vLLM keys a draft token by its place in the text. The next round drafts for some of these places
    again, and which it drafts for depends, under "block", on what was drawn for them: the same
    numbers would bias the text. So a draft token is keyed by where its round begins, and its place
    in the round; the place is a tensor here, which ``draft_index`` cannot be. Races alone are keyed
    by the place in the text.

    Parameters
    ----------
    before : Tensor
        ``[B]`` integers, the position before each drafted token.
    step : Tensor
        ``[B]`` or ``[]`` integers, which token of its round each is.
    is_race : bool
        Whether the rule races.

    Examples
    --------
    >>> import torch
    >>> from specdec_ext.engines.vllm.v2 import draft_positions
    >>> draft_positions(torch.tensor([9, 10]), torch.tensor([0, 1]), True)
    tensor([10, 11])
    >>> draft_positions(torch.tensor([9, 10]), torch.tensor([0, 1]), False) - 10 * 2**16
    tensor([0, 1])
    """
    place = before.to(torch.int64) + 1
    return place if is_race else (place - step) * 2**16 + step


def _wrap_gumbel_sample(inner: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def gumbel_sample(*args: Any, **kwargs: Any) -> Any:
        sampled = inner(*args, **kwargs)  # it also puts the logits where verification finds them
        given = signature.bind(*args, **kwargs).arguments
        step = given.get("logits_cache_col")
        if not given["is_drafting"] or given.get("logits_cache") is None or step is None:
            return sampled
        slot = given["expanded_idx_mapping"].to(torch.int64).clamp(min=0)  # -1: padding
        tokens, _ = ops.sample(
            given["logits"],
            seeds=given["seed"][slot],
            positions=draft_positions(given["pos"], step, settings.traits.races),
            domain=settings.draft_domain,
            temperature=given["temperature"][slot],
        )
        # A row of NaN gives -1, which is no token; verify ends the draft at such a row.
        return tokens.clamp_(min=0)

    return gumbel_sample


def install(settings: Settings) -> None:
    """Put everything in place; the engine must not have been built yet."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode import speculator
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    speculator.gumbel_sample = _wrap_gumbel_sample(speculator.gumbel_sample, settings)
    model_runner.RejectionSampler = sampler_class(RejectionSampler, LogitsContext, settings)
    Sampler.__call__ = _wrap_call(Sampler.__call__)
