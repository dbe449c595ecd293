"""Checks of values that callers give: numbers, flags, token ids and models.

Numbers may come from Python, NumPy or torch: a NumPy scalar and a 0-d tensor or array stand for the
number that they hold. A bool is no number, a float no int, and a string neither. Every function
takes the argument's name as errors are to say it ("generate: gamma"), and returns what was given as
plain Python.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import Any

from .cache_names import CACHE_NAMES, cache_name

__all__ = [
    "shown",
    "flag",
    "integer",
    "is_listing",
    "is_model",
    "items",
    "number",
    "number_in",
    "token_ids",
]

_LONGEST = 40  # characters of a value that an error repeats


def plain(value: Any) -> Any:
    """Return the number or the nested lists that a tensor, an array or a NumPy scalar holds."""
    is_array = hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if is_array else value


def shown(value: Any) -> str:
    """Say what a value is, for an error: its type, and the value or the shape where it is short."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape) > 0:
        return f"{kind} of shape {list(shape)}"
    held = plain(value)
    if held is None or not isinstance(held, (bool, Real, complex, str, bytes)):
        return kind
    text = repr(held)
    return f"{kind} {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"


def integer(
    name: str,
    value: Any,
    low: int | None = None,
    high: int | None = None,
    *,
    wanted: str = "an int",
) -> int:
    """Return an int of 64 bits in [low, high].

    Parameters
    ----------
    name : str
        The argument, as errors are to say it.
    value : int, NumPy integer or 0-d integer tensor
        What was given.
    low, high : int, optional
        The range.
    wanted : str
        What an error says that the argument must be.

    Raises
    ------
    TypeError
        Not an int; a bool is none.
    ValueError
        Out of range.

    Examples
    --------
    >>> import torch
    >>> integer("f: n", torch.tensor(3))
    3
    """
    held = plain(value)
    try:
        if isinstance(held, bool):
            raise TypeError
        whole = operator.index(held)
    except TypeError:
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}") from None
    _check_range(name, whole, low, high)
    if not -(2**63) <= whole < 2**63:
        raise ValueError(f"{name} must be an int of 64 bits, got {whole}")
    return whole


def number(name: str, value: Any, *, wanted: str = "a number") -> float:
    """Return a number of any size as a float, infinities and NaN among them.

    Raises
    ------
    TypeError
        Not a real number; a bool is none.
    """
    held = plain(value)
    if isinstance(held, bool) or not isinstance(held, Real):
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}")
    try:
        return float(held)
    except OverflowError:
        return math.inf if held > 0 else -math.inf  # type: ignore[operator]


def number_in(name: str, value: Any, low: float, high: float | None = None) -> float:
    """Return a finite number in [low, high] as a float.

    Raises
    ------
    TypeError
        Not a real number.
    ValueError
        NaN, infinite or out of range.
    """
    given = number(name, value)
    if not math.isfinite(given) and high is None:
        raise ValueError(f"{name} must be finite and at least {low}, got {given}")
    _check_range(name, given, low, high)
    return given


def _check_range(name: str, value: float, low: float | None, high: float | None) -> None:
    """Refuse what is not in [low, high]; NaN is not."""
    if (low is None or value >= low) and (high is None or value <= high):
        return
    if low is None or high is None:
        allowed = f"at least {low}" if high is None else f"at most {high}"
    else:
        allowed = f"in [{low}, {high}]"
    raise ValueError(f"{name} must be {allowed}, got {value}")


def flag(name: str, value: Any) -> bool:
    """Return a bool, given as Python's, NumPy's or a 0-d tensor's.

    Raises
    ------
    TypeError
        Anything else: ``0`` and ``"false"``, too.
    """
    held = plain(value)
    if not isinstance(held, bool):
        raise TypeError(f"{name} must be a bool, got {shown(value)}")
    return held


def is_listing(value: Any) -> bool:
    """Tell whether something holds others in order: a sequence, an iterator, an array, a tensor.

    Strings and bytes are no sequences of numbers; sets have no order, and mappings hold two things.
    """
    others = (str, bytes, bytearray, Mapping, Set, type)
    is_scalar = getattr(value, "shape", None) == ()
    return isinstance(value, Iterable) and not isinstance(value, others) and not is_scalar


def items(value: Any) -> list[Any] | None:
    """Return what a sequence, an iterator, an array or a tensor holds; None if it is none of these.

    Numbers of arrays and tensors come as Python's.
    """
    return list(plain(value)) if is_listing(value) else None


def token_ids(name: str, value: Any, low: int | None = 0, high: int | None = None) -> list[int]:
    """Return a sequence, an array or a tensor ``[n]`` of token ids as a list.

    Raises
    ------
    TypeError
        Not a sequence, or one of something else.
    ValueError
        An id out of [low, high].
    """
    ids = items(value)
    if ids is None:
        raise TypeError(f"{name} must be a sequence of token ids, got {shown(value)}")
    if all(type(token) is int for token in ids):  # a corpus may be long
        for token in {min(ids, default=low or 0), max(ids, default=low or 0)}:
            integer(name, token, low, high)
        return ids
    return [integer(name, token, low, high, wanted="token ids (int)") for token in ids]


def is_model(value: Any) -> bool:
    """Tell whether something can be called as Hugging Face causal models are: by its ``forward``.

    What a model returns, and whether its cache can roll back, is seen only when it is run.
    """
    forward = getattr(value, "forward", None)
    if isinstance(value, type) or not callable(value) or not callable(forward):
        return False
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # a compiled function may hide its own
        return True
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    passed = ("input_ids", cache_name(signature.parameters) or CACHE_NAMES[0], "use_cache")
    given = [name for name in passed if takes_any or name in signature.parameters]
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError:  # it asks for something else
        return False
    return "input_ids" in given
