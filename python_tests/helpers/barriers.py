"""Which barriers of the CUDA kernels the watched tests need: a script.

    python python_tests/helpers/barriers.py [draw.cuh:57 ...]

For each barrier, or those named, the tests run on the watched kernels (csrc/testing/watch.cpp) as
if it were missing, until one fails, which is printed. If none fails, either no test meets what the
barrier is for, or nothing needs it. More than an hour on two cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

import fibres

BARRIER = re.compile(r"\b__sync(threads|warp)\(")
FOLDERS = [
    str(fibres.ROOT / "python_tests" / folder) for folder in ("backends", "operators", "laws")
]
TESTS = ["-k", "fibres or stand_in", "--representative"]


def barriers() -> list[str]:
    """Their places, as "draw.cuh:57".

    Those that also count votes are not among them, nor those of block.cuh, which the host has in
    csrc/testing/stand_in_block.h.
    """
    return [
        f"{source.name}:{number}"
        for source in sorted((fibres.ROOT / "csrc" / "cuda").glob("*.cu*"))
        if source.name != "block.cuh"
        for number, line in enumerate(source.read_text().splitlines(), 1)
        if BARRIER.search(line.partition("//")[0])
    ]


def failure_without(place: str) -> str | None:
    """The test that fails first if this barrier is missing, if one does."""
    environment = {"SPECDEC_WATCHED": "1", "SPECDEC_LEFT_OUT": place, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    done = subprocess.run(
        [*command, *TESTS, *FOLDERS],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"without {place} the tests did not run:\n{done.stdout}")
    if "nothing orders" not in done.stdout:
        raise RuntimeError(f"without {place} a test fails by something else:\n{done.stdout}")
    return failed[1]


def chosen(places: list[str]) -> list[str]:
    """The places named, or all: where no barrier stands, no test would fail either."""
    known = barriers()
    for place in places:
        if place not in known:
            raise ValueError(
                f"no barrier stands at {place}; some do at {', '.join(known[:3])}, ..."
            )
    return places or known


if __name__ == "__main__":
    places = chosen(sys.argv[1:])
    fibres.build("watched")
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        runs = {executor.submit(failure_without, place): place for place in places}
        for run in as_completed(runs):
            print(f"{runs[run]}: {run.result() or 'NO TEST FAILS'}", flush=True)
