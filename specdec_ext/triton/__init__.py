"""The operators as Triton kernels: the portable GPU path.

One module per operator, of the same name as in csrc/cpu, and modules of device functions that they
share. Triton itself is imported when an operator first runs.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["absence", "is_interpreted", "register"]

#: Dispatch keys of the devices that Triton compiles for; ROCm's is CUDA.
DEVICES = ("CUDA", "XPU")


def is_interpreted() -> bool:
    """Whether kernels run on CPU tensors, in numpy."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def absence() -> str | None:
    """Say why the backend is absent here; None if it is present."""
    if not _is_installed():
        return "triton is not installed"
    if is_interpreted() or torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "no GPU here; with TRITON_INTERPRET=1 kernels are interpreted on the CPU, slowly"


def _guard(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, which is where Triton launches."""
    if device.type == "cpu":
        return nullcontext()
    guard: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return guard


def _operator(name: str) -> Callable[..., Any]:
    """Make the operator of a module's launcher: arguments checked and outputs allocated in C++."""
    schema = getattr(torch.ops.specdec, name).default._schema
    prepare = getattr(torch.ops.specdec, f"_prepare_{name}").default
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}

    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = prepare(*args, **kwargs)
        device = args[0].device
        if not _is_installed():
            raise RuntimeError(f"{name}: backend 'triton', needed on {device}, is not installed")
        if device.type == "cpu" and not is_interpreted():
            raise RuntimeError(f"{name}: backend 'triton' needs GPU tensors, got {device}")
        launcher = getattr(importlib.import_module(f"{__name__}.{name}"), name)
        call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        with _guard(device):
            launcher(outputs, SimpleNamespace(**call))
        return outputs

    return run


_kept: list[Any] = []  # registrations go away with their library


def register(fakes: dict[str, Any], count_mutation: Callable[[Any, Any], None]) -> None:
    """Define the operators of ``torch.ops.specdec_triton``: those of ``specdec``, by their schemas.

    Those of ``specdec`` itself get the same kernels on devices that have none. The libraries of the
    extension must have been loaded.
    """
    library: Any = torch.library  # its functions are not annotated
    own = library.Library("specdec_triton", "DEF")
    shared = library.Library("specdec", "FRAGMENT")
    _kept.extend((own, shared))
    for name, fake in fakes.items():
        operator = _operator(name)
        schema = str(getattr(torch.ops.specdec, name).default._schema)
        own.define(schema.removeprefix("specdec::"))
        for key in ("CPU", *DEVICES):
            own.impl(name, operator, key)
        own.impl(name, library.fallthrough_kernel, "Autograd")
        library.register_fake(f"specdec_triton::{name}", fake)
        for key in DEVICES:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec::{name}", key):
                shared.impl(name, operator, key)
    count_mutation(own, torch.ops.specdec_triton.compact_kv.default)
