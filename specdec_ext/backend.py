"""Which backends exist here, how "auto" chooses, and why the others are absent.

"auto" leaves the choice to torch's dispatcher, which goes by the tensors' device. An explicit
choice never falls back: it runs there, or raises and says why not.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import triton

_CPU_LIBRARY = Path(__file__).with_name("_C.so")


def load_libraries() -> None:
    """Load the operator libraries into torch."""
    if not _CPU_LIBRARY.exists():
        raise ImportError(
            f"{_CPU_LIBRARY} is missing: build it with `pip install --no-build-isolation -e .`"
        )
    torch.ops.load_library(_CPU_LIBRARY)
    cpu_capability()


def _c_string(symbol: str) -> str | None:
    function = getattr(ctypes.CDLL(str(_CPU_LIBRARY)), symbol)
    function.restype = ctypes.c_char_p
    value: bytes | None = function()
    return None if value is None else value.decode()


def cpu_variants() -> list[str]:
    """List the instruction sets that the CPU kernels were compiled for, best first."""
    return (_c_string("specdec_cpu_variants") or "").split(",")


def cpu_capability() -> str:
    """Name the instruction set that the CPU kernels use in this process.

    The best one that this processor has, or what the environment variable
    ``SPECDEC_CPU_CAPABILITY`` says.

    Raises
    ------
    RuntimeError
        ``SPECDEC_CPU_CAPABILITY`` names what was not compiled or what this processor lacks.
    """
    chosen = _c_string("specdec_cpu_capability")
    if chosen is None:
        raise RuntimeError(
            f"SPECDEC_CPU_CAPABILITY must be one of {', '.join(cpu_variants())}, and one that this "
            f"processor has, got {os.environ.get('SPECDEC_CPU_CAPABILITY')!r}"
        )
    return chosen


@cache
def absences() -> dict[str, str | None]:
    """Map every backend to the reason why it is absent here, None if it is present."""
    torch_cuda = "" if torch.version.cuda else f", and torch {torch.__version__} has no CUDA"
    return {
        "cpu": None,
        "cuda": f"no CUDA kernels in this version{torch_cuda}",
        "triton": triton.absence(),
        "reference": None,
    }


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
        ``torch.ops.specdec``, ``torch.ops.specdec_triton`` or `specdec_ext.reference`.

    Raises
    ------
    ValueError
        An explicit choice that is unknown, absent, or does not serve this device.
    """
    if backend == "auto":
        return torch.ops.specdec
    if backend == "cpu":
        if device.type != "cpu":
            raise ValueError(f"{op}: backend 'cpu' needs CPU tensors, got {device}")
        return torch.ops.specdec
    if backend == "reference":
        from . import reference

        return reference
    reasons = absences()
    if backend == "triton" and reasons["triton"] is None:
        if device.type == "cpu" and not triton.is_interpreted():
            raise ValueError(f"{op}: backend 'triton' needs GPU tensors, got {device}")
        return torch.ops.specdec_triton
    if backend in reasons:
        raise ValueError(f"{op}: backend {backend!r} is absent: {reasons[backend]}")
    raise ValueError(f"{op}: backend must be one of auto, {', '.join(reasons)}, got {backend!r}")
