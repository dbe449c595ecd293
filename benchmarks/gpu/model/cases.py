"""The calls that are predicted: those of the review, bfloat16 logits that no cache has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import tree_times
from torch import Tensor

from gpu import bench, tables

VOCAB = 151_936
GAMMA = 5
CHAINS = "verify.cu"
TREES = "verify_tree.cu"


class Call(NamedTuple):
    """A call of an operator, ready to be made."""

    operator: str
    arguments: dict[str, Any]
    rows: list[Tensor]  # logits
    floor_bytes: float  # that any implementation must read

    def addresses(self) -> list[range]:
        """Give where the logits are."""
        return [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in self.rows]


@dataclass(frozen=True)
class Case:
    """A row of the review's table."""

    name: str
    source: str  # of its kernels, in csrc/cuda
    goal: float  # microseconds on an H200 (issue 15)
    make: Callable[[int], Call]  # given the entries of a vocabulary
    budgeted: bool = False  # whether it has budgets of cycles


def _chain(batch: int, drafter: str, rule: str, filters: str = "temperature") -> Any:
    def make(vocab: int) -> Call:
        cell = tables.Cell(drafter, filters, batch, GAMMA, vocab)
        generator = torch.Generator().manual_seed(1)
        inputs = bench.make_inputs(cell, generator, torch.device("cpu"))
        case = bench.case_of(cell, inputs, rule)
        rows = [x for x in (inputs.target, inputs.draft) if x is not None]
        return Call("verify", dict(case.inputs), rows, cell.floor_bytes(0.0))

    return make


def _tree(batch: int, nodes: int, **filters: float) -> Any:
    def make(vocab: int) -> Call:
        setting = tree_times.Setting(batch, nodes, "bfloat16", vocab)
        inputs = tree_times.make_inputs(setting, 1)
        rows = [inputs.target, inputs.draft]
        parents = set(inputs.parents[0].tolist()) - {-1}
        read = batch * (nodes + len(parents)) * vocab * 2
        given = {name: torch.full((batch,), value) for name, value in filters.items()}
        return Call("verify_tree", inputs.arguments("traversal") | given, rows, read)

    return make


def _cases() -> list[Case]:
    found = []
    for batch, drafter, goal in (
        (32, "deterministic", 20),
        (32, "dense", 37),
        (1, "deterministic", 12),
        (1, "dense", 12),
    ):
        for rule in tables.RULES:
            name = f"B {batch} {drafter}, {rule}"
            make = _chain(batch, drafter, rule)
            budgeted = (batch, drafter) == (32, "deterministic")
            found.append(Case(name, CHAINS, goal, make, budgeted))
    for drafter, rule, goal in (
        ("deterministic", "token", 34),
        ("dense", "token", 70),
        ("dense", "block", 70),
    ):
        name = f"B 32 {drafter}, top-k + top-p, {rule}"
        found.append(Case(name, CHAINS, goal, _chain(32, drafter, rule, "top_k+top_p")))
    found.append(Case("tree N 64, B 8", TREES, 138, _tree(8, 64)))
    filtered = _tree(8, 64, top_k=50, top_p=0.95)
    found.append(Case("tree N 64, B 8, top-k + top-p", TREES, 148, filtered))
    return found


CASES = _cases()
