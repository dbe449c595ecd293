"""Runs blocks of a launch: what they compute, and how many cycles they take.

Warps at the same place in the code go on together (one NumPy call for all of them), always those
that are furthest behind in the code, so that lanes that parted meet again. Each warp has a clock of
its own: an instruction begins when the warp has issued what comes before it and all that it reads
has arrived. A block's barrier ends with its last warp; that warp's instructions since the barrier
before are what the block waited for, and together they are the block's critical path.

Blocks that wait for each other run together: what others may see, or see of others, happens in the
order of the clocks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .machine import H200, Gpu
from .memory import GlobalMemory
from .semantics import LANES, Chosen, Kind, Mask, Operation, Program, State

Warps = NDArray[np.int64]


class Group(NamedTuple):
    """Warps at one place, each with the lanes that are there (None: all)."""

    warps: Warps
    mask: Mask


@dataclass
class BlockRun:
    """What a block took."""

    block: int
    cycles: float  # that it takes, waiting for the launch before left out
    hidden: float  # of them: the launch before was still running
    instructions: int  # of the machine, by all warps
    path: dict[int, float]  # cycles of the critical path by place in the code


@dataclass
class LaunchRun:
    """What some blocks of a launch took."""

    program: Program
    blocks: list[BlockRun]
    opcodes: Counter[str] = field(default_factory=Counter)  # warps' instructions of PTX

    @property
    def cycles(self) -> float:
        """Those of the slowest block."""
        return max(block.cycles for block in self.blocks)


class Simulation:
    """Some blocks of one launch.

    Parameters
    ----------
    program : Program
        The kernel.
    blocks : sequence of int
        Which blocks.
    grid, threads : int
        How many blocks the launch has, and how many threads each.
    parameters : bytes
        As `Program.pack` gives them.
    memory : GlobalMemory
        What the blocks share; it is written to.
    together : bool
        Whether the blocks may wait for each other.
    gpu : Gpu
        Tells how long a nanosecond is.
    early : float
        How many cycles after its begin a block learns that the launch before has ended.
    """

    def __init__(
        self,
        program: Program,
        blocks: Sequence[int],
        grid: int,
        threads: int,
        parameters: bytes,
        memory: GlobalMemory,
        together: bool = False,
        gpu: Gpu = H200,
        early: float = 0.0,
    ) -> None:
        self.program = program
        self.operations = program.operations
        self.latencies = program.latencies
        self.gigahertz = gpu.gigahertz
        self.together = together
        self.early = early
        self.blocks = list(blocks)
        self.state = State(program, blocks, threads, parameters, grid, memory)
        warps = self.state.warps
        self.per_block = threads // LANES
        self.clock = np.zeros(warps)
        self.ready = np.zeros((len(program.types), warps))
        self.issued = np.zeros(warps, np.int64)
        self.alive = np.ones((warps, LANES), bool)
        self.waited = np.zeros(warps, bool)  # for the launch before
        self.reached = np.zeros(len(blocks))  # when a block's last warp came to that
        self.spent = np.zeros((warps, len(self.operations)), np.float32)  # since the last barrier
        self.paths: list[Counter[int]] = [Counter() for _ in blocks]
        self.opcodes: Counter[str] = Counter()
        # When a block has an instruction, and when all of them have: never, before one asks for it.
        self.code = np.full((len(self.operations), len(blocks)), np.inf, np.float32)
        self.latest_code = np.full(len(self.operations), np.inf)
        self.places: list[int] = []  # a heap
        self.waiting: dict[int, list[Group]] = {}  # by place, those that can go on
        self.parked: list[tuple[float, int, int, Group]] = []  # a heap, by clock
        self.parkings = 0
        self.at_barrier = np.zeros((warps, LANES), bool)
        self.barrier = np.full(warps, -1)
        self.meeting: dict[int, NDArray[np.bool_]] = {}  # lanes at a collective, by place

    def run(self) -> LaunchRun:
        """Run the blocks to their ends."""
        self._go_on(0, Group(np.arange(self.state.warps), None))
        with np.errstate(all="ignore"):
            while self.places or self.parked:
                if self.places:
                    place = heapq.heappop(self.places)
                    self._run_from(place, self._merged(self.waiting.pop(place)), False)
                else:
                    self._run_from(*self._next_turn(), True)
        if self.alive.any():
            raise RuntimeError(self._stuck())
        ends = self.clock.reshape(len(self.blocks), self.per_block).max(1)
        issued = self.issued.reshape(len(self.blocks), self.per_block).sum(1)
        hidden = np.minimum(self.reached, self.early)
        waited = np.where(self.reached > 0, self.early - hidden, 0)
        runs = [
            BlockRun(
                block,
                float(ends[k] - waited[k]),
                float(hidden[k]),
                int(issued[k]),
                dict(self.paths[k]),
            )
            for k, block in enumerate(self.blocks)
        ]
        return LaunchRun(self.program, runs, self.opcodes)

    def _stuck(self) -> str:
        warp = int(np.argmax(self.alive.any(1)))
        where = sorted({str(self.operations[p].instruction) for p in self.meeting})
        return (
            f"block {self.blocks[self.state.block[warp]]}: threads wait for others that never "
            f"come, at a barrier of the block: {bool(self.at_barrier[warp].any())}, at {where}"
        )

    # ---- groups ---

    def _go_on(self, place: int, group: Group) -> None:
        if place not in self.waiting:
            self.waiting[place] = []
            heapq.heappush(self.places, place)
        self.waiting[place].append(group)

    def _merged(self, groups: list[Group]) -> Group:
        if len(groups) == 1:
            return groups[0]
        everything = np.concatenate([group.warps for group in groups])
        warps, row = np.unique(everything, return_inverse=True)
        mask = np.zeros((len(warps), LANES), bool)
        start = 0
        for group in groups:
            rows = row[start : start + len(group.warps)]
            mask[rows] |= True if group.mask is None else group.mask
            start += len(group.warps)
        return Group(warps, None if mask.all() else mask)

    def _chosen(self, group: Group) -> Chosen:
        return slice(None) if len(group.warps) == self.state.warps else group.warps

    def _park(self, place: int, group: Group) -> None:
        """Let the warps of a group wait for their turn, each by itself."""
        for row, warp in enumerate(group.warps):
            mask = None if group.mask is None else group.mask[row : row + 1]
            self.parkings += 1
            entry = (self.clock[warp], self.parkings, place, Group(np.array([warp]), mask))
            heapq.heappush(self.parked, entry)

    def _next_turn(self) -> tuple[int, Group]:
        """Give the parked warp whose clock is first; if it only looks, with others that do so.

        Looks change nothing for each other, and whoever looks does nothing else before its result
        has come from the L2.
        """
        first = heapq.heappop(self.parked)
        clock, _, place, group = first
        groups, others = [group], []
        if self.operations[place].looks:
            until = clock + self.latencies.l2
            while self.parked and self.parked[0][0] < until:
                if not self.operations[self.parked[0][2]].looks:
                    break
                entry = heapq.heappop(self.parked)
                if entry[2] == place:
                    groups.append(entry[3])
                else:
                    others.append(entry)
        for entry in others:
            heapq.heappush(self.parked, entry)
        return place, self._merged(groups)

    # ---- execution ---

    def _run_from(self, place: int, group: Group, has_turn: bool) -> None:
        """Execute one instruction after another until the group parts, waits or meets others."""
        while True:
            if self.places and place >= self.places[0]:
                self._go_on(place, group)
                return
            operation = self.operations[place]
            if self.together and operation.shared_by_blocks and not has_turn:
                self._park(place, group)
                return
            has_turn = False
            self.opcodes[".".join(operation.instruction.opcode)] += len(group.warps)
            chosen = self._chosen(group)
            start = self._begin(place, operation, chosen)
            mask = group.mask
            if operation.predicate is not None and operation.kind is not Kind.BRANCH:
                mask = operation.predicate(self.state, chosen)
                mask = mask if group.mask is None else mask & group.mask
                mask = None if mask.all() else mask
            kind = operation.kind
            if kind is Kind.COMPUTE:
                if mask is None or mask.any():
                    assert operation.execute is not None
                    operation.execute(self.state, chosen, mask)
                self._finish(operation, chosen, start, operation.latency)
            elif kind is Kind.MEMORY:
                if mask is None or mask.any():
                    assert operation.execute is not None
                    latency = operation.execute(self.state, chosen, mask, start)
                    self._finish(operation, chosen, start, latency)
            elif kind is Kind.BRANCH:
                following = self._branch(place, operation, group, chosen)
                if following is None:
                    return
                place, group = following
                continue
            elif kind is Kind.EXIT:
                remaining = self._leave(group, chosen, mask)
                if remaining is None:
                    return
                group = remaining
            elif kind is Kind.BARRIER:
                self._arrive(place, group, chosen)
                return
            elif kind is Kind.COLLECTIVE:
                together = self._meet(place, operation, group, chosen)
                if together is None:
                    return
                if len(together.warps) != len(group.warps) or together.mask is not group.mask:
                    # Others came later: the rest of this round is theirs.
                    group, chosen = together, self._chosen(together)
                    start = self.clock[chosen]
                assert operation.execute is not None
                operation.execute(self.state, chosen, group.mask)
                self._finish(operation, chosen, start, operation.latency)
            elif kind is Kind.CHAIN:
                self._wait_for_launch_before(chosen)
            elif kind is Kind.FENCE:
                self._pause(place, chosen, self.latencies.fence)
            elif kind is Kind.COPIES:
                assert operation.execute is not None
                until = operation.execute(self.state, chosen)
                self._pause(place, chosen, np.maximum(until - self.clock[chosen], 0))
            elif kind is Kind.SLEEP:
                assert operation.execute is not None
                nanoseconds = float(np.max(operation.execute(self.state, chosen)))
                self._pause(place, chosen, nanoseconds * self.gigahertz)
            place += 1

    def _begin(self, place: int, operation: Operation, chosen: Chosen) -> Any:
        """Issue an instruction; the clocks when that is done."""
        clock = self.clock[chosen]
        sources = operation.sources
        if operation.issue == 0:  # folded into whoever reads its result
            if sources is None:
                return np.zeros(len(clock))
            return self.ready[sources[:, 0]][:, chosen].max(0)
        start = self._fetch(place, operation, chosen, clock) + operation.issue
        if sources is not None:
            rows = self.ready[sources[:, 0]] if isinstance(chosen, slice) else None
            arrived = rows if rows is not None else self.ready[sources, chosen]
            start = np.maximum(start, arrived.max(0))
        self.spent[chosen, place] += start - clock
        self.clock[chosen] = start
        self.issued[chosen] += operation.issue
        return start

    def _fetch(self, place: int, operation: Operation, chosen: Chosen, clock: Any) -> Any:
        """Give the clocks when an instruction is there; the first warp of a block asks for it."""
        if self.latest_code[place] <= clock.min():
            return clock
        times, blocks = self.code[place], self.state.block[chosen]
        missing = np.isinf(times[blocks])
        if missing.any():
            after = clock[missing] + self.latencies.fetch * operation.issue
            np.minimum.at(times, blocks[missing], after)
            self.latest_code[place] = times.max()
        return np.maximum(clock, times[blocks])

    def _finish(self, operation: Operation, chosen: Chosen, start: Any, latency: Any) -> None:
        for number in operation.targets:
            self.ready[number, chosen] = start + latency

    def _pause(self, place: int, chosen: Chosen, cycles: Any) -> None:
        self.clock[chosen] += cycles
        self.spent[chosen, place] += cycles

    def _wait_for_launch_before(self, chosen: Chosen) -> None:
        """Let warps go on when it has ended; that takes no cycles of theirs."""
        clock, first = self.clock[chosen], ~self.waited[chosen]
        np.maximum.at(self.reached, self.state.block[chosen][first], clock[first])
        self.waited[chosen] = True
        self.clock[chosen] = np.maximum(clock, self.early)

    def _branch(
        self, place: int, operation: Operation, group: Group, chosen: Chosen
    ) -> tuple[int, Group] | None:
        target = operation.target
        if operation.predicate is None:
            self._pause(place, chosen, self.latencies.branch)
            return target, group
        condition = operation.predicate(self.state, chosen)
        there = np.ones(condition.shape, bool) if group.mask is None else group.mask
        there = np.broadcast_to(there, (len(group.warps), LANES))
        taken = there & condition
        falling = there & ~condition
        jumps, falls = taken.any(1), falling.any(1)
        cycles = self.latencies.branch * jumps + self.latencies.divergence * (jumps & falls)
        self.clock[chosen] += cycles
        self.spent[chosen, place] += cycles
        if not falls.any():
            return target, group
        if not jumps.any():
            return place + 1, group
        for following, lanes, warps in ((target, taken, jumps), (place + 1, falling, falls)):
            mask = lanes[warps]
            self._go_on(following, Group(group.warps[warps], None if mask.all() else mask))
        return None

    def _leave(self, group: Group, chosen: Chosen, mask: Mask) -> Group | None:
        there = np.ones((len(group.warps), LANES), bool) if group.mask is None else group.mask
        gone = there if mask is None else there & mask
        self.alive[group.warps] &= ~gone
        ended = ~self.alive[group.warps].any(1)
        for block in np.unique(self.state.block[group.warps[ended]]):
            warps = self._warps_of(block)
            if not self.alive[warps].any():
                self._close_interval(block, warps)
            else:
                self._release(block)
        rest = there & ~gone
        rows = rest.any(1)
        return Group(group.warps[rows], rest[rows]) if rows.any() else None

    # ---- meetings ---

    def _warps_of(self, block: int) -> Warps:
        return np.arange(block * self.per_block, (block + 1) * self.per_block)

    def _arrive(self, place: int, group: Group, chosen: Chosen) -> None:
        there = np.ones((len(group.warps), LANES), bool) if group.mask is None else group.mask
        self.at_barrier[group.warps] |= there
        self.barrier[group.warps] = place
        for block in np.unique(self.state.block[group.warps]):
            self._release(int(block))

    def _release(self, block: int) -> None:
        """Let a block's threads go on if all are at the barrier."""
        warps = self._warps_of(block)
        if (self.alive[warps] & ~self.at_barrier[warps]).any():
            return
        warps = warps[self.alive[warps].any(1)]
        places = set(self.barrier[warps].tolist())
        if len(places) != 1 or not len(warps):
            raise RuntimeError(f"threads of a block are at different barriers: {places}")
        (place,) = places
        operation = self.operations[place]
        end = self._close_interval(block, self._warps_of(block)) + self.latencies.barrier
        self.paths[block][place] += self.latencies.barrier
        self.clock[warps] = end
        alive = self.alive[warps]
        if operation.execute is not None:
            operation.execute(self.state, warps, alive)
        self._finish(operation, warps, self.clock[warps], 0)
        self.at_barrier[warps] = False
        self._go_on(place + 1, Group(warps, None if alive.all() else alive))

    def _close_interval(self, block: int, warps: Warps) -> float:
        """Add the slowest warp's cycles since the last barrier to the block's critical path."""
        slowest = warps[np.argmax(self.clock[warps])]
        spent = self.spent[slowest]
        for place in np.nonzero(spent)[0]:
            self.paths[block][int(place)] += float(spent[place])
        self.spent[warps] = 0
        return float(self.clock[slowest])

    def _meet(self, place: int, operation: Operation, group: Group, chosen: Chosen) -> Group | None:
        """Give the warps of which all lanes that shall meet are there; the others wait."""
        if group.mask is None and place not in self.meeting:
            return group
        assert operation.members is not None
        waiting = self.meeting.setdefault(place, np.zeros(self.alive.shape, bool))
        members = np.broadcast_to(operation.members(self.state, chosen), (len(group.warps), LANES))
        there = np.ones(members.shape, bool) if group.mask is None else group.mask
        wanted = members[np.arange(len(members)), there.argmax(1)]
        lanes = (wanted[:, None] >> np.arange(LANES, dtype=np.uint32) & 1).astype(bool)
        waiting[group.warps] |= there
        missing = lanes & self.alive[group.warps] & ~waiting[group.warps]
        complete = ~missing.any(1)
        warps = group.warps[complete]
        mask = waiting[warps] & lanes[complete]
        waiting[warps] &= ~mask
        if not waiting.any():
            del self.meeting[place]
        if not len(warps):
            return None
        return Group(warps, None if mask.all() else mask)
