"""The report's Table 5: large and small, large and base, and the hierarchy of all three."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec_ext.decoding import HierarchicalDrafter
from tables.decode import PLAIN, Reading, Way, model_way, plain_way, speculative
from tables.report2 import DIFFERENCES, REPORT_COLUMNS, draw, printed
from tables.rows import COLUMNS, MEANING, by_temperature, size
from tables.shared import Bench, Result

SMALL, BASE, GAMMA, TEMPERATURES = "small", "base", 3, (0.0, 1.0)
REFILLED = "large + base + small, the report's"
ROUNDS = "large + base + small, further inner rounds"

# (task, row) to "Avg. Bleu Score" and speed, as printed.
REPORT = {
    ("translation", "large + small"): (0.723, 2.68),
    ("translation", "large + base"): (0.730, 1.13),
    ("translation", REFILLED): (0.728, 1.46),
}


def hierarchy(medium: Any, small: Any, gamma: int, refill: bool) -> Callable[[Reading], Any]:
    """Return what makes a hierarchy of two drafts for a sentence."""

    def drafter(reading: Reading) -> HierarchicalDrafter:
        return HierarchicalDrafter(
            reading.by(medium), reading.by(small), gamma, rule="token", refill=refill
        )

    return drafter


def make(bench: Bench) -> Result:
    """Make the table."""
    small, base = size(bench, SMALL), size(bench, BASE)

    def ways(temperature: float) -> dict[str, Way]:
        found = {
            PLAIN: plain_way(bench, temperature),
            "large + small": model_way(bench, small, GAMMA, temperature),
            "large + base": model_way(bench, base, GAMMA, temperature),
        }
        for name, refill in ((REFILLED, True), (ROUNDS, False)):
            drafting = hierarchy(base, small, GAMMA, refill)
            found[name] = speculative(bench, drafting, GAMMA, temperature)
        return found

    measured = by_temperature(bench, ways, TEMPERATURES)
    for record in measured.records:
        record |= printed(bench, record["way"], REPORT)
    return Result(
        f"Hierarchy (the report's Table 5), {bench.task}",
        [*COLUMNS, *(column for column in REPORT_COLUMNS if column.key != "report_alpha")],
        measured.records,
        notes=[
            f"gamma {GAMMA} at both levels. The report does not say its own; its figures for large "
            "and small are those of its Table 2 at gamma 3.",
            "*The report's* hierarchy asks the small model once a draft and lets the base model "
            "write the rest token by token. As printed there, the token after a rejection comes "
            "from the base model's law; here from the residual, without which the law is biased. "
            "*Further inner rounds* asks the small model again until the draft is full.",
            *MEANING,
            DIFFERENCES,
        ],
        bars=measured.bars,
        faults=measured.faults,
        draw=lambda pyplot: draw(pyplot, measured.records),
    )
