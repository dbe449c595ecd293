"""Prove the GPU backends on a machine with a GPU: one command, no network, one report.

    python benchmarks/gpu/report.py --budget-s 540

It needs torch 2.11 or later with CUDA and pytest, nothing that has to be downloaded; to build it
needs nvcc of the same CUDA release, cmake, ninja and pybind11 as well. In this order, whatever
fails on the way:

facts       GPU, driver, torch, CUDA, triton, nvcc, Python
build       ``SPECDEC_CUDA=1 python setup.py build_ext --inplace`` against the torch found here.
            With ``--prebuilt DIR`` nothing is compiled: ``_C.so``, ``_C_cuda.so`` and
            ``_host.*.so`` are put in place from there, and every step runs on them
peers       what other packages compile at their first call, while the build runs
info        ``python -m specdec_ext info``
smoke       a few calls of every operator (python_tests/helpers/gpu_smoke.py)
memcheck    compute-sanitizer over the same few calls; a tool that the machine refuses is said so,
racecheck   with its own words
tests       ``pytest -m gpu``; a kernel that breaks or hangs its process costs its own test only
trees       benchmarks/gpu/trees.py (with the arguments after ``--trees``)
attention   benchmarks/bench_tree_attention.py --quick (or the arguments after ``--attention``)
bench       benchmarks/gpu/bench.py --quick (or the arguments after ``--bench``)

``--steps`` chooses some of them, ``--merge`` makes one report of several runs' JSON: time not used
by a step is left to those after it.

Where a GPU is lent for minutes, and commands of a few minutes each, build elsewhere: with the same
Python, torch and nvcc, ``SPECDEC_CUDA=1 python setup.py build_ext --inplace``, and copy
``specdec_ext/*.so`` into a folder that travels with the tree, ``.gpu`` here. Then two commands do,
which fit into a loan of 15 minutes (with more time give them more):

    python3 benchmarks/gpu/report.py --prebuilt .gpu --budget-s 300 --out "$OUT" --suffix=-bench \\
        --steps build info smoke trees attention bench
    python3 benchmarks/gpu/report.py --prebuilt .gpu --budget-s 380 --out "$OUT" --suffix=-checks \\
        --steps build info memcheck racecheck tests

and ``--merge BENCH.json CHECKS.json`` makes one report of theirs. On the first machine, an H200
with 16 cores, a start took 35 seconds, the smoke test of CUDA 10, the bench without other packages
30, trees 25, either sanitizer less than 95 beside the tests. Of 1,400 tests, 120 seconds reached
860: ``--tests "python_tests/backends/test_gpu.py -k cuda"`` chooses those of the CUDA kernels.
FlashInfer's kernels were not compiled after 105 seconds.

A few packages make more of it, installed or on PYTHONPATH: flashinfer-python and apache-tvm-ffi
(0.6.4 and 0.1.15 do with what torch brings, and nvcc compiles their kernels here); vLLM, or what
carry_vllm.py takes out of it; pytest-xdist and pytest-timeout for the tests. What travels is
limited: carry FlashInfer as a wheel (8 MB) and unpack it there with ``python3 -m zipfile -e``.

Results: ``gpu-<name>-<date>.json``, ``.md`` and ``.log`` (everything printed) under ``--out``,
benchmarks/results by default, written again after each step. The exit code says whether a step
failed; what was refused or had nothing to do did not. ``--device cpu`` tries the whole without a
GPU: the CPU operators take the backends' place, and wall clocks that of graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: E402

from gpu import tables  # noqa: E402

ROOT = common.ROOT
HELPERS = ROOT / "python_tests" / "helpers"
PACKAGE = ROOT / "specdec_ext"
TAIL = 4000  # characters of a step's output in the report
SANITIZER_FOUND = 99  # exit code of compute-sanitizer for errors in the program
REFUSALS = (
    "Device not supported",
    "not supported on",
    "Failed to initialize",
    "Unable to find injection",
    "Internal Sanitizer Error",
    "terminated before first instrumented API call",
)
#: Steps in order, with their shares of the time that is left.
STEPS = {
    "facts": 1.0,
    "build": 8.0,
    "peers": 4.0,  # beside the build, where there is one
    "info": 0.5,
    "smoke": 1.0,
    "memcheck": 1.5,
    "racecheck": 1.5,
    "tests": 6.0,
    "trees": 1.5,
    "attention": 1.5,
    "bench": 8.0,
}
#: Seconds that a step is given even where its share is smaller.
LEAST = {
    **{"facts": 90.0, "build": 240.0, "info": 60.0, "smoke": 90.0, "tests": 150.0},
    **{"memcheck": 100.0, "racecheck": 100.0, "trees": 90.0, "attention": 90.0},
}


#: Of the records of steps that have no other place in the report.
TABLES: dict[str, Callable[[Any], str]] = {
    "trees": tables.trees_table,
    "attention": tables.attention_table,
}


@dataclass
class Step:
    """What came of a step."""

    name: str
    command: str = ""
    status: str = "skipped"  # ok, failed, timeout, refused, skipped
    code: int | None = None
    seconds: float = 0.0
    note: str = ""
    tail: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class Report:
    """Everything seen so far, written after each step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.facts: dict[str, Any] = {"device": str(options.device)}
        self.steps: dict[str, Step] = {}
        self.bench: dict[str, Any] = {}
        self.date = time.strftime("%Y-%m-%d", time.gmtime())

    @property
    def stem(self) -> Path:
        """Path of the files without suffix."""
        name = str(self.facts.get("gpu", self.options.device))
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        return self.options.out / f"gpu-{slug}-{self.date}{self.options.suffix}"

    def add(self, step: Step) -> None:
        """Take a step in, say so, write."""
        self.steps[step.name] = step
        print(f"[{step.name}] {step.status}, {step.seconds:.0f} s. {step.note}", flush=True)
        self.write()

    def payload(self) -> dict[str, Any]:
        """Give what the JSON holds."""
        steps = [asdict(step) for step in self.steps.values()]
        return {"facts": self.facts, "steps": steps, "bench": self.bench}

    def write(self) -> None:
        """Write JSON and Markdown."""
        common.write_json(self.stem.with_suffix(".json"), self.payload())
        self.stem.with_suffix(".md").write_text(self.markdown())

    def markdown(self) -> str:
        """Give facts, a table of the steps, the benchmark, and the ends of what went wrong."""
        facts = [[name, tables.one_line(str(value))] for name, value in self.facts.items()]
        rows = [
            [s.name, s.status, "" if s.code is None else str(s.code), f"{s.seconds:.0f}"]
            + [
                f"`{tables.one_line(s.command)}`" if s.command else "",
                tables.one_line(s.note),
            ]
            for s in self.steps.values()
        ]
        header = ["step", "status", "exit", "seconds", "command", "note"]
        parts = [f"# {self.facts.get('gpu', self.options.device)}, {self.date}"]
        parts += [common.markdown_table(["fact", "value"], facts)]
        parts += ["## Steps", common.markdown_table(header, rows)]
        if self.bench.get("facts"):
            parts += [tables.markdown(self.bench)]
        for name, table in TABLES.items():
            if name in self.steps and self.steps[name].details:
                records = self.steps[name].details["records"]
                parts += [f"## {name.capitalize()}", table(records)]
        for step in self.steps.values():
            if step.status not in ("ok", "skipped"):
                parts += [f"## Output of {step.name}", f"```text\n{step.tail}\n```"]
        return "\n\n".join(part.rstrip() for part in parts) + "\n"


# -------------------------------------------------------------------------------------------------
# Running programs
# -------------------------------------------------------------------------------------------------


def search_path() -> str:
    """Give a PYTHONPATH that finds the source tree's package first, then the tests' modules."""
    paths = [str(ROOT), str(HELPERS), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def run(
    report: Report, name: str, command: Sequence[str], limit: float, **variables: str
) -> tuple[Step, str]:
    """Run a program for `limit` seconds at most; gives the step and all that was printed.

    It ends with everything it started. What it prints is in a file of its own while it runs.
    Variables are added to the environment, whose PYTHONPATH has the source tree's package.
    """
    told = " ".join([*(f"{k}={v}" for k, v in variables.items()), shlex.join(command)])
    step = Step(name, told.replace(sys.executable, "python").replace(str(ROOT) + os.sep, ""))
    ours = {"PYTHONPATH": search_path(), "PYTHONUNBUFFERED": "1"}
    print(f"[{name}] at most {limit:.0f} s: {step.command}", flush=True)
    partial = report.options.out / f"{name}.partial"
    begin = time.perf_counter()
    with partial.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, **ours, **variables},
                start_new_session=True,
            )
        except OSError as error:
            step.status, step.note = "failed", str(error)
            return step, ""
        try:
            step.code = process.wait(timeout=limit)
            step.status = "ok" if step.code == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            step.code = process.wait()
            step.status, step.note = "timeout", f"stopped after {limit:.0f} s"
    step.seconds = round(time.perf_counter() - begin, 1)
    text = partial.read_text(errors="replace")
    partial.unlink()
    with report.stem.with_suffix(".log").open("a") as log:
        log.write(f"==== {name}: {step.command}\n{text}\n==== {name}: {step.status}\n\n")
    step.tail = text[-TAIL:]
    return step, text


def python(*arguments: str | Path) -> list[str]:
    """Give a command of this interpreter."""
    return [sys.executable, *map(str, arguments)]


# -------------------------------------------------------------------------------------------------
# Steps: from the report and a limit to what came of it
# -------------------------------------------------------------------------------------------------


def backends(options: argparse.Namespace) -> list[str]:
    """List the backends under test."""
    return ["cuda", "triton"] if options.device.type == "cuda" else ["cpu"]


def facts(report: Report, limit: float) -> Step:
    """Ask, in a process of its own, what this runs on."""
    command = python("benchmarks/gpu/replays.py", str(report.options.device))
    step, text = run(report, "facts", command, limit)
    lines = text.strip().splitlines()
    if step.status == "ok" and lines:
        log = report.stem.with_suffix(".log")
        report.facts |= json.loads(lines[-1])
        log.rename(report.stem.with_suffix(".log"))
    return step


def build(report: Report, limit: float) -> Step:
    """Build the libraries in place, or put there what was built elsewhere."""
    if report.options.prebuilt is not None:
        return put_in_place(report.options.prebuilt, report.options.device)
    cuda = "1" if report.options.device.type == "cuda" else "0"
    command = python("setup.py", "build_ext", "--inplace")
    return run(report, "build", command, limit, SPECDEC_CUDA=cuda)[0]


def put_in_place(folder: Path, device: torch.device) -> Step:
    """Copy libraries into the package: those of the operators, and the host's for this Python."""
    begin = time.perf_counter()
    hosts = [f"_host{suffix}" for suffix in EXTENSION_SUFFIXES]  # the first names this Python
    has_cuda = device.type == "cuda" or (folder / "_C_cuda.so").exists()
    names = ["_C.so", *(["_C_cuda.so"] if has_cuda else [])]
    names += [name for name in hosts if (folder / name).exists()][:1] or hosts[:1]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        return Step("build", status="failed", note=f"{folder} has no {', '.join(missing)}")
    for name in names:
        # Renamed into place: a process may have loaded what lies there.
        partial = PACKAGE / f"{name}.partial"
        shutil.copyfile(folder / name, partial)
        partial.replace(PACKAGE / name)
    said = ", ".join(f"{name} ({(folder / name).stat().st_size / 1e6:.1f} MB)" for name in names)
    seconds = round(time.perf_counter() - begin, 1)
    return Step("build", status="ok", code=0, seconds=seconds, note=f"put in place: {said}")


def peers(report: Report, limit: float) -> Step:
    """Let other packages compile their kernels."""
    if report.options.device.type != "cuda":
        return Step("peers", note="other packages' kernels need a GPU")
    step, text = run(report, "peers", python("benchmarks/gpu/peers.py"), limit)
    step.note = step.note or tables.one_line(text[-600:])
    return step


def info(report: Report, limit: float) -> Step:
    """Ask the package what it has."""
    step, text = run(report, "info", python("-m", "specdec_ext", "info"), limit)
    step.note = tables.one_line("; ".join(x for x in text.splitlines() if "backend" in x))
    return step


def smoke_command(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Give the command of a few calls."""
    script = HELPERS / "gpu_smoke.py"
    return python(script, "--device", str(options.device), "--backends", *names)


def smoke(report: Report, limit: float) -> Step:
    """Make a few calls, one backend after the other, so that one does not hide the other."""
    found = Step("smoke", status="ok", code=0)
    for name in backends(report.options):
        command = smoke_command(report.options, [name])
        step, _ = run(report, "smoke", command, limit / len(backends(report.options)))
        found.command = step.command
        found.seconds += step.seconds
        found.tail += step.tail
        found.note += f"{name}: {step.status}. "
        if step.status != "ok":
            found.status, found.code = step.status, step.code
    return found


def tests(report: Report, limit: float) -> Step:
    """Run what is marked gpu."""
    options = report.options
    command = python("-m", "pytest", "-m", "gpu", "-v", "-rs", "--tb=short", "-p", "gpu_guard")
    command += ["--continue-on-collection-errors", *shlex.split(options.tests)]
    if find_spec("xdist") is not None and options.workers > 1:
        command += ["-n", str(options.workers)]
    if find_spec("pytest_timeout") is not None:
        command += ["--timeout", "150", "--timeout-method", "thread"]
    variables = {} if options.device.type == "cuda" else {"SPECDEC_TEST_DEVICE": "cpu"}
    step, text = run(report, "tests", command, limit, **variables)
    outcomes = test_outcomes(text)
    counts = Counter(outcomes.values())
    failed = sorted(name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR"))
    skips = sorted(set(re.findall(r"^SKIPPED \[\d+\] .*$", text, re.MULTILINE)))
    step.details = {"counts": dict(counts), "failed": failed, "skips": skips}
    said = ", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.items())
    step.note = f"{step.note} {said or 'no test ran'}".strip()
    if not counts["PASSED"] and step.status == "ok":
        step.status = "failed"
    return step


def test_outcomes(text: str) -> dict[str, str]:
    """Read pytest's verbose lines, with or without xdist; a test's worst outcome counts."""
    found: dict[str, str] = {}
    outcome = r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
    test = r"(\S+\.py::.+?)"
    pattern = rf"^\[gw\d+\] \[ *\d+%\] {outcome} {test}\s*$|^{test} {outcome}\b.*\[ *\d+%\]$"
    for match in re.finditer(pattern, text, re.MULTILINE):
        said, name = match[1] or match[4], match[2] or match[3]
        if found.get(name) not in ("FAILED", "ERROR"):
            found[name] = said
    return found


def sanitizer(tool: str) -> Callable[[Report, float], Step]:
    """Give the step of one of compute-sanitizer's tools."""

    def step_of(report: Report, limit: float) -> Step:
        path = find_sanitizer()
        if path is None:
            return Step(tool, status="refused", note="compute-sanitizer is not installed")
        command = [path, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND)]
        # Without torch's pool each tensor has bounds of its own.
        step, text = run(
            report,
            tool,
            [*command, *smoke_command(report.options, report.options.sanitize)],
            limit,
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )
        return read_sanitizer(step, text)

    return step_of


def find_sanitizer() -> str | None:
    """Find compute-sanitizer on the path or beside CUDA."""
    places = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"))]
    found = [shutil.which("compute-sanitizer", path=str(p)) for p in places]
    return shutil.which("compute-sanitizer") or next(filter(None, found), None)


def read_sanitizer(step: Step, text: str) -> Step:
    """Say whether a tool found nothing, found something, or did not work here."""
    own = [line.strip("= ") for line in text.splitlines() if line.startswith("===")]
    summaries = [line for line in own if "SUMMARY: " in line]
    refusals = [line for line in own if any(words in line for words in REFUSALS)]
    if step.status == "timeout":
        return step
    if refusals:
        step.status, step.note = "refused", refusals[0]
    elif summaries:
        clean = step.code == 0 and all("SUMMARY: 0 " in line for line in summaries)
        step.status, step.note = "ok" if clean else "failed", summaries[-1]
    elif step.code == 0:
        step.status, step.note = "refused", "the tool ended without a summary"
    else:
        step.status, step.note = "failed", f"exit code {step.code}"
    return step


def timings(name: str, script: str) -> Callable[[Report, float], Step]:
    """Give the step of a script of records: it runs, and they are taken in, whatever came of it."""

    def step_of(report: Report, limit: float) -> Step:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / f"{name}.json"
            command = python(script, "--device", str(report.options.device), "--out", path)
            arguments = shlex.split(getattr(report.options, name))
            step, _ = run(report, name, [*command, *arguments], limit)
            if path.exists():
                step.details = json.loads(path.read_text())
        said = f"{len(step.details.get('records', []))} measured"
        step.note = f"{step.note} {said}".strip()
        return step

    return step_of


def bench(report: Report, limit: float) -> Step:
    """Run the benchmark and take its results in, whatever came of it."""
    options = report.options
    with tempfile.TemporaryDirectory() as place:
        command = python("benchmarks/gpu/bench.py", "--device", str(options.device))
        command += ["--out", place, "--budget-s", f"{max(limit - 60, 1):.0f}"]
        command += shlex.split(options.bench)
        if "peers" in report.steps and report.steps["peers"].status == "timeout":
            command += ["--without", "flashinfer"]  # it would go on compiling, on the bench's time
        step, _ = run(report, "bench", command, limit)
        path = Path(place) / "gpu-bench.json"
        if path.exists():
            report.bench = json.loads(path.read_text())
    records = report.bench.get("records", [])
    counts = Counter(record["status"] for record in records)
    marks = Counter(target["mark"] for target in tables.targets(report.bench)) if records else {}
    said = [f"{count} {name}" for name, count in [*counts.items(), *marks.items()]]
    step.note = f"{step.note} {', '.join(said) or 'nothing was measured'}".strip()
    return step


ACTIONS: Mapping[str, Callable[[Report, float], Step]] = {
    "facts": facts,
    "build": build,
    "peers": peers,
    "info": info,
    "smoke": smoke,
    "memcheck": sanitizer("memcheck"),
    "racecheck": sanitizer("racecheck"),
    "tests": tests,
    "trees": timings("trees", "benchmarks/gpu/trees.py"),
    "attention": timings("attention", "benchmarks/bench_tree_attention.py"),
    "bench": bench,
}


# -------------------------------------------------------------------------------------------------
# Command line
# -------------------------------------------------------------------------------------------------


def limit_of(name: str, left: Sequence[str], seconds: float) -> float:
    """Give a step its share of the seconds that are left for it and the steps after it."""
    share = seconds * STEPS[name] / sum(STEPS[other] for other in left)
    return max(min(max(share, LEAST.get(name, 0.0)), seconds), 1.0)


def attempt(report: Report, name: str, limit: float) -> Step:
    """Run a step; its own failure is a result like others."""
    try:
        return ACTIONS[name](report, limit)
    except Exception as error:
        return Step(name, status="failed", note=f"{type(error).__name__}: {error}")


def run_steps(report: Report) -> None:
    """Run the chosen steps, `peers` beside `build`."""
    options = report.options
    end = time.monotonic() + options.budget_s
    names = [name for name in STEPS if name in options.steps]
    both = {"build", "peers"} <= set(names)
    serial = [name for name in names if not (both and name == "peers")]
    for k, name in enumerate(serial):
        seconds = end - time.monotonic()
        if seconds < 5:
            report.add(Step(name, note="no time was left"))
            continue
        limit = limit_of(name, serial[k:], seconds)
        group = ["build", "peers"] if both and name == "build" else [name]
        with ThreadPoolExecutor(len(group)) as pool:
            for step in pool.map(lambda name, limit=limit: attempt(report, name, limit), group):
                report.add(step)


def merge(report: Report, paths: Sequence[Path]) -> None:
    """Take in the JSON of earlier runs; a later run's step replaces an earlier one's."""
    for path in paths:
        known = json.loads(path.read_text())
        report.facts |= known["facts"]
        report.bench = known["bench"] or report.bench
        for step in known["steps"]:
            if step["status"] != "skipped" or step["name"] not in report.steps:
                report.steps[step["name"]] = Step(**step)
    report.steps = {name: report.steps[name] for name in STEPS if name in report.steps}
    report.date = str(report.facts.get("time", report.date))[:10]
    report.write()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--budget-s", type=float, default=1500.0, help="seconds for everything")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--prebuilt", type=Path, help="folder with libraries: build none")
    parser.add_argument("--tests", default="python_tests", help="more arguments of pytest")
    workers = min(8, max(common.cores() // 2, 1))
    parser.add_argument("--workers", type=int, default=workers, help="of pytest-xdist")
    parser.add_argument("--sanitize", nargs="+", default=["cuda"], help="backends to sanitize")
    parser.add_argument("--trees", default="", help="arguments of trees.py")
    quick = "arguments of bench_tree_attention.py"
    parser.add_argument("--attention", default="--quick", help=quick)
    parser.add_argument("--bench", default="--quick", help="arguments of bench.py")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of the report")
    parser.add_argument("--suffix", default="", help="of the files' names")
    parser.add_argument("--merge", type=Path, nargs="+", help="JSON of earlier runs, in order")
    options = parser.parse_args(arguments)
    options.steps = ["facts", *options.steps]
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.prebuilt is not None:
        options.prebuilt = options.prebuilt.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a report; see the module's text."""
    options = parse(arguments)
    report = Report(options)
    if options.merge:
        merge(report, options.merge)
    else:
        run_steps(report)
    if report.bench.get("records"):
        print(f"\n{tables.targets_table(report.bench)}")
    print(f"\nwrote {report.stem}.json, .md, .log")
    for step in report.steps.values():
        print(f"{step.name:<10} {step.status:<8} {step.seconds:6.0f} s  {step.note}"[:300])
    return 1 if any(s.status in ("failed", "timeout") for s in report.steps.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
