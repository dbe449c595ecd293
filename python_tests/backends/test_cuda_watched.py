"""What watches CUDA kernels on fibres, on kernels that are known to be right or wrong.

The operators' kernels are watched where SPECDEC_WATCHED=1 is in the environment of their tests.
"""

from __future__ import annotations

import ctypes
import re

import barriers
import fibres
import pytest
import torch

pytestmark = pytest.mark.skipif(not fibres.can_watch(), reason="needs GCC 11 or later")

SEEDS = range(5)


def cases(library):
    """Index, name and what has to be said, of every case of csrc/testing/watch_test.cu."""
    library.watch_case.restype = ctypes.c_char_p
    said, i = ctypes.c_char_p(), 0
    while (name := library.watch_case(i, ctypes.byref(said))) is not None:
        yield i, name.decode(), (said.value or b"").decode()
        i += 1


def said_of(library, i):
    numbers, counter = torch.zeros(256, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    said = ctypes.create_string_buffer(4000)
    library.run_watch_case(
        i,
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_int64(numbers.nbytes),
        ctypes.c_void_p(counter.data_ptr()),
        said,
        ctypes.c_int64(len(said)),
    )
    return said.value.decode()


@pytest.mark.parametrize("threads", fibres.THREADS)
def test_what_is_wrong_is_found_and_nothing_else(threads):
    # Whatever the order in which threads and blocks run.
    library = fibres.library(f"_watch_test_{threads}")
    known = list(cases(library))
    assert 10 < sum(not expected for _, _, expected in known) < len(known) - 10
    for seed in SEEDS:
        library.watch_seed(ctypes.c_uint64(seed))
        for i, name, expected in known:
            said = said_of(library, i)
            assert expected in said and bool(said) == bool(expected), f"{name}: {said}"


@pytest.mark.parametrize("threads", fibres.THREADS)
def test_errors_name_their_places(threads):
    library = fibres.library(f"_watch_test_{threads}")
    index = {name: i for i, name, _ in cases(library)}
    access = r"(a read|a write) by thread \d+ of block \d at watch_test\.cu:\d+"
    said = said_of(library, index["overwritten after nothing"])
    assert re.fullmatch(rf"alone: nothing orders ({access} and {access}(; )?)+", said), said
    said = said_of(library, index["read before the wait"])
    assert re.search(r"block \d of the launch before at", said), said
    said = said_of(library, index["a shift by too much"])
    assert re.fullmatch(r"alone: a shift by too much at \S*watch_test\.cu:\d+", said), said


@pytest.mark.parametrize("threads", fibres.THREADS)
def test_a_barrier_that_is_left_out_is_missed(threads):
    # As if it were not there, for the watcher; threads meet there all the same.
    library = fibres.library(f"_watch_test_{threads}")
    index = {name: i for i, name, _ in cases(library)}
    source = (fibres.ROOT / "csrc" / "testing" / "watch_test.cu").read_text().splitlines()
    kernel = source.index("__global__ void overwrite_what_others_read(Numbers out) {")
    line = source.index("  if (kBarrier) __syncthreads();", kernel) + 1
    right = index["overwritten after a barrier"]
    try:
        library.watch_leave_out(f"watch_test.cu:{line}".encode())
        assert "nothing orders" in said_of(library, right)
        library.watch_leave_out(f"watch_test.cu:{line + 1}".encode())
        assert said_of(library, right) == ""
    finally:
        library.watch_leave_out(b"")


def test_barriers_are_found():
    # All that stand in the sources of kernels, but for comments and block.cuh.
    folder = fibres.ROOT / "csrc" / "cuda"
    text = {path.name: path.read_text() for path in folder.glob("*.cu*")}
    expected = sum(len(re.findall(r"__sync(?:threads|warp)\(", t)) for t in text.values())
    beside = len(re.findall(r"__sync(?:threads|warp)\(", text["block.cuh"]))
    found = barriers.barriers()
    assert len(found) == len(set(found)) == expected - beside
    for place in found:
        name, line = place.split(":")
        assert "__sync" in text[name].splitlines()[int(line) - 1]
    assert barriers.chosen([]) == found and barriers.chosen(found[3:5]) == found[3:5]
    with pytest.raises(ValueError, match="no barrier stands at draw.cuh:1; some do at acceptance"):
        barriers.chosen(["draw.cuh:1"])
