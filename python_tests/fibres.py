"""The CUDA kernels on the host: builds and loads the libraries of csrc/testing.

Run as a script, it only builds them.
"""

from __future__ import annotations

import ctypes
import fcntl
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"

# Block sizes. A warp is a block at 32; at 128, warps go their own ways between barriers.
THREADS = (32, 128)


def build() -> None:
    """Bring the libraries up to date; nothing changed, next to nothing runs."""
    if not (BUILD / "CMakeCache.txt").exists():
        raise RuntimeError(f"{BUILD} is not configured: run `python setup.py build_ext --inplace`")
    with open(BUILD / "fibres.lock", "w") as lock:  # test processes start side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-m", "cmake", "--build", str(BUILD), "--target", "fibres"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"the CUDA kernels did not build for the host:\n{done.stdout}")


@cache
def library(name: str) -> ctypes.CDLL:
    """One of the libraries, for what it exports to ctypes."""
    return ctypes.CDLL(str(BUILD / name))


class Counts:
    """What the kernels of a block size asked for: launches, allocations, bytes."""

    def __init__(self, threads: int) -> None:
        self._library = library(f"_cuda_on_fibres_{threads}.so")

    def __getattr__(self, name: str) -> int:
        function = getattr(self._library, f"fibres_{name}")
        function.restype = ctypes.c_int64
        return function()


@cache
def operators(threads: int) -> object:
    """The operators for CPU tensors, run by the CUDA kernels in blocks of so many threads."""
    torch.ops.load_library(BUILD / f"_cuda_on_fibres_{threads}.so")
    return getattr(torch.ops, f"specdec_fibres_{threads}")


if __name__ == "__main__":
    build()
