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

from .._ops import NAMESPACE, add_op_namespace_prefix, ops

__all__ = ["absence", "check_device", "guard", "is_interpreted", "operators", "register"]

#: Dispatch keys of the devices that Triton compiles for; ROCm's is CUDA.
DEVICES = ("CUDA", "XPU")

#: The namespace of the operators that are Triton's wherever they run.
TRITON_NAMESPACE = f"{NAMESPACE}_triton"

HOW_TO_INSTALL = "pip install 'specdec_ext[triton]' (torch with CUDA or ROCm brings it)"


def is_interpreted() -> bool:
    """Whether kernels run on CPU tensors, in numpy."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def absence() -> str | None:
    """Say why the backend is absent here; None if it is present."""
    if not _is_installed():
        return f"triton is not installed: {HOW_TO_INSTALL}"
    if is_interpreted() or torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "no GPU here; with TRITON_INTERPRET=1 kernels are interpreted on the CPU, slowly"


def guard(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, which is where Triton launches."""
    if device.type == "cpu":
        return nullcontext()
    current: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return current


def check_device(name: str, device: torch.device) -> None:
    """Raise what says why kernels cannot run on tensors of a device."""
    if not _is_installed():
        raise RuntimeError(
            f"{name}: backend 'triton', needed on {device}, is not installed: {HOW_TO_INSTALL}"
        )
    if device.type == "cpu" and not is_interpreted():
        raise RuntimeError(f"{name}: backend 'triton' needs GPU tensors, got {device}")


def _operator(name: str) -> Callable[..., Any]:
    """Make the operator of a module's launcher: arguments checked and outputs allocated in C++."""
    schema = getattr(ops, name).default._schema
    prepare = getattr(ops, f"_prepare_{name}").default
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}

    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = prepare(*args, **kwargs)
        device = args[0].device
        check_device(name, device)
        launcher = getattr(importlib.import_module(f"{__name__}.{name}"), name)
        call = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        with guard(device):
            launcher(outputs, SimpleNamespace(**call))
        return outputs

    return run


_kept: list[Any] = []  # registrations go away with their library


def operators() -> Any:
    """Give the namespace whose operators are Triton's wherever they run."""
    return getattr(torch.ops, TRITON_NAMESPACE)


def register(fakes: dict[str, Any], count_mutation: Callable[[Any, Any], None]) -> None:
    """Define the operators of `TRITON_NAMESPACE`: those of the libraries, by their schemas.

    Those of the libraries get the same kernels on devices that have none. The libraries of the
    extension must have been loaded.
    """
    library: Any = torch.library  # its functions are not annotated
    own = library.Library(TRITON_NAMESPACE, "DEF")
    shared = library.Library(NAMESPACE, "FRAGMENT")
    _kept.extend((own, shared))
    for name, fake in fakes.items():
        operator = _operator(name)
        schema = str(getattr(ops, name).default._schema)
        own.define(schema.removeprefix(f"{NAMESPACE}::"))
        for key in ("CPU", *DEVICES):
            own.impl(name, operator, key)
        own.impl(name, library.fallthrough_kernel, "Autograd")
        library.register_fake(f"{TRITON_NAMESPACE}::{name}", fake)
        for key in DEVICES:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(
                add_op_namespace_prefix(name), key
            ):
                shared.impl(name, operator, key)
    count_mutation(own, operators().compact_kv.default)
