"""A bounded part of fuzz.py, always the same, in a process of its own; and that it finds things."""

from __future__ import annotations

import ast
import signal

import pytest

RUN = "import fuzz, sys; sys.exit(fuzz.main())"


@pytest.mark.thorough
def test_nothing_is_found(run_python):
    done = run_python(RUN, "--examples=1500", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-6000:]
    seen = ast.literal_eval(done.stdout.partition("unharmed: ")[2])
    # What was tried is not nothing: every operator, every status, refusals.
    for name in (
        "verify",
        "row_law",
        "sample",
        "acceptance",
        "uniforms",
        "refused",
        "tree_attention",
    ):
        assert seen[name] >= 50, seen
    assert all(seen[f"status {bit}"] >= 5 for bit in (1, 2, 4, 8)), seen
    assert seen["no attention"] >= 5, seen


@pytest.mark.thorough
@pytest.mark.parametrize(
    "control, words",
    [
        ("forgets_the_status", "not 2"),
        ("emits_a_neighbour", "assert"),
        ("refuses_nothing", "nothing said so"),
    ],
)
def test_what_is_wrong_is_found(run_python, control, words):
    done = run_python(RUN, "--examples=400", f"--control={control}", OMP_NUM_THREADS="1")
    assert done.returncode == 1 and words in done.stderr, done.stderr[-3000:]


def test_a_read_out_of_bounds_ends_the_process(run_python):
    done = run_python(RUN, "--examples=5", "--control=reads_one_too_far")
    assert done.returncode == -signal.SIGSEGV
    assert "reads_one_too_far" in done.stderr  # faulthandler says where
