"""Every constant of the model, each with its source.

The sources: *measured*, by benchmarks/gpu/latencies.cu and bench.py on an H200 (the record
gpu-nvidia-h200-2026-11-26); *review*, the rough model behind the review of commit 5e73e22, good to
about 30 %; *NVIDIA*, data sheets and the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latencies:
    """Cycles until a result is there."""

    shared: int = 29  # measured
    generic: int = 8  # review: more than `shared`, through an address of no known space
    l1: int = 40  # measured
    l2: int = 340  # measured, over 8 MB
    dram: int = 680  # measured, over 4 GB, when nothing else is under way
    shared_atomic: int = 60  # review
    global_atomic: int = 512  # measured
    fence: int = 590  # measured: __threadfence after a store
    local: int = 40  # as l1, where spilled registers and stacks lie
    shuffle: int = 26  # measured
    reduce: int = 43  # measured: REDUX
    vote: int = 12  # review
    barrier: int = 25  # measured: from the last arrival until the block goes on
    branch: int = 10  # review: a branch that is taken
    divergence: int = 10  # review: a warp that parts
    #: Of each machine instruction that a block has not executed yet. Fitted to that record's four
    #: calls of one request, which take 22, 22, 28 and 41 us: the model says 23, 23, 27 and 37 with
    #: it, and 15, 15, 16 and 21 without it.
    fetch: float = 8
    call: int = 60  # review: a function that was not inlined, its saved registers included


@dataclass(frozen=True)
class Gpu:
    """What a GPU has."""

    name: str
    multiprocessors: int
    gigahertz: float  # under load
    l2_megabytes: float
    read_gigabytes: float  # a second, of plain reads of memory: the read ceiling
    l2_gigabytes: float  # a second, of reads that L2 has
    schedulers: int = 4  # of a multiprocessor, a warp instruction a cycle each (NVIDIA)
    issue: float = 0.8  # of their slots that kernels like these fill at best (assumed)
    gap: float = 0.6  # microseconds between two kernels of a graph (measured, of empty ones)
    chained_gap: float = 0.5  # the same where the second one is launched early (measured likewise)


#: The review's predictions are for this one: its goals are in microseconds on it.
H200 = Gpu(
    name="H200",
    multiprocessors=132,
    gigahertz=1.98,  # measured, under all that is timed here
    l2_megabytes=50,
    read_gigabytes=4590,  # measured; NVIDIA: 4,800
    l2_gigabytes=5500,  # Chips and Cheese, "NVIDIA's H100: Funny L2, and Tons of Bandwidth"
)

H100 = Gpu(
    name="H100",
    multiprocessors=132,
    gigahertz=1.755,  # review
    l2_megabytes=50,
    read_gigabytes=3000,  # issue 15; NVIDIA: 3,350
    l2_gigabytes=5500,
)

GPUS = {gpu.name: gpu for gpu in (H200, H100)}
