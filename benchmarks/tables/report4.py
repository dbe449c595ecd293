"""The report's Table 4: a draft length that climbs the wall-time equation by its gradient."""

from __future__ import annotations

from specdec_ext import theory
from specdec_ext.decoding import GradientAscent, RenewalRule
from tables.decode import PLAIN, Way, by_model, model_way, plain_way
from tables.report2 import DIFFERENCES, DRAFT, REPORT_COLUMNS, draw, printed
from tables.rows import COLUMNS, MEANING, by_temperature, cost_ratio, size
from tables.shared import Bench, Column, Result

GAMMAS, LIMIT, TEMPERATURES = (1, 3, 5, 7), 12, (0.0, 1.0)
ASCENT = "gradient ascent"

# (task, row) to "Avg. Bleu Score", alpha and speed, as printed.
REPORT = {
    ("translation", ASCENT): (0.71, 0.68, 2.61),
    ("summarisation", ASCENT): (0.35, 0.47, 2.33),
}


def make(bench: Bench) -> Result:
    """Make the table."""
    draft = size(bench, DRAFT)
    c = cost_ratio(bench, by_model(draft))

    def ways(temperature: float) -> dict[str, Way]:
        policies = {f"gamma {gamma}": gamma for gamma in GAMMAS}
        policies[ASCENT] = GradientAscent(c, limit=LIMIT)
        policies["renewal rule"] = RenewalRule(limit=LIMIT)
        return {PLAIN: plain_way(bench, temperature)} | {
            name: model_way(bench, draft, policy, temperature) for name, policy in policies.items()
        }

    measured = by_temperature(bench, ways, TEMPERATURES)
    best = []
    for record in measured.records:
        record["c"] = c
        record |= printed(bench, record["way"], REPORT)
        if record["way"] == ASCENT:
            alpha = min(record["alpha"], 0.99)
            best.append(
                f"At T {record['temperature']:g} the wall-time equation has its maximum, at that "
                f"row's accepted / tested, at gamma {theory.optimal_gamma(alpha, c)}."
            )
        own = measured.runs[f"{record['way']}, T {record['temperature']:g}"]
        rounds = sum(run.statistics.request_calls for run in own)
        record["mean_gamma"] = sum(run.statistics.drafted for run in own) / rounds
    return Result(
        f"Varying gamma (the report's Table 4), {bench.task}",
        [*COLUMNS, Column("mean_gamma", "drafted a call", ".1f"), *REPORT_COLUMNS],
        measured.records,
        notes=[
            f"Draft: {DRAFT}; c = {c:.3f}, the measured time of its call in calls of the target. "
            "*Gradient ascent* starts every text at gamma 5, knows of that text alone, and takes "
            "accepted / tested for alpha; the report's running average seems to be of accepted / "
            "drafted. *Renewal rule* is this package's own policy, which learns from text to text; "
            "the report has no such row.",
            *best,
            *MEANING,
            DIFFERENCES,
        ],
        bars=measured.bars,
        faults=measured.faults,
        draw=lambda pyplot: draw(pyplot, measured.records),
    )
