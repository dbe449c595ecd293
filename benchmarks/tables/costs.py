"""What calls cost: by the loop's own clock while it decodes, and of the models alone.

*c* is the time of a draft call and *r* that of a target call on gamma + 1 tokens, both in target
calls on one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from common import Contestant, measure
from contestants import Run
from transformers.cache_utils import DynamicCache

from specdec_ext.decoding import Statistics
from tables.decode import Reading, start_ids
from tables.shared import Bench


class Costs(NamedTuple):
    """c and r, and the rest of a round: verification, rollback, bookkeeping, in the same unit."""

    c: float
    r: float
    rest: float


def total(runs: Sequence[Run]) -> Statistics:
    """Add up the statistics of runs."""
    own = [run.statistics for run in runs if run.statistics is not None]
    return sum(own[1:], own[0])


def clocked(plain: Sequence[Run], own: Sequence[Run]) -> Costs:
    """Divide the phases of decoding by their calls, as the paper takes c from profiler traces.

    Parameters
    ----------
    plain : sequence of Run
        Plain decoding, the unit.
    own : sequence of Run
        Decoding with a draft model.

    Returns
    -------
    Costs
        A draft call's time includes drawing from its row.
    """
    alone, drafted = total(plain), total(own)
    unit = alone.seconds["target"] / alone.rounds
    rest = drafted.seconds["verify"] + drafted.seconds["rest"]
    calls = max(drafted.draft_calls, 1)  # n-gram models are never called
    return Costs(
        drafted.seconds["draft"] / calls / unit,
        drafted.seconds["target"] / drafted.rounds / unit,
        rest / drafted.rounds / unit,
    )


def plain_rest(plain: Sequence[Run]) -> float:
    """Return what a round of plain decoding takes beside its target call, in target calls."""
    alone = total(plain)
    return (alone.seconds["verify"] + alone.seconds["rest"]) / alone.seconds["target"]


@torch.inference_mode()
def forward_seconds(
    bench: Bench,
    models: Mapping[str, Any],
    counts: Iterable[int],
    *,
    behind: int = 16,
    budget: float = 3.0,
) -> dict[tuple[str, int], float]:
    """Time decoder calls on several new tokens over a cache, by turns.

    Parameters
    ----------
    bench : Bench
        Its first sentence is what the encoders read.
    models : mapping
        Name to encoder-decoder.
    counts : iterable of int
        New tokens of a call.
    behind : int
        Tokens in the cache.
    budget : float
        Seconds for all of it.

    Returns
    -------
    dict
        (name, new tokens) to the median of a call's seconds.
    """
    reading = Reading(bench.sentences[:1], bench.device)
    contestants: dict[str, Contestant] = {}
    keys = {}
    for name, model in models.items():
        encoded = reading.by(model)
        cache = DynamicCache()
        encoded.forward(start_ids(model).expand(1, behind).contiguous(), cache)
        for count in counts:
            ids = start_ids(model).expand(1, count).contiguous()
            contestants[f"{name} {count}"] = partial(_call, encoded, ids, cache)
            keys[f"{name} {count}"] = name, count
    timings = measure(contestants, budget=budget, device=bench.device)
    return {keys[name]: timing.median for name, timing in timings.items()}


def _call(model: Any, ids: torch.Tensor, cache: DynamicCache, _: int) -> None:
    model.forward(ids, cache)
    cache.crop(-ids.shape[1])
