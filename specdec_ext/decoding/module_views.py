"""Copies of models that share all weights, and in which one part is another."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["outermost_lists", "shallow_copy", "with_copies", "with_part"]


def shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module but not its parts, so that one can be replaced in the copy alone.

    Parameters and buffers are the module's own: whatever happens to them happens to both.

    Parameters
    ----------
    module : torch.nn.Module
        It is not modified.

    Returns
    -------
    torch.nn.Module
        Of the same class.

    Raises
    ------
    TypeError
        ``forward`` was replaced on the module itself: it is bound to the original, which it would
        run in place of the copy.
    """
    if "forward" in vars(module):
        raise TypeError(
            f"the forward of {type(module).__name__} is wrapped (by accelerate's hooks, say); give "
            "the model without them"
        )
    shallow = copy.copy(module)
    shallow._modules = dict(module._modules)
    return shallow


def with_part(model: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """Return a copy of a model in which one part is another; all else is shared.

    Parameters
    ----------
    model : torch.nn.Module
        It is not modified.
    path : str
        Where the part is, as ``model.named_modules`` says it.
    part : torch.nn.Module
        What is there in the copy.

    Returns
    -------
    torch.nn.Module
        Of the model's class.

    Raises
    ------
    TypeError
        As in `shallow_copy`, of a module on the way to the part.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    >>> view = with_part(model, "1.0", nn.Tanh())
    >>> view[1][0], model[1][0], view[0] is model[0]
    (Tanh(), ReLU(), True)
    """
    *parents, name = path.split(".")
    view = holder = shallow_copy(model)
    for parent in parents:
        inner = shallow_copy(getattr(holder, parent))
        setattr(holder, parent, inner)
        holder = inner
    setattr(holder, name, part)
    return view


def with_copies(model: Any, paths: Iterable[str]) -> tuple[Any, dict[str, nn.Module]]:
    """Copy a module and some of its parts, which share their weights with the originals.

    A part that stands in several places does so in the copy.

    Parameters
    ----------
    model : torch.nn.Module
        The module.
    paths : iterable of str
        Which parts, by their dotted names.

    Returns
    -------
    (torch.nn.Module, dict of str to torch.nn.Module)
        The copy, and the copied parts by name.

    Raises
    ------
    TypeError
        As in `shallow_copy`, of a part or a module on the way to it.
    """
    copied: dict[int, nn.Module] = {}

    def of(module: Any) -> nn.Module:
        if id(module) not in copied:
            copied[id(module)] = shallow_copy(module)
        return copied[id(module)]

    view = of(model)
    found: dict[str, nn.Module] = {}
    for path in paths:
        holder, original = view, model
        for name in path.split("."):
            original = original._modules[name]
            holder._modules[name] = inner = of(original)
            holder = inner
        found[path] = holder
    return view, found


def outermost_lists(model: nn.Module, length: int | None = None) -> list[str]:
    """Return where the least deep lists of modules are, by their dotted names.

    Parameters
    ----------
    model : torch.nn.Module
        Where to look.
    length : int, optional
        Look at lists of so many modules only.

    Examples
    --------
    >>> from torch import nn
    >>> model = nn.Module()
    >>> model.layers = nn.ModuleList([nn.ModuleList([nn.ReLU()]) for _ in range(2)])
    >>> outermost_lists(model), outermost_lists(model, 1)
    (['layers'], ['layers.0', 'layers.1'])
    """
    paths = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and length in (None, len(module))
    ]
    depth = min((path.count(".") for path in paths), default=0)
    return [path for path in paths if path.count(".") == depth]
