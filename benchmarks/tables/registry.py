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
}


def maker(name: str) -> Callable[[Bench], Result]:
    """Return the function that makes a table."""
    make: Callable[[Bench], Result] = import_module(TABLES[name].module).make
    return make
