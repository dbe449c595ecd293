"""What all tables share: what they are made from, what they return, how that is written."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import markdown_table, write_record
from torch import Tensor

from specdec_ext.theory import Estimate, ratio

# Unless the command line says otherwise: sentences of the test split to decode, new tokens of each
# at most, and tokens that the target generates where acceptance is measured on its text.
FULL = {"sentences": 40, "tokens": 128, "text_tokens": 10_000}
QUICK = {"sentences": 3, "tokens": 10, "text_tokens": 100}

# Those of `benchmarks/tasks`, and what ``pair/seq2seq prepare translation --reverse`` makes.
TASKS = ("translation-reverse", "translation", "summarisation", "correction")


class Sentence(NamedTuple):
    """A pair of the test split, as tokens; both sides end with the end token."""

    source: list[int]
    reference: list[int]


@dataclass
class Bench:
    """What a table is made from.

    Parameters
    ----------
    family : Family
        Models of several sizes over one vocabulary, the smallest first, and their data; what
        `pair.seq2seq.models.load_family` returns.
    options : argparse.Namespace
        The command line: ``sentences``, ``tokens``, ``text_tokens``,
        ``repeats``, ``seed``, ``quick``, ``task``.
    """

    family: Any
    options: argparse.Namespace

    @property
    def task(self) -> str:
        """The task that the models were trained on, which their folder's name begins with."""
        folder = str(self.options.task.name)
        return next((task for task in TASKS if folder.startswith(task)), folder)

    @property
    def target_name(self) -> str:
        """The largest size."""
        return list(self.family.models)[-1]

    @property
    def target(self) -> Any:
        """The largest model."""
        return self.family.models[self.target_name]

    @property
    def drafts(self) -> dict[str, Any]:
        """All other models, the smallest first."""
        return {n: model for n, model in self.family.models.items() if n != self.target_name}

    @property
    def device(self) -> torch.device:
        """Where the models are: on the CPU, where a table brings its own."""
        if self.family is None:
            return torch.device("cpu")
        device: torch.device = self.target.device
        return device

    @cached_property
    def sentences(self) -> list[Sentence]:
        """As many pairs of the test split as were asked for, evenly spread over it."""
        return self.some("test", self.options.sentences)

    def some(self, split: str, number: int) -> list[Sentence]:
        """Return at most so many pairs of a split, evenly spread over it."""
        pairs = self.family.splits[split].some(number)
        return [Sentence(*pair) for pair in zip(pairs.sources, pairs.targets, strict=True)]


class Column(NamedTuple):
    """A column of what is shown: a key of the records, its heading, and how values are written.

    Where the records have a key that ends in ``_se`` beside it, it is shown in parentheses.
    """

    key: str
    heading: str
    form: str = ".2f"

    def cell(self, record: Mapping[str, Any]) -> str:
        """Format a record's value; "-" where it has none."""
        value = record.get(self.key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        if isinstance(value, str):
            return value
        error = record.get(f"{self.key}_se")
        shown = format(value, self.form)
        if error is None or math.isnan(error):
            return shown
        return f"{shown} ({format(error, self.form.lstrip('+'))})"


@dataclass
class Result:
    """A table.

    Attributes
    ----------
    title : str
        Its heading.
    columns : sequence of Column
        What is shown of the records; the CSV has all of them.
    records : list of dict
        One a row.
    notes : list of str
        What a number means, and in what the run differs from the paper's.
    bars : list of str
        Lines that end in PASS or FAIL.
    faults : list of str
        Where output was wrong; the exit code is 1 if there are any.
    draw : callable, optional
        Draws the picture: ``draw(pyplot)`` returns a figure.
    """

    title: str
    columns: Sequence[Column]
    records: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    bars: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    draw: Callable[[Any], Any] | None = None

    def text(self) -> str:
        """Format everything but the picture as Markdown."""
        rows = [[column.cell(record) for column in self.columns] for record in self.records]
        parts = [f"# {self.title}", markdown_table([c.heading for c in self.columns], rows)]
        for lines in (self.bars, self.faults, self.notes):
            if lines:
                parts.append("\n".join(f"- {line}" for line in lines))
        return "\n\n".join(parts)


def with_estimate(key: str, estimate: Estimate) -> dict[str, float]:
    """Return a mean and its standard error as two entries of a record."""
    return {key: estimate.mean, f"{key}_se": estimate.standard_error}


def estimate_over(groups: Sequence[Tensor]) -> Estimate:
    """Estimate the mean of observations ``[T_b]`` that come from independent sentences."""
    sums = torch.tensor([float(group.sum()) for group in groups], dtype=torch.float64)
    return ratio(sums, torch.tensor([len(group) for group in groups]))


def write_result(stem: Path, facts: Mapping[str, Any], result: Result) -> list[Path]:
    """Write a table: .json with the machine's facts, .csv, .md and, if it draws one, .png.

    Parameters
    ----------
    stem : Path
        Where, without suffix.
    facts : mapping
        What the run depended on; the Markdown says it, too.
    result : Result
        The table.

    Returns
    -------
    list of Path
        What was written.

    Raises
    ------
    ImportError
        There is a picture to draw, and matplotlib is not installed.
    """
    records = [
        {key: None if value != value else value for key, value in record.items()}  # no NaN in JSON
        for record in result.records
    ]
    said = ", ".join(f"{name} {value}" for name, value in facts.items())
    checked = {"bars": result.bars, "faults": result.faults}
    write_record(stem, {**facts, **checked}, records, f"{result.text()}\n\n{said}.")
    written = [stem.with_suffix(suffix) for suffix in (".json", ".csv", ".md")]
    if result.draw is not None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure = result.draw(pyplot)
        written.append(stem.with_suffix(".png"))
        figure.savefig(written[-1], dpi=110, bbox_inches="tight")
        pyplot.close(figure)
    return written
