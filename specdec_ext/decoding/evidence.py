"""Does a callable keep state between calls? Found out by calling copies of it; and those copies."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Refused", "answers_alike", "copied", "holds_a_model", "keeps_state", "name_of"]

T = TypeVar("T")
_FUNCTION = (FunctionType, BuiltinFunctionType)
_WHOLE = (str, bytes, int, float, complex, bool, type, ModuleType, *_FUNCTION)
_CLOSE = 1e-3  # of answers that a model has part in


class Refused(ValueError):
    """A callable whose state can be neither ruled out nor copied; the message says why."""


def name_of(thing: Any) -> str:
    """Name a function by its name, an object by its class."""
    return getattr(thing, "__qualname__", None) or type(thing).__name__


def _parts(thing: Any) -> list[Any]:
    """Return what an object refers to, as far as a copy of it would hold copies."""
    if thing is None or isinstance(thing, (*_WHOLE, Tensor)):
        return []
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return list(thing)
    if isinstance(thing, MethodType):
        return [thing.__self__]
    parts = list(getattr(thing, "__dict__", {}).values())
    if isinstance(thing, functools.partial):
        parts += [thing.func, thing.args, thing.keywords]
    slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    return parts + [getattr(thing, name) for name in slots if hasattr(thing, name)]


def _models(thing: Any) -> Iterator[nn.Module]:
    """Find the modules that an object refers to; what is inside them is not looked at."""
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        if isinstance(one, nn.Module):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            left += _parts(one)


def holds_a_model(thing: Any) -> bool:
    """Tell whether a `torch.nn.Module` is among what an object refers to."""
    return next(_models(thing), None) is not None


def copied(thing: T) -> T:
    """Copy an object and all that it refers to, its caches too, but the models, which are shared.

    Raises whatever `copy.deepcopy` raises.
    """
    memo: dict[int, Any] = {id(model): model for model in _models(thing)}
    return copy.deepcopy(thing, memo)


def _alike(a: Any, b: Any, seen: set[tuple[int, int]]) -> bool:
    """Tell whether two copies of one object hold the same; False where it cannot be told."""
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen.add((id(a), id(b)))
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key], seen) for key in a)
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    parts, others = _parts(a), _parts(b)
    if isinstance(a, (list, tuple, MethodType)) or parts:
        both = zip(parts, others, strict=False)
        return len(parts) == len(others) and all(_alike(x, y, seen) for x, y in both)
    kind: Any = type(a)
    if kind.__eq__ is object.__eq__:
        return hasattr(a, "__dict__")  # both are empty; of what is opaque nothing is known
    try:
        same = a == b
        return bool(same.all() if hasattr(same, "all") else same)  # NumPy's arrays
    except Exception:
        return False


def answers_alike(a: Any, b: Any) -> bool:
    """Compare what two calls returned: tensors up to rounding."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if a.shape != b.shape:
        return False
    if torch.equal(a, b) or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a.float(), b.float(), rtol=_CLOSE, atol=_CLOSE, equal_nan=True)


def _state(thing: Any) -> Any:
    """Keep what an object holds now; parts that cannot be copied stand for themselves."""
    try:
        return copied(thing)
    except Exception:
        held = {}
        for name, value in vars(thing).items() if hasattr(thing, "__dict__") else ():
            try:
                held[name] = copied(value)
            except Exception:
                held[name] = value
        return held


def _changed(thing: Any, state: Any) -> bool:
    """Tell whether an object holds something else than when `_state` was taken."""
    now = thing if type(state) is type(thing) else vars(thing)
    return not _alike(now, state, set())


def keeps_state(
    thing: Any, ask: Callable[[Any, int], Any], *, what: str, ruled: str = "its arguments"
) -> bool:
    """Tell whether what a callable answers depends on what it was asked before.

    A copy is asked question 0, question 1, and question 0 again. If that changes neither its answer
    nor what it holds, it keeps no state that it uses. Otherwise copies taken between the questions
    must give the same answers once more. What cannot be copied is asked itself.

    Parameters
    ----------
    thing : callable
        Not called itself if it can be copied. (A function is its own copy.)
    ask : callable
        ``ask(thing, i)`` puts question i, 0 or 1, and returns the answer.
    what : str
        How an error calls it.
    ruled : str
        What its answers should be a function of, for the error.

    Raises
    ------
    Refused
        It keeps state that cannot be copied, or answers by something else than its state.
    """
    why = ""
    try:
        trial = copied(thing)
    except Exception as error:
        trial, why = thing, f"{type(error).__name__}: {error}"
    first = ask(trial, 0)
    after = _state(trial)
    second = ask(trial, 1)
    try:
        if answers_alike(first, ask(trial, 0)) and not _changed(trial, after):
            return False
    except Exception as error:  # it counts on being asked about a text that grows
        why = why and f"{why}; asked twice, it raised {type(error).__name__}: {error}"
    if why:
        raise Refused(f"{what} keeps state between calls and cannot be copied ({why})")
    again = copied(thing)
    if again is thing:
        raise Refused(f"{what} must be a function of {ruled}; asked twice, it answers differently")
    same = answers_alike(ask(again, 0), first)
    between = copied(again)
    if not (same and all(answers_alike(ask(one, 1), second) for one in (between, again))):
        raise Refused(
            f"{what} must be a function of {ruled} and of state that a copy takes along; two "
            "copies in the same state answer differently"
        )
    return True
