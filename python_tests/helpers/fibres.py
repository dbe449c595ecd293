"""The CUDA kernels on the host: builds and loads the libraries of csrc/testing.

Run as a script, it only builds them. With SPECDEC_WATCHED=1 in the environment the operators'
libraries are those that find data races and more (csrc/testing/watch.cpp); with, say,
SPECDEC_LEFT_OUT=draw.cuh:57 as well, as if the barrier there were missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"

WATCHED = os.environ.get("SPECDEC_WATCHED") == "1"
TARGET, OPERATORS = ("watched", "_cuda_watched") if WATCHED else ("fibres", "_cuda_on_fibres")

LEFT_OUT = os.environ.get("SPECDEC_LEFT_OUT", "")
if LEFT_OUT and not WATCHED:
    raise ValueError(
        f"SPECDEC_LEFT_OUT={LEFT_OUT} needs SPECDEC_WATCHED=1: nobody else would notice"
    )

# Block sizes. A warp is a block at 32; at 128, warps go their own ways between barriers.
THREADS = (32, 128)


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Keep test processes that run side by side from building the same thing at once."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def build(target: str) -> None:
    """Bring the libraries of a target up to date; nothing changed, next to nothing runs."""
    if not (BUILD / "CMakeCache.txt").exists():
        raise RuntimeError(f"{BUILD} is not configured: run `python setup.py build_ext --inplace`")
    with one_at_a_time("fibres"):
        done = subprocess.run(
            [sys.executable, "-m", "cmake", "--build", str(BUILD), "--target", target],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"the CUDA kernels did not build for the host:\n{done.stdout}")


@cache
def can_watch() -> bool:
    """Whether the compiler can build what finds data races, as far as CMake has found out."""
    found = BUILD / "CMakeCache.txt"
    return not found.exists() or "can_watch:INTERNAL=1" in found.read_text()


@cache
def library(name: str, target: str | None = None) -> ctypes.CDLL:
    """One of the libraries, for what it exports to ctypes; built when it is first asked for."""
    build(target or name)
    return ctypes.CDLL(str(BUILD / f"{name}.so"))


@cache
def operators_library(threads: int) -> ctypes.CDLL:
    """The one with the operators in blocks of so many threads."""
    name = f"{OPERATORS}_{threads}"
    found = library(name, TARGET if threads in THREADS else name)
    found.fibres_leave_out(LEFT_OUT.encode())
    return found


_loaded: list[int] = []
_kept: list[Any] = []  # registrations go away with the object


@cache
def operators(threads: int) -> Any:
    """The operators for CPU tensors, run by the CUDA kernels in blocks of so many threads."""
    from specdec_ext._fake import FAKES  # which to build them does not take

    operators_library(threads)  # builds it
    torch.ops.load_library(BUILD / f"{OPERATORS}_{threads}.so")
    _loaded.append(threads)
    library: Any = torch.library  # its functions are not annotated
    namespace = f"specdec_fibres_{threads}"
    fragment = library.Library(namespace, "FRAGMENT")
    for name in FAKES:
        fragment.impl(name, library.fallthrough_kernel, "Autograd")  # as specdec_ext/_fake.py does
    _kept.append(fragment)
    return getattr(torch.ops, namespace)


def loaded() -> list[int]:
    """The block sizes whose operators this process has asked for."""
    return _loaded


def seed(threads: int, value: int) -> None:
    """Choose the order in which blocks, and the threads of a block, run from here on."""
    operators_library(threads).fibres_seed(ctypes.c_uint64(value))


def lose_thread(threads: int, thread: int) -> None:
    """Let this thread of every block return at once in the next launch: a broken kernel."""
    operators_library(threads).fibres_lose_thread(thread)


class Asked(NamedTuple):
    """What kernels asked for."""

    launches: int
    allocations: int
    bytes: int  # of scratch memory


def asked_by(threads: int, call: Callable[[], Any]) -> Asked:
    """What an operator call launches and allocates."""
    functions = [getattr(operators_library(threads), f"fibres_{what}") for what in Asked._fields]
    for function in functions:
        function.restype = ctypes.c_int64
    before = [function() for function in functions]
    call()
    return Asked(*(function() - b for function, b in zip(functions, before, strict=True)))


if __name__ == "__main__":
    build(TARGET)
