"""Which backends exist here, how "auto" chooses, and why the others are absent.

"auto" leaves the choice to torch's dispatcher, which goes by the tensors' device. An explicit
choice never falls back: it runs there, or raises and says why not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import triton
from ._ops import c_string, ops

_CUDA_LIBRARY = Path(__file__).with_name("_C_cuda.so")
_cuda_load_error: str | None = None


def load_libraries() -> None:
    """Load what importing `_ops` has not: the CUDA library, only where torch has CUDA."""
    cpu_capability()
    if torch.version.cuda is not None and _CUDA_LIBRARY.exists():
        _load_cuda_library()


def _load_cuda_library() -> None:
    global _cuda_load_error
    try:
        torch.ops.load_library(_CUDA_LIBRARY)
    except (OSError, RuntimeError) as error:
        reason = error.__cause__ or error  # torch's own text only names the file
        _cuda_load_error = f"{_CUDA_LIBRARY.name} did not load: {reason}"
        warnings.warn(f"specdec_ext runs without CUDA kernels: {_cuda_load_error}", stacklevel=4)


def cpu_variants() -> list[str]:
    """List the instruction sets that the CPU kernels were compiled for, best first."""
    return (c_string("specdec_cpu_variants") or "").split(",")


def cpu_capability() -> str:
    """Name the instruction set that the CPU kernels use in this process.

    The best one that this processor has, or what the environment variable
    ``SPECDEC_CPU_CAPABILITY`` says.

    Raises
    ------
    RuntimeError
        ``SPECDEC_CPU_CAPABILITY`` names what was not compiled or what this processor lacks.
    """
    chosen = c_string("specdec_cpu_capability")
    if chosen is None:
        raise RuntimeError(
            f"SPECDEC_CPU_CAPABILITY must be one of {', '.join(cpu_variants())}, and one that this "
            f"processor has, got {os.environ.get('SPECDEC_CPU_CAPABILITY')!r}"
        )
    return chosen


def _cuda_absence() -> str | None:
    from ._host import build_info

    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    if not _CUDA_LIBRARY.exists():
        left_out = build_info()["cuda_left_out"]
        if left_out:
            return f"built without CUDA kernels: {left_out}"
        return f"{_CUDA_LIBRARY} is missing"
    if _cuda_load_error is not None:
        return _cuda_load_error
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def _reference() -> Any:
    from . import reference

    return reference


@dataclass(frozen=True)
class _Backend:
    """One implementation of the operators."""

    absence: Callable[[], str | None]  # why it is not here, None if it is
    operators: Callable[[], Any]  # the namespace that holds them
    serves: Callable[[torch.device], bool]
    wants: str  # what it serves, for the message


_BACKENDS = {
    "cpu": _Backend(lambda: None, lambda: ops, lambda device: device.type == "cpu", "CPU tensors"),
    "cuda": _Backend(
        _cuda_absence,
        lambda: ops,
        lambda device: device.type == "cuda",
        "CUDA tensors",
    ),
    "triton": _Backend(
        triton.absence,
        triton.operators,
        lambda device: device.type != "cpu" or triton.is_interpreted(),
        "GPU tensors",
    ),
    "reference": _Backend(lambda: None, _reference, lambda device: True, "tensors"),
}


#: Backends without kernels for an operator.
_WITHOUT = {"tree_attention": ("cuda",)}


def has_kernels(op: str, backend: str) -> bool:
    """Whether a backend has kernels for an operator."""
    return backend not in _WITHOUT.get(op, ())


@cache
def absences() -> dict[str, str | None]:
    """Map every backend to the reason why it is absent here, None if it is present."""
    return {name: backend.absence() for name, backend in _BACKENDS.items()}


def resolve(op: str, backend: str, device: torch.device) -> Any:
    """Find the namespace that holds the operators of a backend.

    Parameters
    ----------
    op : str
        The operator, for the message.
    backend : str
        "auto" or the name of a backend.
    device : torch.device
        Where the tensors are.

    Returns
    -------
    namespace
        `specdec_ext._ops.ops`, Triton's operators or `specdec_ext.reference`.

    Raises
    ------
    ValueError
        An explicit choice that is unknown, absent, without the operator, or does not serve this
        device.
    """
    if backend == "auto":
        return ops
    if backend not in _BACKENDS:
        names = ", ".join(_BACKENDS)
        raise ValueError(f"{op}: backend must be one of auto, {names}, got {backend!r}")
    if not has_kernels(op, backend):
        having = ", ".join(name for name in _BACKENDS if has_kernels(op, name))
        raise ValueError(f"{op}: backend {backend!r} has no kernels for it, only {having}")
    chosen = _BACKENDS[backend]
    reason = chosen.absence()
    if reason is not None:
        raise ValueError(f"{op}: backend {backend!r} is absent: {reason}")
    if not chosen.serves(device):
        raise ValueError(f"{op}: backend {backend!r} needs {chosen.wants}, got {device}")
    return chosen.operators()
