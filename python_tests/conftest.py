"""What every test file shares: backends as fixtures, processes of their own, short constructors."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read when libgomp is loaded: test processes side by side must not spin at each other's barriers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

# Without a GPU, Triton's kernels run in its interpreter; read when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import fibres  # noqa: E402
from backends import (  # noqa: E402
    BACKENDS,
    CPU,
    OPERATORS,
    REFERENCE,
    TRITON,
    Backend,
)

__all__ = [
    "BACKENDS",
    "CPU",
    "OPERATORS",
    "REFERENCE",
    "ROOT",
    "TRITON",
    "Backend",
]

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "python_tests"
FOLDERS = [TESTS, *(path for path in sorted(TESTS.glob("[a-z]*")) if path.is_dir())]

# Derandomised: a failure seen once is seen by everybody.
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=60)
settings.register_profile("few", parent=settings.get_profile("suite"), max_examples=15)

# Test processes run side by side; test_threads.py sets what it needs.
torch.set_num_threads(1)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every implementation, the reference included."""
    return request.param


@pytest.fixture(params=OPERATORS, ids=lambda backend: backend.name)
def operator(request: pytest.FixtureRequest) -> Backend:
    """Every implementation that is an operator: what is said about memory, threads, errors, ..."""
    return request.param


def backend_of(item: pytest.Item) -> Backend | None:
    """The backend that a test is about, if it is about one."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return next((value for value in values if isinstance(value, Backend)), None)


#: How many cases ``--representative`` keeps of a test that is about no backend.
MOST_CASES = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--representative",
        action="store_true",
        help="of each test, a few cases on each backend in which a parameter has a value for the "
        "first time (helpers/backends.py); leave out tests marked thorough",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples hypothesis tries, before tests read it."""
    settings.load_profile("few" if config.getoption("--representative") else "suite")


class Representatives:
    """Chooses, of each test and backend, a few cases that each bring a value not seen before."""

    def __init__(self) -> None:
        self.seen: dict[str, set[tuple[str, str]]] = {}  # values of parameters, of each test
        self.kept: Counter[tuple[str, str]] = Counter()  # cases of each test and backend
        self.covered: set[tuple[tuple[str, str], str]] = set()  # there, values that a test names

    def keeps(self, item: pytest.Item) -> bool:
        if item.get_closest_marker("thorough"):
            return False
        if not hasattr(item, "callspec"):
            return True
        test, backend = item.nodeid.partition("[")[0], backend_of(item)
        if backend is not None and not backend.is_chosen(item):
            return False
        place, most = (test, ""), MOST_CASES
        if backend is not None:
            place, most = (test, backend.name), backend.most
        is_fast = backend is None or backend.chosen is None
        if is_fast and self.covers(item, place):
            return True
        values = {(name, repr(value)) for name, value in item.callspec.params.items()}
        seen = self.seen.setdefault(test, set())
        if values <= seen or self.kept[place] >= most:
            return False
        seen |= values
        self.kept[place] += 1
        return True

    def covers(self, item: pytest.Item, place: tuple[str, str]) -> bool:
        """Whether a case is the first there with a value of the parameter that its test names."""
        marker = item.get_closest_marker("every")
        value = (place, repr(item.callspec.params[marker.args[0]])) if marker else None
        if value is None or value in self.covered:
            return False
        self.covered.add(value)
        self.kept[place] += 1
        return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to each backend its share of the cases, and choose some of them if asked to."""
    refuse_addresses(items)
    share_out(config, items)
    if not config.getoption("--representative"):
        return
    representatives = Representatives()
    kept = [representatives.keeps(item) for item in items]
    config.hook.pytest_deselected(
        items=[i for i, keep in zip(items, kept, strict=True) if not keep]
    )
    items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]


def pytest_collection_finish() -> None:
    """Spare the garbage collector what lives until the end: the tests themselves, and modules.

    Searching thousands of tests again and again took a fifth of their time; and it need not look
    as often as by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 10, 10)


def pytest_unconfigure() -> None:
    """Give the interpreter's end back what it is to clear: some extensions complain of the rest."""
    gc.unfreeze()


def refuse_addresses(items: list[pytest.Item]) -> None:
    """Refuse names of tests that hold an address: processes side by side would not agree."""
    named = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if named:
        raise pytest.UsageError(f"names of tests hold an address, which changes: {named[:3]}")


def share_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to each backend its share of the cases."""
    turns: Counter[tuple[str, str]] = Counter()
    kept, dropped = [], []
    for item in items:
        chosen = backend_of(item)
        if chosen is None:
            kept.append(item)
            continue
        share = chosen.share(item)
        place = (chosen.name, item.nodeid.partition("[")[0])
        taken = share > 0 and turns[place] % share == 0
        turns[place] += 1
        (kept if taken else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


@pytest.fixture(autouse=True)
def order_of_fibres(request: pytest.FixtureRequest) -> None:
    """Each test has an order of its CUDA blocks and threads, and always the same one."""
    chosen = backend_of(request.node)
    if chosen is not None:
        chosen.load()
    for threads in fibres.loaded():
        fibres.seed(threads, zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a process of its own, with the package on its path."""

    def run(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        paths = [str(ROOT), *map(str, FOLDERS), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, "-c", script, *args],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **env},
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )

    return run


def f64(values: Any) -> torch.Tensor:
    """Uniforms are float64."""
    return torch.tensor(values, dtype=torch.float64)


def log_probs(values: Any) -> torch.Tensor:
    """Logits of a law written down as probabilities (0 gives -inf)."""
    return torch.tensor(values, dtype=torch.float64).log().float()
