"""Which tables there are: a name, the module that makes it, and what it shows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from tables.shared import Bench, Result


class Entry(NamedTuple):
    """A table: ``module`` has a function ``make(bench) -> Result``."""

    module: str
    shows: str


TABLES = {
    "table2": Entry("tables.table2", "speed by drafter, temperature, gamma (Leviathan, Table 2)"),
    "table3": Entry("tables.table3", "alpha on text of the target (Leviathan, Table 3)"),
    "table4": Entry("tables.table4", "expected and measured speed-up (Leviathan, Table 4)"),
    "table5": Entry("tables.table5", "alpha under lenience (Leviathan, Table 5)"),
}


def maker(name: str) -> Callable[[Bench], Result]:
    """Return the function that makes a table."""
    make: Callable[[Bench], Result] = import_module(TABLES[name].module).make
    return make
