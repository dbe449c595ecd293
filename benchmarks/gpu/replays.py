"""Timing on a device: graph replays over rotating inputs, bandwidth ceilings, launches, facts.

On a CPU the same functions run with the wall clock and without graphs, so that everything around
them can be tried where there is no GPU.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: E402

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Work = Callable[[], object]


# -------------------------------------------------------------------------------------------------
# Replays
# -------------------------------------------------------------------------------------------------


class CaptureFailed(Exception):
    """Work that a CUDA graph cannot hold, a host synchronisation for example.

    The process should end after it: torch's generators may believe that a capture is under way.
    """


def synchronize(device: torch.device) -> None:
    """Wait for a device; a CPU has nothing to wait for."""
    common.synchronizer(device)()


def warm_up(work: Work, device: torch.device) -> None:
    """Run once on a side stream, as capturing wants it: compilation, lazy handles, allocations."""
    if device.type != "cuda":
        work()
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)


def record(work: Work, device: torch.device) -> Work:
    """Capture work in a CUDA graph and give what replays it; on a CPU the work itself.

    Raises
    ------
    CaptureFailed
        The graph could not be captured.
    """
    warm_up(work, device)
    if device.type != "cuda":
        return work
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except Exception as error:
        raise CaptureFailed(f"{type(error).__name__}: {error}") from error
    return graph.replay


def seconds_of(run: Work, device: torch.device, repeats: int) -> float:
    """Time `repeats` runs in a row; the mean of one, in seconds.

    On a GPU one more run goes first: the queue is never empty when the clock starts, so that what
    the host needs to launch a graph is hidden behind it.
    """
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / repeats


def time_run(
    run: Work, calls: int, device: torch.device, budget: float = 0.25, samples: int = 5
) -> common.Timing:
    """Time a run of `calls` calls, per call.

    Parameters
    ----------
    run : callable
        From `record`, or any work.
    calls : int
        How many calls one run stands for.
    device : torch.device
        Where it runs.
    budget : float
        Seconds to spend, about; `samples` samples are taken anyway.
    samples : int
        At least so many, of about 10 ms each on a GPU.

    Returns
    -------
    common.Timing
        Of one call, in seconds.
    """
    slice_seconds = 0.01 if device.type == "cuda" else 0.0
    once = seconds_of(run, device, 1)
    repeats = min(max(int(slice_seconds / max(once, 1e-7)), 1), 1000)
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < samples or time.perf_counter() - begin < budget:
        found.append(seconds_of(run, device, repeats) / calls)
        if len(found) >= 200:
            break
    return common.summarize(found)


# -------------------------------------------------------------------------------------------------
# Ceilings
# -------------------------------------------------------------------------------------------------

READ_BLOCK = 8192  # words of 4 bytes a program

if triton is not None:

    @triton.jit
    def _read_kernel(data, found, BLOCK: tl.constexpr):  # noqa: ANN001, N803
        program = tl.program_id(0).to(tl.int64)
        words = tl.load(data + program * BLOCK + tl.arange(0, BLOCK))
        tl.store(found + program, tl.max(words, 0))


def reader(data: Tensor) -> Work:
    """Give what reads whole blocks of a contiguous tensor once and does next to nothing with it."""
    words = common.as_words(data)
    interpreted = triton is not None and getattr(triton.knobs.runtime, "interpret", False)
    if triton is None or not (words.is_cuda or interpreted) or len(words) < READ_BLOCK:
        return words.amax
    programs = len(words) // READ_BLOCK
    found = torch.empty(programs, dtype=torch.int32, device=data.device)
    return lambda: _read_kernel[(programs,)](words, found, BLOCK=READ_BLOCK, num_warps=8)


def read_ceiling(device: torch.device, nbytes: int) -> dict[str, float]:
    """Measure bytes per second of reading a large tensor, in several ways."""
    data = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    integers = data.view(torch.int32)
    ways: dict[str, Work] = {
        "blocks": reader(data),
        "sum float32": data.sum,
        "amax int32": integers.amax,
    }
    return {
        name: data.nbytes / time_run(record(work, device), 1, device).median
        for name, work in ways.items()
    }


def copy_ceiling(device: torch.device, nbytes: int) -> float:
    """Measure bytes per second, read and written ones, of a large copy on the device."""
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    run = record(lambda: target.copy_(source), device)
    return 2 * source.nbytes / time_run(run, 1, device).median


# -------------------------------------------------------------------------------------------------
# Launches
# -------------------------------------------------------------------------------------------------

_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def launches(work: Work, device: torch.device) -> dict[str, int]:
    """Count what one run launches: ``kernel``, ``gpu_memcpy``, ``gpu_memset``."""
    return dict(Counter(one.category for one in launched(work, device)))


def durations(run: Work, calls: int, device: torch.device) -> dict[str, float]:
    """Give the microseconds of each kernel, copy and fill in one of the calls that a run makes.

    A run is best a graph's replay over sets of inputs that take turns, so that each kernel meets
    the caches as the timed ones do. Those of one name are added up.
    """
    total: Counter[str] = Counter()
    for one in launched(run, device):
        total[short_name(one.name)] += one.microseconds
    return {name: round(sum_ / calls, 3) for name, sum_ in total.items()}


def short_name(name: str) -> str:
    """Give a kernel's name with what of its template's arguments is a number, nothing around."""
    head = re.sub(r"\(anonymous namespace\)::", "", name)
    head = re.sub(r"\([\w:]+\)(?=[\w-])", "", head)  # what a number is cast to
    head = re.sub(r"^(?:void|auto) ", "", head).partition("(")[0]
    plain, bracket, arguments = head.partition("<")
    numbers = re.findall(r"(?<![\w:])(?:\d+|true|false)\b", arguments) if bracket else []
    return plain.rpartition("::")[2] + (f"<{', '.join(numbers)}>" if numbers else "")


class Launched(NamedTuple):
    """A kernel, copy or fill."""

    category: str
    name: str
    microseconds: float


def launched(work: Work, device: torch.device) -> list[Launched]:
    """List what one run launches, from the profiler's trace."""
    from torch.profiler import ProfilerActivity, profile

    work()
    synchronize(device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        work()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [
        Launched(e["cat"], e["name"], float(e.get("dur", 0)))
        for e in events
        if e.get("cat") in _CATEGORIES
    ]


# -------------------------------------------------------------------------------------------------
# Facts
# -------------------------------------------------------------------------------------------------


def _output(*command: str) -> str:
    """Give what a program prints, or why there is nothing."""
    path = shutil.which(command[0])
    if path is None:
        return "not found"
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def sm_clock(run: Work, device: torch.device) -> float | None:
    """Give the multiprocessors' clock in MHz while runs are under way; None where none is told."""
    path = shutil.which("nvidia-smi")
    if device.type != "cuda" or path is None:
        return None
    query = [path, f"--id={device.index or 0}", "--query-gpu=clocks.sm"]
    query.append("--format=csv,noheader,nounits")
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as asking:
        until = time.monotonic() + 20
        while asking.poll() is None and time.monotonic() < until:
            run()
            synchronize(device)
        asking.kill()
        answer = asking.stdout.read() if asking.stdout is not None else ""
    return float(answer) if re.fullmatch(r"\s*\d+(?:\.\d+)?\s*", answer) else None


def facts(device: torch.device) -> dict[str, Any]:
    """Say with what and on what this runs."""
    found: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": common.commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": None if triton is None else triton.__version__,
        "nvcc": _output("nvcc", "--version").rpartition("\n")[2],
        "cores": common.cores(),
        "device": str(device),
    }
    if device.type == "cuda":
        seen = torch.cuda.get_device_properties(device)
        query = "driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        found |= {
            "gpu": seen.name,
            "gpus": torch.cuda.device_count(),
            "capability": f"{seen.major}.{seen.minor}",
            "multiprocessors": seen.multi_processor_count,
            "memory_bytes": seen.total_memory,
            "l2_bytes": l2_bytes(device),
            "nvidia_smi": {
                "fields": query,
                "values": _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
            },
        }
    return found


def l2_bytes(device: torch.device) -> int:
    """Give the size of the last cache; 60 MB where torch does not tell, 4 MB for a CPU."""
    if device.type != "cuda":
        return 4 << 20
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 60 << 20))


if __name__ == "__main__":
    print(json.dumps(facts(torch.device(sys.argv[1]))))
