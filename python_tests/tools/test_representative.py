"""What `make test` chooses: each operator and rule on each backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from backends import STAND_FOR_TRITON, TRITON
from conftest import ROOT

from specdec_ext.contract import CHAIN_RULES
from specdec_ext.ops import TREE_RULES

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def chosen():
    """The chosen cases of the tests of which it is known what they stand for."""
    tests = {"test_parity.test_verify", "test_tree.test_parity", *STAND_FOR_TRITON}
    files = {test.split(".")[0] for test in tests}
    paths = [str(p) for p in ROOT.glob("python_tests/*/test_*.py") if p.stem in files]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--representative", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = re.findall(r"/(\w+)\.py::(\w+)\[(.*)\]", done.stdout)
    return [(f"{file}.{test}", case) for file, test, case in cases]


@pytest.mark.parametrize(
    "test, rules", [("test_parity.test_verify", CHAIN_RULES), ("test_tree.test_parity", TREE_RULES)]
)
@pytest.mark.parametrize("backend", ["cpu", "fibres32", "fibres128"])
def test_every_rule_on_every_fast_backend(chosen, test, rules, backend):
    cases = [case for name, case in chosen if name == test and case.startswith(f"{backend}-")]
    assert {case.rpartition("-")[2] for case in cases} == set(rules)


@pytest.mark.skipif(TRITON.chosen is None, reason="with a GPU, Triton takes part in all tests")
def test_one_test_of_each_operator_in_the_interpreter(chosen):
    assert {name for name, case in chosen if "triton" in case} == STAND_FOR_TRITON
