"""Which tables there are: a name, the module that makes it, and what it shows."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from tables.shared import FULL, Bench, Result


class Entry(NamedTuple):
    """A table: ``module`` has a function ``make`` from a `Bench` to a `Result`."""

    module: str
    shows: str
    trained: bool = True  # whether it needs the models of ``--task``
    sentences: int = FULL["sentences"]  # by default
    make: str = "make"


# Of the paper, and of the report and the article that follow it.
PAPER = {
    "table2": Entry("tables.table2", "speed by drafter, temperature, gamma (Leviathan, Table 2)"),
    "table3": Entry("tables.table3", "alpha on text of the target (Leviathan, Table 3)"),
    "table4": Entry("tables.table4", "expected and measured speed-up (Leviathan, Table 4)"),
    "table5": Entry("tables.table5", "alpha under lenience (Leviathan, Table 5)"),
    "figure2": Entry("tables.figures", "tokens a call over alpha (Figure 2)", make="figure2"),
    "figure3": Entry("tables.figures", "the best gamma (Figure 3)", make="figure3"),
    "figure4": Entry("tables.figures", "speed, operations (Figure 4, Table 1)", make="figure4"),
    "figure5": Entry("tables.figure5", "a trace of the models' calls (Figure 5)"),
    "independence": Entry("tables.independence", "autocorrelation of beta (section 3.1)"),
    "sharpness": Entry("tables.sharpness", "alpha over temperature and top-p (section 4.2)"),
    "standardised": Entry("tables.standardised", "drafts sampled otherwise (section 6)"),
    "distilled": Entry("tables.distilled", "drafts taught by the target (section 6)"),
    "identical": Entry(
        "tables.identical", "greedy texts of every rule, all sentences", sentences=1_000_000
    ),
}
FOLLOWERS = {
    "report1": Entry("tables.report1", "models by themselves, beams (the report's Table 1)"),
    "report2": Entry("tables.report2", "large and small at gamma 3 and 7 (the report's Table 2)"),
    "report3": Entry("tables.report3", "beams (the report's Algorithm 2 and Table 3)"),
    "report4": Entry("tables.report4", "gamma by gradient ascent (the report's Table 4)"),
    "report5": Entry("tables.report5", "hierarchy of three models (the report's Table 5)"),
    "kinds": Entry("tables.kinds", "draft kinds on one target (article 004)", sentences=16),
    "copying": Entry("tables.copying", "aggressive and lookup drafts: bars (for correction)"),
    "domains": Entry(
        "tables.domains", "drafts of one domain on texts of another (article 004)", sentences=24
    ),
    "helps": Entry("tables.helps", "code, facts, free text: the shipped pair", trained=False),
}
# Of Xia et al. (arXiv 2203.16487); they need a drafter that was trained for the task.
XIA = {
    "xia1": Entry("tables.xia", "blocks, smaller models, beams (Xia, Tables 1, 14)", make="table1"),
    "xia2": Entry("tables.xia", "all trained drafters (Xia, Table 2)", make="table2"),
    "xia3": Entry("tables.xia", "sizes of a block (Xia, Table 3)", make="table3"),
    "xia4": Entry("tables.xia", "beta and tau (Xia, Tables 4, 6)", make="table4"),
    "xia5": Entry("tables.xia", "English texts, ROUGE (Xia, Table 5)", make="table5"),
    "xia8": Entry("tables.xia_memory", "peak memory by batch (Xia, Tables 8, 9)"),
    "xia15": Entry("tables.xia_energy", "energy, where there is a GPU (Xia, Table 15)"),
    "xia_figure3": Entry("tables.xia_attention", "cross attention (Xia, Figure 3)"),
    "xia_figure5": Entry("tables.xia_figures", "batches (Xia, Figure 5)", make="figure5"),
    "xia_figure6": Entry("tables.xia_figures", "single sentences (Xia, Figure 6)", make="figure6"),
}
TABLES = PAPER | FOLLOWERS | XIA


def maker(name: str) -> Callable[[Bench], Result]:
    """Return the function that makes a table."""
    entry = TABLES[name]
    make: Callable[[Bench], Result] = getattr(import_module(entry.module), entry.make)
    return make
