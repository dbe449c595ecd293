"""The table of backends, and what every test file shares."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

# Read when libgomp is loaded: test processes side by side must not spin at each other's barriers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

# Without a GPU, Triton's kernels run in its interpreter; read when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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
    interpreted: bool = False  # slow: joins only what INTERPRETED lists

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
CPU = Backend("cpu", torch.ops.specdec, "cpu", tolerance=1e-5, tv=1e-6)
TRITON = Backend(
    "triton",
    torch.ops.specdec_triton,
    "cuda" if torch.cuda.is_available() else "cpu",
    tolerance=1e-5,
    tv=1e-6,
    interpreted=not torch.cuda.is_available(),
)
OPERATORS = [CPU, TRITON] if find_spec("triton") else [CPU]
BACKENDS = [REFERENCE, *OPERATORS]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every implementation, the reference included."""
    return request.param


@pytest.fixture(params=OPERATORS, ids=lambda backend: backend.name)
def operator(request: pytest.FixtureRequest) -> Backend:
    """Every implementation that is an operator: what is said about memory, threads, errors, ..."""
    return request.param


# Where an interpreted backend joins, and with which share: every n-th case of a test. By test, or
# else by module; test_triton.py has what is written for it alone.
INTERPRETED = {
    "test_errors.test_value_errors": 6,
    "test_errors.test_message_in_full": 1,
    "test_filters.test_kept_tokens": 1,
    "test_filters.test_ties_at_the_top_stay": 2,
    "test_filters.test_masked_tokens_are_never_kept": 1,
    "test_filters.test_cutoffs_against_sorting": 4,
    "test_filters.test_crowded_rows_against_sorting": 4,
    "test_filters.test_negative_zero_ties_with_zero": 1,
    "test_filters.test_target_and_draft_have_laws_of_their_own": 2,
    "test_filters.test_draft_token_outside_the_draft_filters": 1,
    "test_invariance.test_what_follows_the_draft_is_not_read": 3,
    "test_invariance.test_strides_of_the_small_arguments": 2,
    "test_invariance.test_expanded_rows": 1,
    "test_invariance.test_inputs_are_not_changed": 8,
    "test_invariance.test_outputs_do_not_require_grad": 1,
    "test_parity.test_row_law": 5,
    "test_parity.test_sample": 4,
    "test_parity.test_acceptance": 6,
    "test_parity.test_outputs_have_the_documented_types": 4,
    "test_philox.test_uniforms_are_counters": 1,
    "test_philox.test_draws_of_sample_are_counters": 3,
    "test_philox.test_number_of_slots": 1,
    "test_philox.test_operators_agree_bit_for_bit": 1,
    "test_status": 3,
    "test_tables": 2,
    "test_tables.test_empty_batches": 1,
    "test_tables.test_no_draft_columns": 1,
    "test_tables.test_row_law_of_what_has_none": 1,
    "test_thresholds.test_coin_at_a_dyadic_threshold": 4,
    "test_thresholds.test_coin_at_a_rational_threshold": 4,
    "test_thresholds.test_p_of_zero_accepts_no_coin": 2,
    "test_thresholds.test_deterministic_token": 3,
    "test_thresholds.test_block_threshold_of_an_inner_node": 1,
    "test_thresholds.test_block_residual_is_scaled_by_the_inflow": 1,
    "test_thresholds.test_boundaries_of_a_uniform_draw": 2,
    "test_thresholds.test_boundaries_between_tiles": 1,
    "test_thresholds.test_boundaries_of_a_residual_draw": 2,
    "test_thresholds.test_a_rejected_deterministic_token_is_excluded": 6,
    "test_thresholds.test_large_logits": 3,
    "test_thresholds.test_largest_float16_and_float32_logits": 1,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to interpreted backends what INTERPRETED gives them."""
    turns: Counter[str] = Counter()
    dropped = []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        backend = params.get("backend", params.get("operator"))
        if not isinstance(backend, Backend) or not backend.interpreted:
            continue
        module = item.path.stem
        test = f"{module}.{item.originalname}"
        share = INTERPRETED.get(test, INTERPRETED.get(module))
        turns[test] += 1
        if share is None or (turns[test] - 1) % share != 0:
            dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        left = set(dropped)
        items[:] = [item for item in items if item not in left]


def speed_up_interpreter() -> None:
    """Patch triton.language once a launch: its interpreter does it at every call of a function.

    Only the time that tests take depends on it.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: list[frozenset[int]] = []  # sets of modules, in the launch that is running

    def patch_once(function: Any) -> Any:
        values = function.__globals__.values()
        found = frozenset(id(v) for v in values if v is interpreter.tl or v is interpreter.tl.core)
        if found in patched:
            return SimpleNamespace(restore=lambda: None)
        scope = patch(function)
        if not patched:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        patched.append(found)
        return scope

    interpreter._patch_lang = patch_once


if TRITON in OPERATORS and TRITON.interpreted:
    speed_up_interpreter()


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
