"""Microseconds of a launch, from what the model knows of its blocks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .launches import Launched
from .machine import Gpu

DECIDES = "decide"  # how the names of launches that decide begin
DRAWS = "draw"  # and of those that draw the last token

#: Cycles at most (issue 15), of a call with B 32 and a deterministic draft. Of a launch those count
#: that follow the end of the launch before.
DECIDE_CYCLES = 5_000
LAST_DRAW_CYCLES = 6_000
CALL_CYCLES = 35_000


@dataclass(frozen=True)
class Prediction:
    """One launch."""

    launch: Launched
    gpu: Gpu

    @property
    def slots(self) -> int:
        """Blocks that the GPU holds at once."""
        return self.gpu.multiprocessors * self.launch.resident

    @property
    def waves(self) -> int:
        """How often the GPU is filled with blocks."""
        return -(-self.launch.blocks // self.slots)

    @property
    def typical(self) -> float:
        """Cycles of a block in the middle of the sample."""
        return statistics.median(block.cycles for block in self.launch.block_runs)

    @property
    def slowest(self) -> float:
        """Cycles of the slowest block of the sample, where the one with most barriers is."""
        return max(block.cycles for block in self.launch.block_runs)

    @property
    def remaining(self) -> float:
        """Cycles of the slowest block from the end of the launch before on."""
        return max(block.cycles - block.hidden for block in self.launch.block_runs)

    @property
    def cycles(self) -> float:
        """Waves times cycles after the launch before: its duration if only latency counts."""
        if self.launch.together:
            return self.remaining
        return (self.waves - 1) * self.typical + self.remaining

    @property
    def instructions(self) -> float:
        """Machine instructions of a block."""
        return statistics.mean(block.instructions for block in self.launch.block_runs)

    @property
    def issue_cycles(self) -> float:
        """Cycles of the fullest multiprocessor if only issue slots count."""
        blocks = -(-self.launch.blocks // self.gpu.multiprocessors)
        busy = self.launch.scale * len(self.launch.block_runs) / self.launch.blocks
        return blocks * busy * self.instructions / (self.gpu.schedulers * self.gpu.issue)

    def bounds(self) -> dict[str, float]:
        """Give the microseconds that each bound asks for."""
        clock = self.gpu.gigahertz * 1e3
        dram = self.launch.cold_bytes / self.gpu.read_gigabytes / 1e3
        cache = self.launch.read_bytes / self.gpu.l2_gigabytes / 1e3
        return {
            "latency": self.cycles / clock,
            "issue": self.issue_cycles / clock,
            "memory": max(dram, cache),
        }

    @property
    def microseconds(self) -> float:
        """Predict the kernel's duration: its tightest bound."""
        return max(self.bounds().values())

    @property
    def bound(self) -> str:
        """Name the tightest bound."""
        bounds = self.bounds()
        return max(bounds, key=lambda name: bounds[name])

    @property
    def gap(self) -> float:
        """Predict the microseconds until the kernel begins."""
        return self.gpu.chained_gap if self.launch.chained else self.gpu.gap

    @property
    def agrees(self) -> bool:
        """Whether the blocks left in memory what the stand-in's left there."""
        return all(comparison.agrees for comparison in self.launch.comparisons)


def total(predictions: Sequence[Prediction]) -> float:
    """Predict the microseconds of a call."""
    return sum(p.microseconds + p.gap for p in predictions)


def over_budget(predictions: Sequence[Prediction]) -> list[str]:
    """Say what of a call is above its budget of cycles."""

    def of(start: str) -> list[Prediction]:
        return [p for p in predictions if p.launch.name.startswith(start)]

    deciding, drawing = of(DECIDES), of(DRAWS)
    costs = [
        (
            f"cycles of {DECIDES}",
            [p.remaining for p in deciding],
            # Where nothing else draws, the launch that decides does.
            DECIDE_CYCLES + (0 if drawing else LAST_DRAW_CYCLES),
        ),
        ("waves x cycles of the call", [sum(p.cycles for p in predictions)], CALL_CYCLES),
    ]
    if drawing:
        of_draw = [p.remaining for p in drawing]
        costs.append((f"cycles of the last block of {DRAWS}", of_draw, LAST_DRAW_CYCLES))
    found = [f"{what}: no such launch" for what, values, _ in costs if not values]
    found += [
        f"{what}: {value:,.0f} predicted, the budget is {most:,}"
        for what, values, most in costs
        for value in values
        if value > most
    ]
    return found
