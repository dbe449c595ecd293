"""The report's Table 2: speculative decoding of the large model with the small one."""

from __future__ import annotations

from typing import Any

from tables.decode import PLAIN, Way, model_way, plain_way
from tables.rows import COLUMNS, MEANING, by_temperature, size
from tables.shared import Bench, Column, Result

DRAFT, GAMMAS, TEMPERATURES = "small", (3, 7), (0.0, 1.0)

# (task, gamma) to "Avg. Bleu Score", alpha and speed, as printed.
REPORT = {
    ("translation", 3): (0.73, 0.79, 2.68),
    ("translation", 7): (0.68, 0.55, 2.56),
    ("summarisation", 3): (0.37, 0.48, 2.11),
    ("summarisation", 7): (0.36, 0.33, 2.17),
}
REPORT_COLUMNS = [
    Column("report_bleu", "the report's BLEU"),
    Column("report_alpha", "its alpha"),
    Column("report_speed", "its speed"),
]
DIFFERENCES = (
    "The report: T5-Large (770 million parameters) with T5-Small or T5-Base (60 or 220 million), "
    "WMT English to German or CNN/DailyMail. It names neither temperature, number of texts nor "
    "hardware. Its BLEU is an average of sentences between 0 and 1; that it moves with gamma shows "
    "that texts were sampled, or that output was not the target's. Its alpha falls with gamma as "
    "accepted / drafted does; accepted / tested would not."
)


def printed(bench: Bench, key: Any, figures: dict[Any, tuple[float, ...]]) -> dict[str, float]:
    """Return what the report prints for a row of this task, as entries of a record."""
    names = [column.key for column in REPORT_COLUMNS]
    found = figures.get((bench.task, key))
    if found is None:
        return {}
    # Two figures: BLEU and speed.
    return dict(zip(names if len(found) == 3 else [names[0], names[2]], found, strict=True))


def make(bench: Bench) -> Result:
    """Make the table."""
    draft = size(bench, DRAFT)

    def ways(temperature: float) -> dict[str, Way]:
        found = {PLAIN: plain_way(bench, temperature)}
        for gamma in GAMMAS:
            found[f"{DRAFT}, gamma {gamma}"] = model_way(bench, draft, gamma, temperature)
        return found

    measured = by_temperature(bench, ways, TEMPERATURES)
    keys = {f"{DRAFT}, gamma {gamma}": gamma for gamma in GAMMAS}
    for record in measured.records:
        record["gamma"] = keys.get(record["way"], 0)
        record |= printed(bench, keys.get(record["way"]), REPORT)
    return Result(
        f"Large and small (the report's Table 2), {bench.task}",
        [*COLUMNS, *REPORT_COLUMNS],
        measured.records,
        notes=[*MEANING, DIFFERENCES],
        bars=measured.bars,
        faults=measured.faults,
        draw=lambda pyplot: draw(pyplot, measured.records),
    )


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw the speed of every row, and what the report prints for it."""
    rows = [record for record in records if record["way"] != PLAIN]
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.4 * len(rows)))
    places = range(len(rows))
    axes.errorbar(
        [record["speed"] for record in rows], places,
        xerr=[record["speed_se"] for record in rows], fmt="o", label="here",
    )  # fmt: skip
    told = [
        (record["report_speed"], k) for k, record in enumerate(rows) if "report_speed" in record
    ]
    if told:
        axes.plot(*zip(*told, strict=True), "x", label="the report")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_yticks(places, [f"{record['way']}, T {record['temperature']:g}" for record in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times plain decoding")
    axes.legend(fontsize=8)
    return figure
