"""The operators of this build, under the namespace that the library itself names.

That is ``torch.ops.specdec`` for a package that is installed or built in place. A build for Hugging
Face `kernels` has a namespace of its own (``python setup.py hub``), because torch ends the process
where two libraries define one operator: so it can be loaded beside others.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

__all__ = ["CPU_LIBRARY", "NAMESPACE", "add_op_namespace_prefix", "c_string", "ops"]

CPU_LIBRARY = Path(__file__).with_name("_C.so")

if not CPU_LIBRARY.exists():
    raise ImportError(
        f"{CPU_LIBRARY} is missing: build it with `pip install --no-build-isolation -e .` in the "
        "folder of setup.py"
    )
torch.ops.load_library(CPU_LIBRARY)


def c_string(symbol: str) -> str | None:
    """Call a function of the CPU library that takes nothing and returns a C string, or null."""
    function = getattr(ctypes.CDLL(str(CPU_LIBRARY)), symbol)
    function.restype = ctypes.c_char_p
    value: bytes | None = function()
    return None if value is None else value.decode()


NAMESPACE = c_string("specdec_namespace") or ""
ops: Any = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(name: str) -> str:
    """Give the qualified name of an operator, for `torch.library`."""
    return f"{NAMESPACE}::{name}"
