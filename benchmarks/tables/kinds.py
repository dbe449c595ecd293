"""Draft kinds on one target (article 004): how much of each is accepted, and what it gains."""

from __future__ import annotations

from typing import Any

from specdec_ext.decoding import (
    AggressiveDrafter,
    BanditDrafter,
    EarlyExitDrafter,
    HierarchicalDrafter,
    LookupDrafter,
    NgramDrafter,
    StackedDrafter,
    UniformDrafter,
)
from tables.decode import PLAIN, Drafting, Reading, Way, by_model, plain_way, speculative
from tables.rows import COLUMNS, COUNTS, by_temperature, cost_ratio
from tables.shared import Bench, Column, Result

GAMMA, COPIED, INNER, TEMPERATURES = 4, 10, 2, (0.0, 1.0)
TEXTS, QUICK_TEXTS = 4000, 8  # of the training split, that n-grams are counted in

# What the article calls typical of a kind, with the models that it names.
SMALLER, DISTILLED, HALF = "75 to 85 % (8B for 70B)", "85 to 95 %", "70 to 80 %"
TINY = "60 to 75 % (1B for 70B)"


def counted_texts(bench: Bench) -> list[list[int]]:
    """Return the texts that n-grams are counted in."""
    number = QUICK_TEXTS if bench.options.quick else TEXTS
    targets: list[list[int]] = bench.family.splits["train"].some(number).targets
    return targets


def ngrams(bench: Bench, orders: tuple[int, ...]) -> dict[int, Drafting]:
    """Return drafts by n-gram models counted in texts of the training split, by order."""
    texts = counted_texts(bench)
    vocabulary = bench.target.config.vocab_size
    models = {order: NgramDrafter(vocabulary, order, texts=texts) for order in orders}
    return {order: lambda reading, model=model: model for order, model in models.items()}


def early_exit(bench: Bench, layers: int) -> Drafting:
    """Return drafts by the first layers of the target's decoder."""
    return lambda reading: EarlyExitDrafter(reading.by(bench.target), layers)


def several(
    bench: Bench, kind: type[StackedDrafter] | type[BanditDrafter], names: list[str],
    **options: Any,
) -> Drafting:  # fmt: skip
    """Return drafts by a lookup in the source beside models, of which each round has one."""

    def drafter(reading: Reading) -> Any:
        models = [reading.by(bench.drafts[name]) for name in names]
        return kind(LookupDrafter(reading.sources), *models, **options)

    return drafter


def kinds(bench: Bench) -> dict[str, tuple[Drafting, int, str]]:
    """Return all kinds: a drafter for a sentence, gamma, and what the article says of it."""
    counted = ngrams(bench, (1, 2, 3))
    vocabulary = bench.target.config.vocab_size
    layers = bench.target.config.num_decoder_layers
    found: dict[str, tuple[Drafting, int, str]] = {
        "uniform": (lambda reading: UniformDrafter(vocabulary), GAMMA, ""),
        "unigram": (counted[1], GAMMA, ""),
        "bigram": (counted[2], GAMMA, ""),
        "trigram": (counted[3], GAMMA, ""),
        "lookup in the output": (lambda reading: LookupDrafter(), COPIED, ""),
        "lookup in source and output": (
            lambda reading: LookupDrafter(reading.sources), COPIED, "",
        ),
        "aggressive": (
            lambda reading: AggressiveDrafter(reading.sources), bench.options.tokens, "",
        ),
    }  # fmt: skip
    names = list(bench.drafts)
    for name, draft in bench.drafts.items():
        share = draft.num_parameters() / bench.target.num_parameters()
        found[f"model {name}"] = (by_model(draft), GAMMA, TINY if share < 0.05 else SMALLER)
    for name, draft in bench.family.distilled.items():
        found[f"model {name}"] = (by_model(draft), GAMMA, DISTILLED)
    if len(names) > 1:
        medium, small = bench.drafts[names[-1]], bench.drafts[names[0]]
        found[f"hierarchy {names[-1]} over {names[0]}"] = (
            lambda reading: HierarchicalDrafter(reading.by(medium), reading.by(small), INNER),
            GAMMA,
            "",
        )
    for part in sorted({max(layers // 4, 1), max(layers // 2, 1)}):
        said = HALF if part == layers // 2 else ""
        found[f"early exit, {part} of {layers} layers"] = (early_exit(bench, part), GAMMA, said)
    if not names:
        return found
    found[f"lookup, else {names[0]}"] = (
        several(bench, StackedDrafter, names[:1]), GAMMA, "",
    )  # fmt: skip
    costs = [0.0, *(cost_ratio(bench, by_model(bench.drafts[name])) for name in names)]
    found["bandit of lookup and models"] = (
        several(bench, BanditDrafter, names, costs=costs), GAMMA, "",
    )  # fmt: skip
    return found


def make(bench: Bench) -> Result:
    """Make the table."""
    every = kinds(bench)

    def ways(temperature: float) -> dict[str, Way]:
        return {PLAIN: plain_way(bench, temperature)} | {
            name: speculative(bench, drafting, gamma, temperature)
            for name, (drafting, gamma, _) in every.items()
        }

    measured = by_temperature(bench, ways, TEMPERATURES)
    taught = ", ".join(bench.family.distilled)
    for record in measured.records:
        drafting = every.get(record["way"])
        record["gamma"] = drafting[1] if drafting else 0
        record["article"] = drafting[2] if drafting else ""
    return Result(
        f"Draft kinds on one target (article 004), {bench.task}",
        [
            *COLUMNS[:2],
            Column("gamma", "gamma", "d"),
            *(column for column in COLUMNS[4:]),
            Column("article", "the article's typical acceptance"),
        ],
        measured.records,
        notes=[
            f"n-gram models are counted in {len(counted_texts(bench))} texts of the training split "
            "and in the text itself. Lookup and aggressive drafts are copies, tested as point "
            "masses. The bandit is told the models' measured costs.",
            "The article's ranges come without data, temperature or machine, for chat models of 1 "
            "to 70 billion parameters; which convention of acceptance they follow it does not say. "
            "A target that drafts with half of its layers needs to be trained for that, which this "
            "one was not. "
            + (
                f"Taught by the target: {taught}."
                if taught
                else f"For a distilled draft it says {DISTILLED}: none was trained here."
            ),
            *COUNTS,
        ],
        bars=measured.bars,
        faults=measured.faults,
        draw=lambda pyplot: draw(pyplot, measured.records),
    )


def draw(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw tokens a call and speed of every kind, one panel each, a mark for each temperature."""
    figure, panels = pyplot.subplots(1, 2, sharey=True, figsize=(11, 6))
    names = list(dict.fromkeys(record["way"] for record in records))
    for axes, key, label in zip(
        panels, ("tokens_a_call", "speed"), ("tokens a call", "times plain decoding"), strict=True
    ):
        for temperature in dict.fromkeys(record["temperature"] for record in records):
            own = [record for record in records if record["temperature"] == temperature]
            axes.errorbar(
                [record[key] for record in own], [names.index(record["way"]) for record in own],
                xerr=[record[f"{key}_se"] for record in own], fmt="o", label=f"T {temperature:g}",
            )  # fmt: skip
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set_xlabel(label)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=8)
    return figure
