"""Who takes part in benchmarks of generation, and what one call of each of them gives.

A contestant takes ids and mask ``[B, P]`` and a seed. Drafters that train nothing and run no model
go by name: see `DRAFTERS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import set_seed

import specdec_ext
from specdec_ext.commands.pair import Pair
from specdec_ext.decoding import (
    Burst,
    Generated,
    LookupDrafter,
    NgramDrafter,
    Statistics,
    SuffixDrafter,
)

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


@dataclass(frozen=True)
class Ours:
    """A contestant that decodes by `specdec_ext.generate`; also a round at a time, see `by_turns`.

    ``draft`` gives the draft or drafter, None for plain decoding; ``options`` are more arguments of
    `generate`.
    """

    pair: Pair
    draft: Callable[[Pair], Any]
    last: tuple[int, ...]
    options: Mapping[str, Any]

    def __call__(self, ids: Tensor, mask: Tensor, seed: int) -> Run:
        """Complete the prompts."""
        found, seconds = timed(
            lambda: specdec_ext.generate(*self._models(ids), **self._options(mask, seed)),
            self.pair.device,
        )
        return self._run(found, ids, seconds)

    def bursts(
        self, ids: Tensor, mask: Tensor, seed: int
    ) -> Generator[Burst, None, Callable[[float], Run]]:
        """Complete the prompts a round at a time; gives at last the run, of its seconds."""
        found = yield from specdec_ext.stream(*self._models(ids), **self._options(mask, seed))
        return lambda seconds: self._run(found, ids, seconds)

    def _models(self, ids: Tensor) -> tuple[Any, Any, Tensor]:
        return self.pair.target, self.draft(self.pair), ids

    def _options(self, mask: Tensor, seed: int) -> dict[str, Any]:
        own = {"attention_mask": mask, "seeds": seed, "eos_token_id": self.last}
        return {**self.options, **own}

    def _run(self, found: Generated, ids: Tensor, seconds: float) -> Run:
        return Run(_texts(found.sequences, ids, self.last), seconds, found.statistics)


def ours(
    pair: Pair,
    setting: Setting,
    new: int,
    gamma: Any = 1,
    *,
    draft: Callable[[Pair], Any] = lambda pair: None,
    stops: bool = False,
    **options: Any,
) -> Ours:
    """Return a contestant of ours that adds ``new`` tokens at most.

    ``gamma`` is a number or a policy; ``stops``: end texts where the target does; ``draft``,
    ``options``: as in `Ours`.
    """
    options |= {"max_new_tokens": new, "gamma": gamma, "temperature": setting.temperature}
    return Ours(pair, draft, ends(pair) if stops else (), options)


def by_turns(playing: Mapping[str, Ours], ids: Tensor, mask: Tensor, seed: int) -> dict[str, Run]:
    """Complete the prompts with several contestants at once, each a round at a time.

    The next round is always of one that has the fewest tokens, so that all are near the same place
    of their texts, and what a machine does beside slows all of them down alike. Of each, the
    seconds of its own rounds are counted, the first one's with its prefill and the drafter's.
    """
    going = {name: contestant.bursts(ids, mask, seed) for name, contestant in playing.items()}
    tokens, seconds, runs = dict.fromkeys(going, 0), dict.fromkeys(going, 0.0), {}
    while going:
        name = min(going, key=lambda other: tokens[other])
        device = playing[name].pair.device
        (burst, result), spent = timed(partial(_step, going[name]), device)
        seconds[name] += spent
        if burst is not None:
            tokens[name] += len(burst.tokens)
        else:
            runs[name] = result(seconds[name])
            del going[name]
    return {name: runs[name] for name in playing}


def _step(bursts: Generator[Burst, None, Any]) -> tuple[Burst | None, Any]:
    """Return the next burst, or None and what the generator returns."""
    try:
        return next(bursts), None
    except StopIteration as stop:
        return None, stop.value


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
