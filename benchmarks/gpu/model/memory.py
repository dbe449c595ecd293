"""Global memory of a launch: chunks of a process's memory, copied when they are first touched.

Kernels write into the copies, so a block can be run here before it runs elsewhere; what was written
is then compared with what it left there. For each line of 128 bytes there is the time from which on
the L2 has it, and the blocks that have read it since it was last written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 16
LINE = 128
PAGE = 4096
LINES = CHUNK // LINE
WORD = 8
POISON = 0xCD  # what memory of a block holds before it is written

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]  # of bytes in all copies together
Addresses = NDArray[np.uint64]

#: Gives the bytes at an address, or raises OSError where there are none.
Read = Callable[[int, int], bytes]


class ProcessMemory:
    """Reads the memory of this very process, and sees what is not mapped."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/mem", os.O_RDONLY)

    def __call__(self, address: int, size: int) -> bytes:
        """Read; OSError where nothing is."""
        data = os.pread(self._file, size, address)
        if len(data) < size:
            raise OSError(f"{size} bytes at {address:#x} were expected, {len(data)} are mapped")
        return data

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Comparison(NamedTuple):
    """How the bytes of two memories compare, in words of 8 bytes that either has written."""

    same: int
    close: int  # other rounding: equal to 1e-5 as float64, two float32 or uint64
    different: int

    @property
    def agrees(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return self.different == 0


class GlobalMemory:
    """The copies."""

    def __init__(self, read: Read, cold: Sequence[range] = ()) -> None:
        self._read = read
        self._cold = cold  # addresses whose first reading comes from DRAM
        self._slots: dict[int, int] = {}  # by number of the chunk
        self._holes: set[int] = set()  # chunks that are not wholly mapped
        self._data = np.zeros((0, CHUNK), np.uint8)
        self._before = np.zeros((0, CHUNK), np.uint8)
        self._written = np.zeros((0, CHUNK), bool)
        self.arrival = np.zeros(0)  # by line
        self._readers = np.zeros((0, 1), bool)  # by line and block: it is in that block's L1
        self.touched = np.zeros(0, bool)  # by line: read by somebody

    def places(self, addresses: Addresses) -> Places:
        """Find the places of addresses, in copies that are made where there is none."""
        chunks = addresses >> np.uint64(16)
        first = chunks.flat[0]
        offsets = (addresses & np.uint64(CHUNK - 1)).astype(np.int64)
        if (chunks == first).all():
            found = offsets + self._slot(int(first)) * CHUNK
        else:
            unique, inverse = np.unique(chunks, return_inverse=True)
            slots = np.array([self._slot(int(chunk)) for chunk in unique])
            found = slots[inverse].reshape(addresses.shape) * CHUNK + offsets
        if self._holes and self._holes.intersection(np.unique(chunks).tolist()):
            for page in np.unique(addresses >> np.uint64(12)).tolist():
                self._read(page * PAGE, 1)
        return found

    def view(self, dtype: np.dtype) -> NDArray:
        """View all copies as a vector of a type."""
        return self._data.reshape(-1).view(dtype)

    def _slot(self, chunk: int) -> int:
        slot = self._slots.get(chunk)
        if slot is None:
            slot = self._slots[chunk] = len(self._slots)
            if slot == len(self._data):
                self._grow(max(16, 2 * slot))
            self._data[slot] = self._before[slot] = self._content(chunk)
            starts = chunk * CHUNK + np.arange(LINES) * LINE
            cold = np.zeros(LINES, bool)
            for addresses in self._cold:
                cold |= (starts + LINE > addresses.start) & (starts < addresses.stop)
            self.arrival[slot * LINES : (slot + 1) * LINES] = np.where(cold, np.inf, -np.inf)
        return slot

    def _grow(self, slots: int) -> None:
        more = slots - len(self._data)
        self._data = np.concatenate([self._data, np.zeros((more, CHUNK), np.uint8)])
        self._before = np.concatenate([self._before, np.zeros((more, CHUNK), np.uint8)])
        self._written = np.concatenate([self._written, np.zeros((more, CHUNK), bool)])
        self.arrival = np.concatenate([self.arrival, np.zeros(more * LINES)])
        room = np.zeros((more * LINES, self._readers.shape[1]), bool)
        self._readers = np.concatenate([self._readers, room])
        self.touched = np.concatenate([self.touched, np.zeros(more * LINES, bool)])

    def _content(self, chunk: int) -> Bytes:
        start = chunk * CHUNK
        try:
            return np.frombuffer(self._read(start, CHUNK), np.uint8)
        except OSError:
            self._holes.add(chunk)
        content = np.full(CHUNK, 0xFF, np.uint8)
        for offset in range(0, CHUNK, PAGE):
            try:
                page = self._read(start + offset, PAGE)
            except OSError:
                continue
            content[offset : offset + PAGE] = np.frombuffer(page, np.uint8)
        return content

    def write(self, places: Places, size: int) -> None:
        """Note stores of so many bytes: the L2 has the lines, no block's L1 does."""
        written = self._written.reshape(-1)
        for offset in range(size):
            written[places + offset] = True
        lines = places // LINE
        self.arrival[lines] = -np.inf
        self._readers[lines] = False

    def is_near(self, lines: NDArray, blocks: NDArray) -> NDArray:
        """Whether the L1 of blocks has lines."""
        missing = int(blocks.max()) + 1 - self._readers.shape[1]
        if missing > 0:
            self._readers = np.pad(self._readers, ((0, 0), (0, missing)))
        return self._readers[lines, blocks]

    def come_near(self, lines: NDArray, blocks: NDArray) -> None:
        """Put lines into the L1 of blocks that `is_near` was asked about."""
        self._readers[lines, blocks] = True

    @property
    def cold_bytes(self) -> int:
        """The bytes that came from DRAM."""
        return int((np.isfinite(self.arrival) & self.touched).sum()) * LINE

    @property
    def read_bytes(self) -> int:
        """The bytes of lines that somebody read."""
        return int(self.touched.sum()) * LINE

    def compare(self, watched: Sequence[range] = ()) -> Comparison:
        """Compare what was written here with what the process's memory has become.

        What a structure has between its members is not compared: bytes that hold `POISON` here
        (copied from where nothing was written), and bytes that the process left as they were in a
        word that it has written to.

        Parameters
        ----------
        watched : sequence of range
            Addresses where whatever the process wrote is compared, too; elsewhere only what was
            written here is (a process writes to much of its memory for reasons of its own).
        """
        total = np.zeros(3, np.int64)
        for chunk, slot in self._slots.items():
            now, here, before = self._content(chunk), self._data[slot], self._before[slot]
            compared = self._written[slot].copy()
            starts = chunk * CHUNK + np.arange(CHUNK)
            untouched = np.repeat(~compared.reshape(-1, WORD).any(1), WORD)  # not padding, either
            for addresses in watched:
                inside = (starts >= addresses.start) & (starts < addresses.stop)
                compared |= inside & (now != before) & untouched
            written_there = (now != before).reshape(-1, WORD).any(1)
            compared &= (here != POISON) & ((now != before) | ~np.repeat(written_there, WORD))
            words = compared.reshape(-1, WORD).any(1)
            a, b = (np.where(compared, x, 0).view(np.uint64)[words] for x in (here, now))
            same = a == b
            close = ~same & _close(a, b)
            total += (same.sum(), close.sum(), (~same & ~close).sum())
        return Comparison(*map(int, total))


def _close(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.bool_]:
    def near(x: NDArray, y: NDArray) -> NDArray[np.bool_]:
        with np.errstate(all="ignore"):
            return np.abs(x - y) <= 1e-5 * np.maximum(np.abs(x), np.abs(y))

    with np.errstate(all="ignore"):
        halves = [x.view(np.float32).astype(np.float64).reshape(-1, 2) for x in (a, b)]
    bits = a.view(np.uint32).reshape(-1, 2) == b.view(np.uint32).reshape(-1, 2)
    as_floats = (near(halves[0], halves[1]) | bits).all(1)
    as_doubles = near(a.view(np.float64), b.view(np.float64))
    return as_floats | as_doubles | near(a.astype(np.float64), b.astype(np.float64))
