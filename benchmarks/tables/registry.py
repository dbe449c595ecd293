"""Which tables there are: a name, the module that makes it, and what it shows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from tables.shared import FULL, Bench, Result


class Entry(NamedTuple):
    """A table: ``module`` has a function ``make(bench) -> Result``."""

    module: str
    shows: str
    trained: bool = True  # whether it needs the models of ``--task``
    sentences: int = FULL["sentences"]  # by default


# Of the paper, and of the report and the article that follow it.
PAPER = {
    "table2": Entry("tables.table2", "speed by drafter, temperature, gamma (Leviathan, Table 2)"),
    "table3": Entry("tables.table3", "alpha on text of the target (Leviathan, Table 3)"),
    "table4": Entry("tables.table4", "expected and measured speed-up (Leviathan, Table 4)"),
    "table5": Entry("tables.table5", "alpha under lenience (Leviathan, Table 5)"),
}
FOLLOWERS = {
    "report1": Entry("tables.report1", "models by themselves, beams (the report's Table 1)"),
    "report2": Entry("tables.report2", "large and small at gamma 3 and 7 (the report's Table 2)"),
    "report4": Entry("tables.report4", "gamma by gradient ascent (the report's Table 4)"),
    "report5": Entry("tables.report5", "hierarchy of three models (the report's Table 5)"),
    "kinds": Entry("tables.kinds", "draft kinds on one target (article 004)", sentences=20),
    "copying": Entry("tables.copying", "aggressive and lookup drafts: bars (for correction)"),
    "domains": Entry(
        "tables.domains", "drafts of one domain on texts of another (article 004)", sentences=30
    ),
    "helps": Entry("tables.helps", "code, facts, free text: the shipped pair", trained=False),
}
TABLES = PAPER | FOLLOWERS


def maker(name: str) -> Callable[[Bench], Result]:
    """Return the function that makes a table."""
    make: Callable[[Bench], Result] = import_module(TABLES[name].module).make
    return make
