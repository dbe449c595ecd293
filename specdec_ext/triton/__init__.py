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

__all__ = ["OPERATORS", "absence", "define_operators", "serve_devices"]

#: In csrc/library.cpp's order.
OPERATORS = ("row_law", "sample", "verify", "acceptance", "uniforms")

#: Dispatch keys of the devices that Triton compiles for; ROCm's is CUDA.
DEVICES = ("CUDA", "XPU")


def is_interpreted() -> bool:
    """Whether kernels run on CPU tensors, in numpy."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def absence() -> str | None:
    """Say why the backend is absent here; None if it is present."""
    if find_spec("triton") is None:
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
        launcher = getattr(importlib.import_module(f"{__name__}.{name}"), name)
        with _guard(args[0].device):
            call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
            launcher(outputs, SimpleNamespace(**call))
        return outputs

    return run


def _interpreted(name: str) -> Callable[..., Any]:
    """Make the operator for CPU tensors, which only the interpreter serves."""
    operator = _operator(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_interpreted():
            raise ValueError(f"{name}: backend 'triton' on CPU tensors needs TRITON_INTERPRET=1")
        return operator(*args, **kwargs)

    return run


def define_operators(fakes: dict[str, Callable[..., Any]]) -> list[Any]:
    """Define ``torch.ops.specdec_triton``, the schemas of ``specdec`` under another name.

    Returns what must be kept for the operators to stay.
    """
    library: Any = torch.library  # its functions are not annotated
    namespace = library.Library("specdec_triton", "DEF")
    for name in OPERATORS:
        schema = str(getattr(torch.ops.specdec, name).default._schema)
        namespace.define(schema.removeprefix("specdec::"))
        namespace.impl(name, _interpreted(name), "CPU")
        for device in DEVICES:
            namespace.impl(name, _operator(name), device)
        namespace.impl(name, library.fallthrough_kernel, "Autograd")
        library.register_fake(f"specdec_triton::{name}", fakes[name])
    return [namespace]


def serve_devices() -> list[Any]:
    """Register the operators of ``specdec`` for devices that the extension has no kernels for.

    Returns what must be kept for the operators to stay.
    """
    library: Any = torch.library
    fragment = library.Library("specdec", "FRAGMENT")
    for name in OPERATORS:
        for device in DEVICES:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec::{name}", device):
                fragment.impl(name, _operator(name), device)
    return [fragment]
