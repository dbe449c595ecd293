"""Every constant of the model, each with its source.

The sources: *review*, the rough model behind the review of commit 5e73e22, good to about 30 %;
*Luo*, the microbenchmarks of Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU
Architecture via Microbenchmarking" (arXiv 2402.13499); *NVIDIA*, data sheets and the CUDA C++
Programming Guide. None was measured by this project yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latencies:
    """Cycles until a result is there."""

    shared: int = 30  # Luo: 29
    generic: int = 8  # review: more than `shared`, through an address of no known space
    l1: int = 36  # review; Luo: 41 on an H100
    l2: int = 270  # Luo: 263
    dram: int = 650  # review; Luo: 479 when nothing else is under way, without a miss of the TLB
    shared_atomic: int = 60  # review
    global_atomic: int = 600  # review
    fence: int = 500  # review: __threadfence after stores
    local: int = 36  # as l1, where spilled registers and stacks lie
    shuffle: int = 24  # review; also REDUX
    vote: int = 12  # review
    barrier: int = 25  # review: from the last arrival until the block goes on
    branch: int = 10  # review: a branch that is taken
    divergence: int = 10  # review: a warp that parts
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
    gap: float = 1.3  # microseconds between two kernels of a stream or graph (review)
    chained_gap: float = 0.7  # the same where the second one is launched early (assumed)


#: The review's predictions are for this one: its goals are in microseconds on it.
H200 = Gpu(
    name="H200",
    multiprocessors=132,
    gigahertz=1.755,  # review; NVIDIA: boost 1.98
    l2_megabytes=50,
    read_gigabytes=4300,  # issue 15: the read ceiling of an H200; NVIDIA: 4,800
    l2_gigabytes=5500,  # Chips and Cheese, "NVIDIA's H100: Funny L2, and Tons of Bandwidth"
)

H100 = Gpu(
    name="H100",
    multiprocessors=132,
    gigahertz=1.755,
    l2_megabytes=50,
    read_gigabytes=3000,  # issue 15; NVIDIA: 3,350
    l2_gigabytes=5500,
)

GPUS = {gpu.name: gpu for gpu in (H200, H100)}
