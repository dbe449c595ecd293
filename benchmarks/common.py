"""What benchmarks share: interleaved timing, the read bandwidth, machine facts, writers, plot."""

from __future__ import annotations

import csv
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"

#: Something to time: given the number of the call, so that it can take turns over its inputs.
Contestant = Callable[[int], object]


# -------------------------------------------------------------------------------------------------
# Timing
# -------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Seconds of one contestant."""

    calls: int
    min: float
    median: float
    p90: float


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Find what waits for a device's queue; nothing to wait for on a CPU."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the ratio of two sums over independent pairs, and its standard error by linearization.

    The error of a single pair is NaN.
    """
    n = len(pairs)
    above, below = (sum(column) for column in zip(*pairs, strict=True))
    squares = sum((a - above / below * b) ** 2 for a, b in pairs)
    return above / below, (squares * n / (n - 1)) ** 0.5 / below if n > 1 else math.nan


def measure(
    contestants: Mapping[str, Contestant],
    *,
    budget: float = 1.0,
    min_rounds: int = 5,
    max_rounds: int = 200,
    slice_seconds: float = 0.004,
    device: torch.device | None = None,
) -> dict[str, Timing]:
    """Time contestants by turns (A B C, A B C, ...), so that noise hits all of them alike.

    Parameters
    ----------
    contestants : mapping
        Name to callable. Each is called twice before anything counts.
    budget : float
        Seconds for all rounds together; at least `min_rounds` are done anyway.
    min_rounds, max_rounds : int
        Bounds on the number of rounds.
    slice_seconds : float
        In each round a contestant is called until about this much time has passed (1 to 16 times),
        so that fast ones get more samples.
    device : torch.device, optional
        Where the work is done; CPU by default.

    Returns
    -------
    dict
        Name to `Timing`.
    """
    wait = synchronizer(device or torch.device("cpu"))

    def timed(name: str, call: int) -> float:
        begin = time.perf_counter()
        contestants[name](call)
        wait()
        return time.perf_counter() - begin

    first = {name: min(timed(name, 0), timed(name, 1)) for name in contestants}
    calls = {name: min(max(int(slice_seconds / t), 1), 16) for name, t in first.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        for turn in range(max_rounds):
            if turn >= min_rounds and time.perf_counter() - begin > budget:
                break
            for name, samples in seconds.items():
                samples.extend(timed(name, len(samples)) for _ in range(calls[name]))
    finally:
        gc.enable()
    return {name: summarize(samples) for name, samples in seconds.items()}


def summarize(seconds: Sequence[float]) -> Timing:
    """Reduce samples to what is reported."""
    ordered = sorted(seconds)
    p90 = ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]
    return Timing(len(ordered), ordered[0], statistics.median(ordered), p90)


def as_words(data: Tensor) -> Tensor:
    """View contiguous memory as a vector of int32, whatever it holds, to read it fast."""
    whole = data.numel() * data.itemsize // 4 * 4 // data.itemsize
    return data.view(-1)[:whole].view(torch.int32)


def read_bandwidth(device: torch.device | None = None, megabytes: int = 256) -> float:
    """Measure bytes per second of a plain read of a large tensor: the best of a few reductions."""
    data = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    words = data.view(torch.int64)
    reads: dict[str, Contestant] = {
        "sum": lambda _: data.sum(),
        "amax": lambda _: data.amax(),
        "integers": lambda _: words.sum(),
    }
    timings = [measure(reads, budget=0.4, min_rounds=5, device=device) for _ in range(3)]
    return data.nbytes / min(t.min for attempt in timings for t in attempt.values())


# -------------------------------------------------------------------------------------------------
# The machine
# -------------------------------------------------------------------------------------------------


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str:
    """Name the commit that is checked out, with "+changes" where the tree differs from it."""
    name = _git("rev-parse", "--short=12", "HEAD")
    if name is None:
        return "unknown"
    return name + ("+changes" if _git("status", "--porcelain") else "")


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_facts() -> dict[str, Any]:
    """Say where and with what this runs."""
    from specdec_ext import backend

    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
        "cpu": _cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "specdec_capability": backend.cpu_capability(),
    }


def _cpu_seconds() -> tuple[float, float] | None:
    """Give (busy CPU seconds of the whole machine, of this process and its children)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = (int(f) for f in fields[:8])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy, sum(os.times()[:4])


class Load:
    """How much of the machine others used between construction and `share`."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.used = _cpu_seconds()

    def share(self) -> float | None:
        """Give the others' part of all cores' time, in [0, 1]; None where nothing is known."""
        now = _cpu_seconds()
        if now is None or self.used is None:
            return None
        others = (now[0] - self.used[0]) - (now[1] - self.used[1])
        total = (time.perf_counter() - self.begin) * (os.cpu_count() or 1)
        return min(max(others / total, 0.0), 1.0)


def wait_until_calm(share: float, patience: float) -> None:
    """Wait until others use less than this share of the machine, `patience` seconds at most."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        load = Load()
        time.sleep(0.5)
        if (load.share() or 0.0) < share:
            return


# -------------------------------------------------------------------------------------------------
# Writers
# -------------------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table for a README: the first column to the left, the others to the right."""
    # Of one character no rule with a colon can be made: "-:" is the shortest.
    widths = [max(2, *(len(r[i]) for r in (header, *rows))) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
    return "\n".join([line(header), line(rule), *(line(r) for r in rows)])


def write_json(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a record of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(payload, indent=1) + "\n")


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write flat records, one a line; the columns are those of all of them."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(records)


def write_record(
    stem: Path,
    facts: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    text: str = "",
) -> None:
    """Write a record of a run: .json with the facts of the machine, .csv and, of a text, .md."""
    write_json(stem.with_suffix(".json"), {"machine": facts, "records": records})
    write_csv(stem.with_suffix(".csv"), records)
    if text:
        stem.with_suffix(".md").write_text(text + "\n")


def plot_times(
    path: Path, groups: Sequence[str], series: Mapping[str, Sequence[float | None]], title: str
) -> bool:
    """Draw milliseconds on a logarithmic axis, one line a group, one mark a series.

    Parameters
    ----------
    path : Path
        The suffix says the format.
    groups : sequence of str
        One label a line, from the top.
    series : mapping
        Name to one value a line, None where there is none. The first one is drawn solid.
    title : str
        Above the plot.

    Returns
    -------
    bool
        Whether there is a plot now: False without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.24 * len(groups)))
    for k, (name, values) in enumerate(series.items()):
        known = [(value, line) for line, value in enumerate(values) if value is not None]
        style: dict[str, Any] = {"marker": "o", "s": 45} if k == 0 else {"marker": "os^Dv<|"[k % 7]}
        if known:
            axes.scatter(*zip(*known, strict=True), label=name, zorder=3, **style)
    axes.set_yticks(range(len(groups)), groups, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds a call (median)")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", alpha=0.4)
    axes.grid(axis="x", which="both", alpha=0.2)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return True
