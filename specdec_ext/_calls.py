"""How public functions call operators: types checked, numbers made tensors, seeds drawn."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import _ops
from ._fake import FAKES
from .backend import resolve
from .contract import rule_names

__all__ = [
    "EXPANDED",
    "PASSED_ON",
    "Floats",
    "Ints",
    "call",
    "check_type",
    "is_number",
    "kind",
    "per_request",
]

Floats: TypeAlias = "Tensor | float | Sequence[float] | None"
Ints: TypeAlias = "Tensor | int | Sequence[int] | None"

_RULES_WITHOUT_RANDOMNESS = rule_names(ignores_sampling=True)

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
SAMPLING_OF_BOTH = (*SAMPLING, *(f"draft_{name}" for name in SAMPLING))

#: What an argument of a schema's type must be, in words and in Python.
_WANTED: dict[str, tuple[str, tuple[type, ...]]] = {
    "Tensor": ("a Tensor", (Tensor,)),
    "Optional[Tensor]": ("a Tensor or None", (Tensor, type(None))),
    "int": ("an int", (int, Integral)),
    "float": ("a number", (float, int, Real)),
    "Optional[float]": ("a number or None", (float, int, Real, type(None))),
    "bool": ("a bool", (bool,)),
    "str": ("a str", (str,)),
}


def _schema_types(op: str) -> dict[str, str]:
    arguments = getattr(_ops.ops, op).default._schema.arguments
    return {argument.name: str(argument.type) for argument in arguments}


#: Operator by operator: the arguments that are passed on, with their types, and those that may be
#: numbers and become tensors. From the schemas in csrc/library.cpp.
PASSED_ON = {
    op: {name: t for name, t in _schema_types(op).items() if name not in SAMPLING_OF_BOTH}
    for op in FAKES
}
EXPANDED = {op: [n for n in SAMPLING_OF_BOTH if n in _schema_types(op)] for op in FAKES}


def kind(value: object) -> str:
    return type(value).__name__


def is_number(value: object, integral: bool = False) -> bool:
    types = (int, Integral) if integral else (float, int, Real)
    return isinstance(value, types) and not isinstance(value, bool)


def check_type(op: str, name: str, value: object, wanted: str) -> None:
    words, types = _WANTED[wanted]
    # A bool is no number here, though it is an int to Python.
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise TypeError(f"{op}: {name} must be {words}, got {kind(value)}")


def per_request(op: str, name: str, value: Any, batch: int, device: torch.device) -> Tensor | None:
    """Make a number or a sequence a [B] tensor, float32 or for top_k int64. Tensors stay as is."""
    if value is None or isinstance(value, Tensor):
        return value
    integral = name.endswith("top_k")
    dtype = torch.int64 if integral else torch.float32
    if is_number(value, integral):
        return torch.full((batch,), value, dtype=dtype, device=device)
    if isinstance(value, (list, tuple)) and all(is_number(v, integral) for v in value):
        return torch.tensor(value, dtype=dtype, device=device)
    number = "an int" if integral else "a number"
    raise TypeError(
        f"{op}: {name} must be a Tensor, {number}, a list or tuple of them, or None, "
        f"got {kind(value)}"
    )


def _batch(tensor: Tensor) -> int:
    # A 0-d tensor is refused by the operator, which names the shape it wants.
    return tensor.shape[0] if tensor.dim() > 0 else 1


def _randomness(
    op: str,
    arguments: dict[str, Any],
    generator: torch.Generator | None,
    batch: int,
    device: torch.device,
) -> None:
    """Put fresh seeds and positions where the caller gave no randomness and the rule needs it."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{op}: generator must be a torch.Generator or None, got {kind(generator)}")
    for given in ("uniforms", "seeds"):
        if arguments[given] is not None:
            if generator is not None:
                raise ValueError(f"{op}: generator must be None where {given} are given")
            return
    if arguments.get("rule") in _RULES_WITHOUT_RANDOMNESS:
        return
    if generator is None:  # its own call: only this one traces with a symbolic batch
        seeds = torch.randint(2**63 - 1, (batch,), dtype=torch.int64, device=device)
    else:
        where = generator.device
        seeds = torch.randint(
            2**63 - 1, (batch,), dtype=torch.int64, device=where, generator=generator
        ).to(device)
    arguments["seeds"] = seeds
    if arguments["positions"] is None:
        arguments["positions"] = torch.zeros(batch, dtype=torch.int64, device=device)


def call(
    op: str,
    backend: str,
    requests: Tensor,
    arguments: dict[str, Any],
    generator: torch.Generator | None = None,
) -> Any:
    """Run an operator: types checked, numbers made tensors, randomness drawn where there is none.

    ``arguments``, all that the schema names, change in place; ``requests`` is the one of them that
    has a row for each request.
    """
    for name, wanted in PASSED_ON[op].items():
        check_type(op, name, arguments[name], wanted)
    batch, device = _batch(requests), next(iter(arguments.values())).device
    operators = resolve(op, backend, device)
    if "uniforms" in arguments:
        _randomness(op, arguments, generator, batch, device)
    for name in EXPANDED[op]:
        arguments[name] = per_request(op, name, arguments[name], batch, device)
    return getattr(operators, op)(**arguments)
