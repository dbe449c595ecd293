"""Who takes part in benchmarks of generation, and what one call of each of them gives.

A contestant takes ids and mask ``[B, P]`` and a seed. Drafters that train nothing and run no model
go by name: see `DRAFTERS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import set_seed

import specdec_ext
from specdec_ext.commands.pair import Pair
from specdec_ext.decoding import LookupDrafter, NgramDrafter, Statistics, SuffixDrafter

sys.path.insert(0, str(Path(__file__).resolve().parent))

import common  # noqa: E402


class Setting(NamedTuple):
    """What all contestants are run under."""

    batch: int
    temperature: float


class Run(NamedTuple):
    """One call of a contestant."""

    tokens: list[list[int]]
    seconds: float
    statistics: Statistics | None
    target_calls: int = 0  # where there are no statistics

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(map(len, self.tokens))

    @property
    def calls(self) -> int:
        """Calls of the target, for each request that runs."""
        return self.target_calls if self.statistics is None else self.statistics.request_calls

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


Contestant = Callable[[Tensor, Tensor, int], Run]

#: Drafters by name, each made anew for every call: nothing is kept from one text to the next, so
#: that a text that is completed twice is no easier the second time.
DRAFTERS: dict[str, Callable[[Pair], Any]] = {
    "lookup": lambda pair: LookupDrafter(),
    "suffix": lambda pair: SuffixDrafter(),
    "ngram": lambda pair: NgramDrafter(
        pair.target.config.get_text_config().vocab_size, order=3, sampled=False
    ),
}


def timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Call something; give its result and seconds."""
    wait = common.synchronizer(device)
    begin = time.perf_counter()
    result = call()
    wait()
    return result, time.perf_counter() - begin


def ours(
    pair: Pair,
    setting: Setting,
    new: int,
    gamma: Any = 1,
    *,
    draft: Callable[[Pair], Any] = lambda pair: None,
    stops: bool = False,
    **options: Any,
) -> Contestant:
    """Decode by `specdec_ext.generate`.

    ``gamma`` is a number or a policy; ``draft`` gives the draft or drafter, None for plain
    decoding; ``stops``: end texts where the target does; ``options``: more arguments of `generate`.
    """
    options |= {"max_new_tokens": new, "gamma": gamma, "temperature": setting.temperature}
    last = ends(pair) if stops else ()

    def run(ids: Tensor, mask: Tensor, seed: int) -> Run:
        found, seconds = timed(
            lambda: specdec_ext.generate(
                pair.target, draft(pair), ids, attention_mask=mask, seeds=seed, eos_token_id=last,
                **options,
            ),
            pair.device,
        )  # fmt: skip
        return Run(_texts(found.sequences, ids, last), seconds, found.statistics)

    return run


def theirs(
    pair: Pair, setting: Setting, new: int, gamma: int, *, lookup: bool = False, stops: bool = False
) -> Contestant:
    """Decode by transformers; with a gamma, assisted by the draft model or by prompt lookup."""
    last = ends(pair) if stops else ()
    options: dict[str, Any] = {
        "do_sample": False, "max_new_tokens": new, "eos_token_id": list(last) or None,
        "pad_token_id": 0,
    }  # fmt: skip
    if setting.temperature:
        # Off is not the default of every checkpoint.
        options |= {"do_sample": True, "temperature": setting.temperature, "top_k": 0, "top_p": 1.0}
    assisted = gamma > 0 and not lookup
    if gamma and lookup:
        options["prompt_lookup_num_tokens"] = gamma
    elif gamma:
        config = pair.draft.generation_config
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = pair.draft

    def run(ids: Tensor, mask: Tensor, seed: int) -> Run:
        set_seed(seed)
        if assisted:
            pair.draft.generation_config.num_assistant_tokens = gamma
        with _counted(pair.target) as calls:
            found, seconds = timed(
                lambda: pair.target.generate(ids, attention_mask=mask, **options), pair.device
            )
        texts = _texts(found, ids, last)
        # The calls in which a request took part: plain decoding makes one a token.
        return Run(texts, seconds, None, calls[0] if gamma else sum(map(len, texts)))

    return run


def ends(pair: Pair) -> tuple[int, ...]:
    """Return the tokens at which the target ends a text."""
    found = pair.target.generation_config.eos_token_id
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def _texts(sequences: Tensor, ids: Tensor, ends: tuple[int, ...]) -> list[list[int]]:
    """Return the new tokens of each request, up to one of ``ends``."""
    rows = sequences[:, ids.shape[1] :].tolist()
    last = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[: end + 1] for row, end in zip(rows, last, strict=True)]


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    """Count the calls of a model; the count is the only item of a list."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handle = model.register_forward_pre_hook(count)
    try:
        yield calls
    finally:
        handle.remove()
