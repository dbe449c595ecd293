"""Figures 2 to 4 of Leviathan et al. (arXiv 2211.17192): curves of formulas, measured points.

Table 1 of the paper, which is figure 4's formulas at six points, stands with figure 4.
"""

from __future__ import annotations

from typing import Any

from contestants import Run

from specdec_ext import theory
from tables import paper
from tables.costs import clocked, total
from tables.decode import (
    PLAIN,
    accepted_of_tested,
    decode_at,
    loop_only,
    model_way,
    speedup,
    tokens_a_call,
)
from tables.expected import corrected_factor, expected_rounds
from tables.shared import Bench, Column, Result, with_estimate

TEMPERATURES = (0.0, 1.0)
ALPHAS = [k / 100 for k in range(0, 100)]

KEY = [Column("temperature", "T", "g"), Column("draft", "draft"), Column("gamma", "gamma", "d")]
DIFFERS = (
    "The paper's figure has the curves alone; points are measured here, with rule `token` (at T = "
    "0 `greedy`), one sentence at a time."
)


def decoded(
    bench: Bench, drafts: list[str], gammas: tuple[int, ...]
) -> tuple[dict[tuple[float, str, int], tuple[list[Run], list[Run]]], list[str], list[str]]:
    """Decode at both temperatures; return plain and own runs of each way, faults, and bars."""
    found: dict[tuple[float, str, int], tuple[list[Run], list[Run]]] = {}
    faults: list[str] = []
    bars: list[str] = []
    gammas = gammas[-2:] if bench.options.quick else gammas
    for temperature in TEMPERATURES:
        ways, keys = {}, {}
        for name in drafts:
            for gamma in gammas:
                key = f"{name}, gamma {gamma}"
                keys[key] = temperature, name, gamma
                ways[key] = model_way(bench, bench.drafts[name], gamma, temperature)
        runs, wrong, lines = decode_at(bench, temperature, ways)
        faults += wrong
        bars += lines
        found |= {keys[key]: (runs[PLAIN], runs[key]) for key in keys}
    return found, faults, bars


def records_of(key: tuple[float, str, int]) -> dict[str, Any]:
    """Begin a record."""
    return dict(zip(("temperature", "draft", "gamma"), key, strict=True))


# ---- figure 2 ------------------------------------------------------------------------------------


def figure2(bench: Bench) -> Result:
    """Tokens a call over alpha, by gamma: equation 1 and measured."""
    found, faults, bars = decoded(bench, list(bench.drafts), (3, 7))
    number, records = len(bench.sentences), []
    for key, (_, own) in found.items():
        tested, gamma = accepted_of_tested(own, number), key[2]
        lengths = [run.num_tokens for run in own]
        rounds = sum(expected_rounds(tested.mean, gamma, length) for length in lengths)
        records.append(
            records_of(key)
            | with_estimate("accepted_of_tested", tested)
            | with_estimate("tokens_a_call", tokens_a_call(own, number))
            | {
                "expected": theory.expected_tokens(tested.mean, gamma),
                "of_lengths": sum(lengths) / rounds,
            }
        )
    columns = [
        *KEY,
        Column("accepted_of_tested", "accepted / tested", ".3f"),
        Column("tokens_a_call", "tokens a call"),
        Column("expected", "by equation 1"),
        Column("of_lengths", "and the texts' lengths"),
    ]
    notes = [
        "Equation 1, (1 - alpha^(gamma + 1)) / (1 - alpha), is about long texts; the last column "
        "takes the sentences' lengths into account, the rounds that their ends cut short.",
        DIFFERS,
    ]

    def draw(pyplot: Any) -> Any:
        figure, axes = pyplot.subplots(figsize=(6, 4.5))
        for gamma in (1, 3, 5, 7, 10):
            curve = [theory.expected_tokens(alpha, gamma) for alpha in ALPHAS]
            axes.plot(ALPHAS, curve, label=f"gamma = {gamma}", linewidth=1)
        for gamma, mark in ((3, "s"), (7, "o")):
            own = [r for r in records if r["gamma"] == gamma]
            axes.errorbar(
                [r["accepted_of_tested"] for r in own], [r["tokens_a_call"] for r in own],
                [r["tokens_a_call_se"] for r in own], fmt=mark, color="black", capsize=2,
                label=f"measured, gamma = {gamma}",
            )  # fmt: skip
        axes.set_xlabel("alpha (measured: accepted / tested)")
        axes.set_ylabel("tokens a call")
        axes.legend(fontsize=8)
        return figure

    title = f"Tokens a target call: {bench.task}, target {bench.target_name}"
    return Result(title, columns, records, notes, bars, faults, draw)


# ---- figure 3 ------------------------------------------------------------------------------------


def figure3(bench: Bench) -> Result:
    """The best gamma over alpha, by c: numerically, and measured for the smallest draft."""
    smallest = next(iter(bench.drafts))
    found, faults, bars = decoded(bench, [smallest], (1, 2, 3, 4, 5, 6, 8, 10))
    number, records = len(bench.sentences), []
    for key, (plain, own) in found.items():
        alpha, costs = accepted_of_tested(own, number).mean, clocked(plain, own)
        records.append(
            records_of(key)
            | with_estimate("measured", speedup(plain, own, number, loop_only))
            | {"alpha": alpha, "c": costs.c, "r": costs.r}
            | {"expected": theory.walltime_factor(alpha, key[2], costs.c)}
            | {"corrected": corrected_factor(alpha, key[2], costs.c, costs.r)}
        )
    for temperature in TEMPERATURES:
        own = [r for r in records if r["temperature"] == temperature]
        best = max(own, key=lambda r: r["measured"])
        alpha, c = (sum(r[name] for r in own) / len(own) for name in ("alpha", "c"))
        for record in own:
            record["best_gamma"] = theory.optimal_gamma(alpha, c, limit=32)
            record["best_measured"] = best["gamma"]
    columns = [
        *KEY,
        Column("alpha", "accepted / tested", ".3f"),
        Column("c", "c", ".3f"),
        Column("r", "r"),
        Column("measured", "speed-up"),
        Column("expected", "by Theorem 3.8"),
        Column("corrected", "with r"),
        Column("best_measured", "best gamma, measured", "d"),
        Column("best_gamma", "by Theorem 3.8", "d"),
    ]
    notes = [
        "r is the time of a target call on gamma + 1 tokens, c that of a draft call, both in calls "
        "of the target on one token, by the loop's clock. The best gamma by Theorem 3.8 is at the "
        "means of alpha and c over the rows of a temperature; 0 says not to draft.",
        DIFFERS,
    ]

    def draw(pyplot: Any) -> Any:
        figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.3))
        for c in (0.01, 0.02, 0.05, 0.1, 0.2):
            curve = [theory.optimal_gamma(alpha, c, limit=100) for alpha in ALPHAS]
            panels[0].plot(ALPHAS, curve, label=f"c = {c:g}", linewidth=1)
        for temperature in TEMPERATURES:
            own = [r for r in records if r["temperature"] == temperature]
            alpha = sum(r["alpha"] for r in own) / len(own)
            label = f"measured, T = {temperature:g}"
            panels[0].plot(
                alpha, own[0]["best_measured"], "k" + "so"[int(temperature)], label=label
            )
            gammas = [r["gamma"] for r in own]
            line = panels[1].errorbar(
                gammas, [r["measured"] for r in own], [r["measured_se"] for r in own], marker="o",
                capsize=2, label=label,
            )  # fmt: skip
            color = line[0].get_color()
            panels[1].plot(gammas, [r["expected"] for r in own], ":", color=color)
            panels[1].plot(gammas, [r["corrected"] for r in own], "--", color=color)
        panels[0].set(xlabel="alpha", ylabel="best gamma", ylim=(0, 30))
        panels[1].set(xlabel="gamma", ylabel="speed-up (dotted: Theorem 3.8; dashed: with r)")
        for axes in panels:
            axes.legend(fontsize=8)
        return figure

    title = f"The best gamma: {bench.task}, target {bench.target_name}, draft {smallest}"
    return Result(title, columns, records, notes, bars, faults, draw)


# ---- figure 4 and Table 1 ------------------------------------------------------------------------


def figure4(bench: Bench) -> Result:
    """Speed and operations over alpha, by gamma: the formulas, Table 1, and counted."""
    found, faults, bars = decoded(bench, list(bench.drafts), (2, 5))
    records = [of_table1(*row) for row in paper.OPERATIONS]
    right = all(
        abs(r["operations"] - r["paper_operations"]) < 0.0051
        and abs(r["calls_saved"] - r["paper_speed"]) < 0.0051
        for r in records
    )
    bars.append(f"Table 1 to two digits: {'PASS' if right else 'FAIL'}")
    number = len(bench.sentences)
    for key, (_, own) in found.items():
        tested, counts = accepted_of_tested(own, number), total(own)
        share = decoder_parameters(bench.drafts[key[1]]) / decoder_parameters(bench.target)
        records.append(
            records_of(key)
            | {"alpha": tested.mean, "share": share}
            | {"operations": (counts.drafted * (1 + share) + counts.rounds) / counts.emitted}
            | {"operations_expected": theory.operations_factor(tested.mean, key[2], share)}
            | with_estimate("calls_saved", tokens_a_call(own, number))
            | {"calls_expected": theory.expected_tokens(tested.mean, key[2])}
        )
    columns = [
        *KEY,
        Column("alpha", "alpha", ".3f"),
        Column("share", "c-hat", ".3f"),
        Column("operations", "operations"),
        Column("operations_expected", "by section 3.4"),
        Column("calls_saved", "fewer target calls"),
        Column("calls_expected", "by equation 1"),
        Column("paper_operations", "paper: operations"),
        Column("paper_speed", "speed"),
    ]
    notes = [
        "Operations of decoding by those of plain decoding, and target calls saved, which is the "
        "speed-up where a draft costs nothing. Rows without a draft are the formulas, c and c-hat "
        "being 0, beside Table 1 of the paper; the others are counted while decoding: a call on n "
        "tokens takes n times the operations of one, a draft's are c-hat of the target's (by the "
        "parameters of the decoders and output layers).",
        DIFFERS,
    ]

    def draw(pyplot: Any) -> Any:
        figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.3))
        for gamma in (1, 2, 3, 5, 7, 10):
            fewer = [theory.expected_tokens(alpha, gamma) for alpha in ALPHAS]
            more = [theory.operations_factor(alpha, gamma) for alpha in ALPHAS]
            panels[0].plot(ALPHAS, fewer, label=f"gamma = {gamma}", linewidth=1)
            panels[1].plot(ALPHAS, more, linewidth=1)
        own = [r for r in records if "draft" in r]
        points = [r["alpha"] for r in own]
        panels[0].plot(points, [r["calls_saved"] for r in own], "k.", label="counted")
        panels[1].plot(points, [r["operations"] for r in own], "k.")
        panels[0].set(xlabel="alpha", ylabel="speed-up of a free draft")
        panels[1].set(xlabel="alpha", ylabel="operations", ylim=(1, 6))
        panels[0].legend(fontsize=8)
        return figure

    title = f"Speed and operations: {bench.task}, target {bench.target_name}"
    return Result(title, columns, records, notes, bars, faults, draw)


def of_table1(alpha: float, gamma: int, operations: float, speed: float) -> dict[str, Any]:
    """Compute a row of the paper's Table 1."""
    return {
        "alpha": alpha,
        "gamma": gamma,
        "operations": theory.operations_factor(alpha, gamma),
        "calls_saved": theory.expected_tokens(alpha, gamma),
        "paper_operations": operations,
        "paper_speed": speed,
    }


def decoder_parameters(model: Any) -> int:
    """Count what a token is multiplied with: the decoder, and the output layer tied to it."""
    return sum(p.numel() for p in model.get_decoder().parameters())
