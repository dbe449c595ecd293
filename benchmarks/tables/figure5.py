"""Figure 5 of Leviathan et al. (arXiv 2211.17192): a trace of calls, plain and drafted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from common import synchronizer
from contestants import Run

from tables.decode import PLAIN, Way, by_model, greedy_bar, greedy_faults, way
from tables.shared import Bench, Column, Result, Sentence

GAMMAS = (7, 3)
TRIES = 5
COLORS = {
    "target, encoder": "tab:olive",
    "draft, encoder": "tab:orange",
    "draft": "tab:blue",
    "target": "tab:purple",
}

COLUMNS = [
    Column("way", "way"),
    Column("who", "who"),
    Column("calls", "calls", "d"),
    Column("milliseconds", "milliseconds"),
    Column("share", "of the whole", ".0%"),
    Column("tokens", "tokens", "d"),
]

NOTES = [
    "Calls of one sentence's encoders and decoders, by hooks, on one time axis; what is between "
    "them is the loop: draws, verification, caches. T = 0, the fastest of "
    f"{TRIES} runs of each way. The CSV has the sums, the picture every call.",
    "The paper's figure is a simplified diagram of the same: encoders, gamma calls of the draft, "
    "one of the target.",
]


class Call(NamedTuple):
    """Who was called, and when, in seconds from the beginning."""

    who: str
    begin: float
    end: float


@contextmanager
def traced(modules: dict[str, Any], device: Any) -> Iterator[list[Call]]:
    """Note when modules run; calls of one that are inside of another's are not expected."""
    wait, calls, begun = synchronizer(device), [], {}
    origin = time.perf_counter()

    def now() -> float:
        wait()
        return time.perf_counter() - origin

    def begin(who: str) -> Any:
        return lambda *_: begun.__setitem__(who, now())

    def end(who: str) -> Any:
        return lambda *_: calls.append(Call(who, begun[who], now()))

    handles = []
    for who, module in modules.items():
        handles.append(module.register_forward_pre_hook(begin(who)))
        handles.append(module.register_forward_hook(end(who)))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def make(bench: Bench) -> Result:
    """Trace one sentence, of middle length, in three ways."""
    smallest, draft = next(iter(bench.drafts.items()))
    sentence = sorted(bench.sentences, key=lambda s: len(s.reference))[len(bench.sentences) // 2]
    ways = {
        f"gamma {gamma}": way(bench, by_model(draft), gamma=gamma, rule="greedy")
        for gamma in GAMMAS
    } | {PLAIN: way(bench, None)}
    modules = {
        "target, encoder": bench.target.get_encoder(),
        "draft, encoder": draft.get_encoder(),
        "draft": draft.get_decoder(),
        "target": bench.target.get_decoder(),
    }
    traces, runs, records = {}, {}, []
    for name, decode in ways.items():
        # The fastest of a few: it was interrupted least.
        tries = [trace(decode, sentence, modules, bench) for _ in range(TRIES)]
        run, traces[name] = min(tries, key=lambda found: found[1][-1].end)
        runs[name] = [run]
        records += sums(name, traces[name], runs[name][0].num_tokens)
    faults, ties = greedy_faults(bench, runs, [sentence])
    return Result(
        f"A trace of calls: {bench.task}, target {bench.target_name}, draft {smallest}",
        COLUMNS, records, NOTES, [greedy_bar(runs, faults, ties)], faults,
        lambda pyplot: draw(pyplot, traces),
    )  # fmt: skip


def trace(
    decode: Way, sentence: Sentence, modules: dict[str, Any], bench: Bench
) -> tuple[Run, list[Call]]:
    """Decode a sentence; return the run and its calls, in seconds from the first one on."""
    with traced(modules, bench.device) as calls:
        run = decode(sentence, bench.options.seed)
    first = calls[0].begin
    return run, [Call(c.who, c.begin - first, c.end - first) for c in calls]


def sums(name: str, calls: list[Call], tokens: int) -> list[dict[str, Any]]:
    """Add up the calls of each module, and what is between them."""
    whole = max(call.end for call in calls)
    found = []
    for who in COLORS:
        own = [call.end - call.begin for call in calls if call.who == who]
        if own:
            found.append({"way": name, "who": who, "calls": len(own), "seconds": sum(own)})
    rest = whole - sum(record["seconds"] for record in found)
    found += [{"way": name, "who": "loop", "seconds": rest}]
    found += [{"way": name, "who": "all", "seconds": whole, "tokens": tokens}]
    for record in found:
        record["share"] = record["seconds"] / whole
        record["milliseconds"] = 1e3 * record.pop("seconds")
    return found


def draw(pyplot: Any, traces: dict[str, list[Call]]) -> Any:
    """Draw a line a way, a block a call."""
    figure, axes = pyplot.subplots(figsize=(12, 2.6))
    names = list(traces)
    for line, name in enumerate(names):
        for who, color in COLORS.items():
            blocks = [
                (1e3 * c.begin, 1e3 * (c.end - c.begin)) for c in traces[name] if c.who == who
            ]
            axes.broken_barh(
                blocks, (line - 0.35, 0.7), color=color, edgecolor="white", linewidth=0.4,
                label=who if line == 0 else None,
            )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return figure
