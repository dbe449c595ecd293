"""What `generate` was asked for: as given (`Options`), and checked (`Settings`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .grown_trees import GrownTree
from .matchers import TokenMatcher
from .processors import Processor
from .sampling_laws import SamplingLaws
from .stopping import Criterion, Stops
from .trees import StaticTree

__all__ = ["Options", "Settings"]


@dataclass(frozen=True)
class Options:
    """Arguments of `generate` as they were given; it documents them and has their defaults.

    (Those that `configured` and `with_beams` fill in are None until then.)
    """

    target: Any
    draft: Any
    input_ids: Tensor
    attention_mask: Tensor | None
    generation_config: Any
    max_new_tokens: Any
    num_return_sequences: Any
    do_sample: bool | None
    gamma: Any
    temperature: Any
    top_k: int | Sequence[int] | Tensor | None
    top_p: float | Sequence[float] | Tensor | None
    min_p: float | Sequence[float] | Tensor | None
    draft_temperature: float | Sequence[float] | Tensor | None
    draft_top_k: int | Sequence[int] | Tensor | None
    draft_top_p: float | Sequence[float] | Tensor | None
    draft_min_p: float | Sequence[float] | Tensor | None
    seeds: int | Sequence[int] | Tensor | None
    generator: torch.Generator | None
    tree: Any
    rule: str | None
    lenience: float
    beta: int
    tau: float
    epsilon: float
    delta: float
    raw_logprobs: bool
    logits_processor: Processor | Iterable[Processor] | None
    grammar: Any
    eos_token_id: int | Iterable[int] | None
    stop_sequences: Iterable[Sequence[int]] | None
    stop_strings: str | Sequence[str] | None
    tokenizer: Any
    stopping_criteria: Criterion | Iterable[Criterion] | None
    pad_token_id: int | None
    padded_texts: bool
    static_cache: bool
    measure_alpha: bool
    num_beams: int | None
    draft_beams: int | None
    length_penalty: float | None
    early_stopping: bool | str | None


@dataclass(frozen=True)
class Settings:
    """What a generation goes by, checked, and in one form for all requests.

    Attributes
    ----------
    prompts : Tensor
        ``[B, P]``, as given.
    attention_mask : Tensor or None
        ``[B, P]``, as given.
    limits : list of int
        New tokens of each request at most.
    tree : StaticTree, GrownTree or None
        What a round drafts; None: a chain.
    rule : str
        The verification rule asked for.
    rule_options : dict
        Parameters of the rule, and ``raw_logprobs``.
    laws : SamplingLaws
        The sampling parameters, of the target and of the draft.
    seeds : Tensor
        ``[B]`` int64.
    processors : sequence of callable
        The logits processors.
    matchers : sequence of TokenMatcher or None, or None
        The grammar of each request, None where anything may come; None: there are none.
    stops : Stops
        What ends a request.
    pad : int
        Fills sequences behind the end of a request.
    padded_texts, static_cache, measure_alpha : bool
        As in `generate`.
    """

    prompts: Tensor
    attention_mask: Tensor | None
    limits: list[int]
    tree: StaticTree | GrownTree | None
    rule: str
    rule_options: dict[str, Any]
    laws: SamplingLaws
    seeds: Tensor
    processors: Sequence[Processor]
    matchers: Sequence[TokenMatcher | None] | None
    stops: Stops
    pad: int
    padded_texts: bool
    static_cache: bool
    measure_alpha: bool
