"""Expected speed-up by Theorem 3.8 against the measured one, beside Leviathan et al., Table 4."""

from __future__ import annotations

from typing import Any

from specdec_ext import theory
from tables import paper
from tables.costs import clocked, forward_seconds, plain_rest
from tables.decode import (
    PLAIN,
    accepted_of_tested,
    decode_at,
    loop_only,
    model_way,
    speedup,
    tokens_a_call,
)
from tables.expected import corrected_factor, factor_of_lengths
from tables.forced import alpha_of, forced_texts
from tables.shared import Bench, Column, Result, with_estimate

# The paper's gammas, by temperature and the draft's place in order of size.
GAMMAS = {0.0: (7, 7, 7), 1.0: (7, 5, 3)}
BAR = 0.10

COLUMNS = [
    Column("temperature", "T", "g"),
    Column("draft", "draft"),
    Column("gamma", "gamma", "d"),
    Column("alpha", "alpha: sum min(p, q)", ".3f"),
    Column("accepted_of_tested", "accepted / tested", ".3f"),
    Column("c", "c", ".3f"),
    Column("c_forward", "c, models alone", ".3f"),
    Column("r", "r"),
    Column("tokens_expected", "tokens a call, expected"),
    Column("tokens_a_call", "measured"),
    Column("expected", "speed-up, expected"),
    Column("corrected", "with r"),
    Column("of_lengths", "with r and lengths"),
    Column("with_loop", "and the loop"),
    Column("measured", "measured"),
    Column("paper_draft", "paper: draft"),
    Column("paper_c", "c"),
    Column("paper_expected", "expected", ".1f"),
    Column("paper_measured", "measured", ".1f"),
]

NOTES = [
    "c: time of a draft call, and r: of a target call on gamma + 1 tokens, both in target calls on "
    "one token, by the loop's clock (the paper takes c from profiler traces, and r to be 1); "
    "`models alone` times the decoders' calls outside of the loop.",
    "`expected` is Theorem 3.8 at accepted / tested and c. `with r` corrects it by the measured "
    "cost of a longer target call; `lengths` also by the sentences' lengths, since the theorem is "
    "about long texts; `the loop` adds what a round of either takes beside the models. Draft "
    "tokens are taken to be accepted independently throughout.",
    "Measured is from the first round on, without encoders; rule `token`, the paper's Algorithm 1.",
    "What differs from the paper: models trained here on a CPU; the paper measures whole calls.",
]


def make(bench: Bench) -> Result:
    """Decode with every draft at the paper's gammas, and predict how fast that is."""
    records, faults, bars = [], [], []
    alone = forward_seconds(bench, bench.family.models, [1], budget=1.0)
    for temperature, gammas in GAMMAS.items():
        chosen = dict(zip(bench.drafts, gammas, strict=False))
        ways = {
            name: model_way(bench, bench.drafts[name], gamma, temperature)
            for name, gamma in chosen.items()
        }
        runs, wrong, lines = decode_at(bench, temperature, ways)
        faults += wrong
        bars += lines
        texts = forced_texts(bench, temperature)
        for name, gamma in chosen.items():
            record = {"temperature": temperature, "draft": name, "gamma": gamma}
            record |= with_estimate(
                "alpha", alpha_of(texts, bench.drafts[name], temperature=temperature)
            )
            record["c_forward"] = alone[name, 1] / alone[bench.target_name, 1]
            record |= predicted(bench, runs[PLAIN], runs[name], gamma)
            record |= of_paper(bench, name, temperature)
            records.append(record)
            bars += verdicts(record)
    return Result(
        f"Expected and measured speed-up: {bench.task}, target {bench.target_name}",
        COLUMNS,
        records,
        NOTES,
        bars,
        faults,
        lambda pyplot: draw(pyplot, records),
    )


def predicted(bench: Bench, plain: list[Any], own: list[Any], gamma: int) -> dict[str, float]:
    """Return what was measured of a way to decode, and what is expected of it."""
    number = len(bench.sentences)
    tested, measured = accepted_of_tested(own, number), speedup(plain, own, number, loop_only)
    costs, alpha = clocked(plain, own), tested.mean
    lengths = [run.num_tokens for run in own[:number]]
    of_lengths = factor_of_lengths(alpha, gamma, costs.c, costs.r, lengths)
    round_of_models = gamma * costs.c + costs.r
    loop = (1 + plain_rest(plain)) * round_of_models / (round_of_models + costs.rest)
    return (
        with_estimate("accepted_of_tested", tested)
        | with_estimate("tokens_a_call", tokens_a_call(own, number))
        | with_estimate("measured", measured)
        | costs._asdict()
        | {
            "tokens_expected": theory.expected_tokens(alpha, gamma),
            "expected": theory.walltime_factor(alpha, gamma, costs.c),
            "corrected": corrected_factor(alpha, gamma, costs.c, costs.r),
            "of_lengths": of_lengths,
            "with_loop": of_lengths * loop,
        }
    )


def verdicts(record: dict[str, Any]) -> list[str]:
    """Hold the measured speed-up against the expected ones."""
    lines = []
    for key, what in (
        ("corrected", "Theorem 3.8 corrected by r"),
        ("with_loop", "the same corrected by lengths and the loop, too"),
    ):
        off = record["measured"] / record[key] - 1
        verdict = "PASS" if abs(off) <= BAR else "FAIL"
        lines.append(
            f"T {record['temperature']:g}, {record['draft']}: measured {record['measured']:.2f}, "
            f"{what} {record[key]:.2f}: {100 * off:+.0f} % ({100 * BAR:.0f} % asked) {verdict}"
        )
    return lines


def of_paper(bench: Bench, draft: str, temperature: float) -> dict[str, Any]:
    """Return the row of the paper that a row stands beside."""
    other, row = paper.speed(bench.task, list(bench.drafts), draft, temperature)
    if row is None:
        return {}
    return {
        "paper_draft": other,
        "paper_c": row.c,
        "paper_expected": row.expected,
        "paper_measured": row.measured,
    }


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw measured speed-ups over expected ones: ours, and the paper's."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.6))
    measured, errors = [r["measured"] for r in records], [r["measured_se"] for r in records]
    for key, label, mark in (
        ("expected", "Theorem 3.8", "o"),
        ("corrected", "with r", "s"),
        ("with_loop", "with r, lengths and the loop", "^"),
    ):
        expected = [r[key] for r in records]
        panels[0].errorbar(expected, measured, errors, fmt=mark, capsize=2, label=label)
    known = [r for r in records if "paper_expected" in r]
    panels[1].plot(
        [r["paper_expected"] for r in known], [r["paper_measured"] for r in known], "kx",
        label="paper (T5-XXL), Theorem 3.8",
    )  # fmt: skip
    for axes in panels:
        axes.axline((1.0, 1.0), slope=1.0, color="grey", linewidth=0.8)
        axes.set(xlabel="expected speed-up", ylabel="measured")
        axes.legend(fontsize=8)
    return figure
