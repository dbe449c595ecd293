"""Tables 8 and 9 of Xia et al. (arXiv 2203.16487): peak memory by batch size.

On a GPU it is what torch's allocator says, as in the paper. On a CPU torch keeps no such count; its
profiler notes every tensor that is allocated and freed, and the peak is the largest sum of those
that lived at the same time. What the interpreter, libraries and their buffers take is in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tables.decode import PLAIN
from tables.shared import Bench, Column, Result, Sentence
from tables.xia import placed_drafter
from tables.xia_figures import VANILLA, decoded_batch

BATCHES = (1, 4, 8, 16, 32)
MEGABYTE = 2**20

# Megabytes of weights, then in all by batch size, of greedy decoding and with blocks of 25: on
# WMT14 English to German (Table 8) and on CNN/DailyMail (Table 9), float32, P100.
TABLE_8: dict[str, tuple[float, dict[int, float]]] = {
    PLAIN: (232.4, {1: 243.2, 4: 271.7, 8: 301.4, 16: 366.4, 32: 494.6}),
    VANILLA: (477.8, {1: 491.5, 4: 519.8, 8: 559.2, 16: 634.1, 32: 782.5}),
}
TABLE_9: dict[str, tuple[float, dict[int, float]]] = {
    PLAIN: (534.6, {1: 696.9}),
    VANILLA: (1089.6, {1: 1264.6}),
}


def peak_of_events(sizes: Sequence[int]) -> int:
    """Return the largest sum of live bytes, from allocations (> 0) and frees (< 0) in their order.

    Frees of what was allocated before the first event make the sum fall below 0; the peak does not.
    """
    live = peak = 0
    for size in sizes:
        live += size
        peak = max(peak, live)
    return peak


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Run something, and return how many bytes more than before its tensors took at the most."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return peak_of_events([event.nbytes() for event in changes])


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, each once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def batches_of(bench: Bench, sizes: Sequence[int]) -> dict[int, list[Sentence]]:
    """Return a batch for each size: the longest sentences, so that all need about as much each."""
    longest = sorted(bench.sentences, key=lambda sentence: -len(sentence.source))
    return {size: longest[:size] for size in sizes if size <= len(longest)}


@torch.inference_mode()
def make(bench: Bench) -> Result:
    """Make the table."""
    name, model = placed_drafter(bench)
    ways: dict[str, Any] = {PLAIN: None, VANILLA: model}
    sizes = BATCHES[:1] if bench.options.quick else BATCHES
    batches = batches_of(bench, sizes)
    printed = TABLE_9 if bench.task == "summarisation" else TABLE_8
    weights = {PLAIN: weight_bytes(bench.target)}
    weights[VANILLA] = weights[PLAIN] + weight_bytes(model)
    for how in ways.values():  # what is allocated once is not of a batch
        decoded_batch(bench, batches[sizes[0]], how, "greedy")
    records: list[dict[str, Any]] = []
    for size, batch in batches.items():
        for way, how in ways.items():
            work = partial(decoded_batch, bench, batch, how, "greedy")
            peak = peak_bytes(work, bench.device)
            paper_weights, paper = printed[way]
            records.append(
                {
                    "way": way,
                    "batch": size,
                    "weights": weights[way] / MEGABYTE,
                    "peak": peak / MEGABYTE,
                    "total": (weights[way] + peak) / MEGABYTE,
                    "paper_weights": paper_weights,
                    "paper_total": paper.get(size),
                }
            )
    return Result(
        f"Peak memory (Xia et al., Tables 8 and 9): {bench.task}, target {bench.target_name}, "
        f"drafter {name}, {bench.device.type}",
        [
            Column("way", "decoding"), Column("batch", "batch", "d"),
            Column("weights", "weights, MB", ".1f"), Column("peak", "beside them at most", ".1f"),
            Column("total", "in all", ".1f"), Column("paper_weights", "paper: weights", ".1f"),
            Column("paper_total", "in all", ".1f"),
        ],
        records,
        [
            "*Beside them at most*: bytes of tensors that lived at the same time while a batch was "
            "decoded, encoders included, over those before it. On a GPU torch's allocator counts "
            "them, as in the paper; on a CPU they are summed over the profiler's notes of every "
            "tensor allocated and freed, which the buffers of libraries and the interpreter's "
            "memory are not in.",
            "The longest sentences of the test split, so that a larger batch has shorter ones. The "
            f"paper's figures: float32 on a P100, {describes(bench)}.",
            "What a block takes beside the weights is mostly its logits, batch x k x vocabulary.",
        ],
        draw=lambda pyplot: draw(pyplot, records),
    )  # fmt: skip


def describes(bench: Bench) -> str:
    """Say what the paper's figures are of."""
    if bench.task == "summarisation":
        return "CNN/DailyMail, batch 1"
    return "WMT14 English to German"


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw memory over the batch size, a line for each way; dashed: the weights."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for way in dict.fromkeys(record["way"] for record in records):
        own = [record for record in records if record["way"] == way]
        line = axes.plot([r["batch"] for r in own], [r["total"] for r in own], "o-", label=way)
        axes.axhline(own[0]["weights"], linestyle="--", color=line[0].get_color(), linewidth=0.8)
    axes.set(xlabel="batch", ylabel="MB", ylim=(0, None))
    axes.legend(fontsize=8)
    return figure
