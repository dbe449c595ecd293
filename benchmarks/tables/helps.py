"""When it helps (article 004): code, facts and free text, at several temperatures.

The article names kinds of text for chat models. Here it is the shipped pair of Python-code models,
on prompts of three kinds; no model has to be trained for this table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from bench_generate import by_turns, faults
from contestants import Run, timed
from torch import Tensor

import specdec_ext
from specdec_ext.commands.pair import Pair, Prompt, find_prompts, left_padded, load_pair
from specdec_ext.decoding import LookupDrafter
from tables.decode import (
    PLAIN,
    accepted_of_drafted,
    accepted_of_tested,
    speedup,
    tokens_a_call,
)
from tables.rows import COUNTS
from tables.shared import Bench, Column, Result, with_estimate

TEMPERATURES, GAMMA, LOOKUP_GAMMA = (0.0, 0.6, 1.0), 4, 8
MODEL, LOOKUP = "the draft model", "lookup"

FACTS = (
    'WEEKDAYS = ["Monday", "Tuesday", "Wednesday",',
    'MONTHS = ["January", "February", "March", "April",',
    'NUMBERS = {"one": 1, "two": 2, "three": 3,',
    "POWERS_OF_TWO = [1, 2, 4, 8, 16, 32,",
    'LETTERS = ["a", "b", "c", "d", "e", "f",',
    'STATUS = {200: "OK", 301: "Moved Permanently", 404: "Not Found",',
    "SQUARES = {1: 1, 2: 4, 3: 9, 4: 16, 5: 25,",
    'HEX_DIGITS = ["0", "1", "2", "3", "4", "5",',
)
FREE_TEXT = (
    "The old ferryman had not spoken to anyone since the river froze, and",
    "When my sister came back from the city she brought a box that",
    "It rained for eleven days, and on the twelfth the whole village",
    "Nobody could say who had painted the blue door, but every evening",
    "She opened the letter twice before she understood that her brother",
    "Far behind the hills, where the road ends, there lived a baker who",
    "What I remember of that summer is mostly the smell of apples and",
    "The clockmaker laughed, put down his tools, and told the child that",
)
# What the article says of a kind, and of a high temperature.
ARTICLE = {"code": "good fit", "facts": "good fit", "free text": "poor fit"}


def prompts(pair: Pair) -> dict[str, list[Prompt]]:
    """Return texts to complete, of each kind as many."""

    def written(name: str, texts: tuple[str, ...]) -> list[Prompt]:
        return [
            Prompt(f"{name} {k + 1}", text, pair.tokenizer(text, return_tensors="pt").input_ids)
            for k, text in enumerate(texts)
        ]

    return {
        "code": find_prompts(pair),
        "facts": written("facts", FACTS),
        "free text": written("free text", FREE_TEXT),
    }


def contestants(pair: Pair, temperature: float, new: int) -> dict[str, Any]:
    """Return the ways to complete a prompt, functions of ids, mask and seed."""

    def contestant(draft: Any, gamma: int) -> Any:
        def run(ids: Tensor, mask: Tensor, seed: int) -> Run:
            found, seconds = timed(
                lambda: specdec_ext.generate(
                    pair.target, draft, ids, attention_mask=mask, max_new_tokens=new,
                    gamma=gamma, temperature=temperature, rule="token", seeds=seed,
                    eos_token_id=(),
                ),
                pair.device,
            )  # fmt: skip
            return Run(found.sequences[:, ids.shape[1] :].tolist(), seconds, found.statistics)

        return run

    return {
        PLAIN: contestant(None, 0),
        MODEL: contestant(pair.draft, GAMMA),
        LOOKUP: contestant(LookupDrafter(), LOOKUP_GAMMA),
    }


@torch.inference_mode()
def entropy(pair: Pair, prompt: Prompt, run: Run) -> tuple[float, int]:
    """Return the sum of the target's entropies at T = 1 over what was written, and its length."""
    written = torch.tensor([run.tokens[0]], device=pair.device)
    ids = torch.cat((prompt.ids, written), dim=1)
    rows = pair.target(ids).logits[0, prompt.ids.shape[1] - 1 : -1].double()
    return float(torch.special.entr(rows.softmax(-1)).sum()), written.shape[1]


def repeated(tokens: Sequence[int]) -> tuple[int, int]:
    """Return how many runs of four tokens stood in the text before, and how many there are."""
    runs = [tuple(tokens[k : k + 4]) for k in range(len(tokens) - 3)]
    return len(runs) - len(set(runs)), len(runs)


def measure(
    pair: Pair, kind: str, some: list[Prompt], temperature: float, options: Any
) -> tuple[list[dict[str, Any]], list[str], int]:
    """Complete prompts of a kind; give the rows, what was wrong, and how many were compared."""
    playing = contestants(pair, temperature, options.tokens)
    inputs = [left_padded([prompt.ids[0]]) for prompt in some]
    for one in playing.values():  # what happens once is not timed
        one(*inputs[0], options.seed)
    runs = by_turns(playing, inputs * options.repeats, options.seed)
    wrong, compared = [], 0
    if temperature == 0:
        for k, prompt in enumerate(some):
            own = {name: found[k] for name, found in runs.items()}
            wrong += faults(pair, own, [prompt]).values()
            compared += len(own) - 1
    flat = [entropy(pair, prompt, run) for prompt, run in zip(some, runs[PLAIN], strict=False)]
    again = [repeated(run.tokens[0]) for run in runs[PLAIN][: len(some)]]
    records = []
    for name, own in runs.items():
        record = {"kind": kind, "temperature": temperature, "draft": name}
        record["entropy"] = sum(sum_ for sum_, _ in flat) / sum(length for _, length in flat)
        record["repeated"] = sum(n for n, _ in again) / max(sum(total for _, total in again), 1)
        record["article"] = ARTICLE[kind] if name == MODEL else ""
        record |= with_estimate("tokens_a_call", tokens_a_call(own, len(some)))
        record |= with_estimate("speed", speedup(runs[PLAIN], own, len(some)))
        if name != PLAIN:
            record |= with_estimate("alpha", accepted_of_tested(own, len(some)))
            record |= with_estimate("share", accepted_of_drafted(own, len(some)))
        records.append(record)
    return records, wrong, compared


def make(bench: Bench) -> Result:
    """Make the table."""
    pair = load_pair()
    records: list[dict[str, Any]] = []
    wrong: list[str] = []
    compared = 0
    for temperature in TEMPERATURES:
        for kind, every in prompts(pair).items():
            some = every[:2] if bench.options.quick else every
            own, bad, texts = measure(pair, kind, some, temperature, bench.options)
            records += own
            wrong += bad
            compared += texts
    verdict = "FAIL" if wrong else "PASS"
    return Result(
        "When it helps (article 004), the shipped pair of Python-code models",
        [
            Column("kind", "text"),
            Column("temperature", "T", "g"),
            Column("draft", "draft"),
            Column("entropy", "entropy (nats)"),
            Column("repeated", "repeated"),
            Column("alpha", "accepted / tested"),
            Column("share", "accepted / drafted"),
            Column("tokens_a_call", "tokens a call"),
            Column("speed", "speed"),
            Column("article", "the article"),
        ],
        records,
        notes=[
            f"gamma {GAMMA}, of lookup {LOOKUP_GAMMA}; {bench.options.tokens} new tokens a prompt. "
            "*Code*: openings of modules of the standard library that the models have not read; "
            "*facts*: lists that are known by heart, as literals; *free text*: openings of "
            "stories. *Entropy* is that of the target's law at T = 1 over what plain decoding "
            "wrote, *repeated* the share of its runs of four tokens that it had written before.",
            "The article gives no figures. It counts code, facts and low temperatures as good "
            "fits, free writing and high temperatures as poor ones, of chat models. This target "
            "has 5 million parameters and has read Python alone: it knows neither the lists nor "
            "how to write stories, and at low temperatures it falls into loops, which lookups "
            "follow. Facts and free text are kinds of prompt here, not of knowledge.",
            *COUNTS,
        ],
        bars=[
            f"T 0: {compared} texts compared with plain decoding, {len(wrong)} differ by more "
            f"than a tie: {verdict}"
        ],
        faults=wrong,
        draw=lambda pyplot: draw(pyplot, records),
    )


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw tokens a call over temperature, a line for each kind of text and draft."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for draft, style in ((MODEL, "-"), (LOOKUP, "--")):
        for number, kind in enumerate(ARTICLE):
            own = [r for r in records if (r["kind"], r["draft"]) == (kind, draft)]
            errors = [0.0 if math.isnan(r["tokens_a_call_se"]) else r["tokens_a_call_se"]
                      for r in own]  # fmt: skip
            axes.errorbar(
                [r["temperature"] for r in own], [r["tokens_a_call"] for r in own], yerr=errors,
                fmt="o" + style, color=f"C{number}", label=f"{kind}, {draft}",
            )  # fmt: skip
    axes.set_xlabel("temperature")
    axes.set_ylabel("tokens a call")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
