"""The table of backends, and what every test file shares."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read when libgomp is loaded: test processes side by side must not spin at each other's barriers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

import specdec_ext  # noqa: E402
from specdec_ext import reference  # noqa: E402
from specdec_ext.testing import VerifyCase, VerifyOutcome  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

# Derandomised: a failure seen once is seen by everybody.
settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("suite")

# Test processes run side by side; test_threads.py sets what it needs.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Backend:
    """One implementation of the operators, called with the schemas' arguments."""

    name: str
    operators: Any
    device: str
    tolerance: float  # of decisions, see specdec_ext.testing.explain_outcome
    tv: float  # bound on the total variation of an exact law

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        def move(value: Any) -> Any:
            return value.to(self.device) if isinstance(value, torch.Tensor) else value

        result = getattr(self.operators, name)(
            *map(move, args), **{key: move(value) for key, value in kwargs.items()}
        )
        if isinstance(result, torch.Tensor):
            return result.cpu()
        return tuple(output.cpu() for output in result)

    def verify(self, *args: Any, **kwargs: Any) -> VerifyOutcome:
        return VerifyOutcome(*self._call("verify", *args, **kwargs))

    def row_law(self, *args: Any, **kwargs: Any) -> Any:
        return specdec_ext.RowLaw(*self._call("row_law", *args, **kwargs))

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        return specdec_ext.SampleResult(*self._call("sample", *args, **kwargs))

    def acceptance(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._call("acceptance", *args, **kwargs)

    def uniforms(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._call("uniforms", *args, **kwargs)

    def run(self, case: VerifyCase) -> VerifyOutcome:
        return case.run(self.verify)


REFERENCE = Backend("reference", reference, "cpu", tolerance=1e-9, tv=1e-9)
OPERATORS = [Backend("cpu", torch.ops.specdec, "cpu", tolerance=1e-5, tv=1e-6)]
BACKENDS = [REFERENCE, *OPERATORS]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every implementation, the reference included."""
    return request.param


@pytest.fixture(params=OPERATORS, ids=lambda backend: backend.name)
def operator(request: pytest.FixtureRequest) -> Backend:
    """Every implementation that is an operator: what is said about memory, threads, errors, ..."""
    return request.param


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a process of its own, with the package on its path."""

    def run(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, "-c", script, *args],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **env},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def f64(values: Any) -> torch.Tensor:
    """Uniforms are float64."""
    return torch.tensor(values, dtype=torch.float64)


def log_probs(values: Any) -> torch.Tensor:
    """Logits of a law written down as probabilities (0 gives -inf)."""
    return torch.tensor(values, dtype=torch.float64).log().float()
