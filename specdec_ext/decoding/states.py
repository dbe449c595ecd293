"""What a model with recurrent state remembers: taken, kept, brought back, and divided by rows.

Models disagree about where that is: in a cache whose layers are updated in place (Mamba, hybrids),
in a list or an object that the model makes and returns (RWKV, xLSTM), in attributes of its own
modules (RecurrentGemma). `Caller` runs a model from a `State`, which is all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .cache import (
    ATTENTION_LAYERS,
    accepted_arguments,
    cache_layers,
    described,
    vocabulary_size,
)
from .cache_names import CACHE_NAMES, STATE_NAMES
from .layers import GrowingLayer

__all__ = ["Caller", "State", "keeps_state", "state_argument"]

#: Ways to append that make new tensors: the old ones stay what they were.
_APPENDING = (DynamicLayer.update, DynamicSlidingWindowLayer.update)


def state_argument(model: Any) -> str | None:
    """Return the argument by which a model takes what it remembers; None if it takes nothing."""
    accepted = accepted_arguments(model)
    return next((name for name in STATE_NAMES if name in accepted), None)


def keeps_state(model: Any) -> bool:
    """Tell whether a causal model keeps a state from which single tokens cannot be taken back.

    Either it says so, or its cache has layers that are more than keys and values, or it takes what
    it remembers by another name than those of a key-value cache.
    """
    inner = described(model)
    config = getattr(inner, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return False
    name = state_argument(model)
    if name not in CACHE_NAMES:
        return name is not None
    if not hasattr(config, "get_text_config"):
        return False
    if getattr(inner, "_is_stateful", False):
        return True
    return any(type(layer).__name__ not in ATTENTION_LAYERS for layer in cache_layers(model))


class State:
    """What a model remembers of some rows, which are equally long.

    Attributes
    ----------
    value : Any
        What the model takes and gives back as its state; None before the first call.
    attributes : list of dict
        Attributes of the modules that keep state themselves, one dict a module.
    seen : int
        Tokens that it has taken in.
    """

    def __init__(self, value: Any, attributes: list[dict[str, Any]]) -> None:
        self.value = value
        self.attributes = attributes
        self.seen = 0

    def save(self) -> State:
        """Give what `load` brings back.

        It shares tensors with this state, which must not be run any more before it is loaded.
        """
        return self._mapped(lambda tensor: tensor, _saved_layer)

    def load(self, saved: State) -> None:
        """Be again what was saved; what was saved stays so, whatever is run."""
        value = self.value
        fresh = saved._mapped(torch.Tensor.clone, lambda layer, _: layer)
        if isinstance(value, Cache) and fresh.value is not None:
            kept = value.layers
            vars(value).update({**vars(fresh.value), "layers": kept})
            del kept[len(saved.value.layers) :]  # some caches grow layer by layer
            for layer, was in zip(kept, saved.value.layers, strict=True):
                _load_layer(layer, was)
        else:
            self.value = fresh.value
        self.attributes, self.seen = fresh.attributes, saved.seen

    def select(self, rows: Tensor, batch: int) -> State:
        """Give the state of these rows, of ``batch`` rows; it shares nothing with this one."""

        def chosen(tensor: Tensor) -> Tensor:
            batched = tensor.dim() >= 2 and tensor.shape[0] == batch
            return tensor[rows] if batched else tensor.clone()

        return self._mapped(chosen, lambda layer, change: _selected_layer(layer, rows, change))

    def _mapped(
        self, change: Callable[[Tensor], Tensor], of_layer: Callable[[Any, Any], Any]
    ) -> State:
        """Give a copy with ``change`` on every tensor, and ``of_layer`` on layers of a cache."""
        seen: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:  # what was one tensor stays one
            if id(tensor) not in seen:
                seen[id(tensor)] = change(tensor)
            return seen[id(tensor)]

        value = self.value
        if isinstance(value, Cache):
            layers = [of_layer(layer, once) for layer in value.layers]
            rest = {name: held for name, held in vars(value).items() if name != "layers"}
            value = copy.copy(value)
            vars(value).update(_mapped(rest, once), layers=layers)
        elif value is not None and not isinstance(value, (Tensor, dict, list, tuple)):
            value = copy.copy(value)
            vars(value).update(_mapped(vars(value), once))
        else:
            value = _mapped(value, once)
        copied = State(value, _mapped(self.attributes, once))
        copied.seen = self.seen
        return copied


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Rebuild containers with ``change`` on every tensor in them; all else stays itself."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(held, change) for name, held in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_mapped(held, change) for held in value)
    return value


def _saved_layer(layer: Any, change: Any) -> Any:
    """Give what brings a layer back: of keys and values in a buffer, how many there are."""
    if isinstance(layer, GrowingLayer):
        return layer.slots if layer.is_initialized else None
    return _mapped(vars(layer), change)


def _load_layer(layer: Any, saved: Any) -> None:
    if isinstance(layer, GrowingLayer):
        if layer.is_initialized:
            layer._resize(saved or 0)
        return
    # Keys and values that appending never writes to need no copy, which could be long.
    shared = ("keys", "values") if getattr(type(layer), "update", None) in _APPENDING else ()
    kept = {name: held for name, held in saved.items() if name in shared}
    rest = {name: held for name, held in saved.items() if name not in shared}
    vars(layer).update({**_mapped(rest, torch.Tensor.clone), **kept})


def _selected_layer(layer: Any, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Any:
    if layer is None or isinstance(layer, (int, dict)):  # as saved
        return _mapped(layer, change)
    chosen = copy.copy(layer)
    if isinstance(layer, GrowingLayer):
        chosen.batch_select_indices(rows)
    else:
        vars(chosen).update(_mapped(vars(layer), change))
    return chosen


class Caller:
    """A model, called from a state.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model that keeps a state: see `keeps_state`.
    holders : sequence of (Module, list of str)
        Modules of ``model`` that keep state in attributes of their own, and which.
    makes_own : bool
        Whether the model makes what it remembers in its first call, as no cache of transformers
        would do.
    step : int or None
        Tokens a call may run from a state; None: any number.
    """

    def __init__(
        self,
        model: Any,
        holders: Sequence[tuple[nn.Module, list[str]]] = (),
        *,
        makes_own: bool = False,
        step: int | None = None,
    ) -> None:
        self.model = model
        self.holders = list(holders)
        self.makes_own = makes_own
        self.step = step
        self.calls = 0
        name = state_argument(model)
        assert name is not None, "of a model that keeps a state"
        self.name = name
        self.continuing = False  # whether the call under way begins from a state
        self._accepts = accepted_arguments(model)
        self._vocabulary = vocabulary_size(model)

    def begin(self, room: int = 0) -> State:
        """Give a state that has seen nothing; ``room`` slots for keys and values at first."""
        cache: Any = None
        if not self.makes_own:
            cache = DynamicCache(config=described(self.model).config)
            cache.layers = [
                GrowingLayer(room) if type(layer) is DynamicLayer else layer
                for layer in cache.layers
            ]
        return State(cache, [dict.fromkeys(names) for _, names in self.holders])

    def run(self, state: State, tokens: Tensor, keep: int) -> Tensor:
        """Have a state take in tokens ``[b, n]``; return the last ``keep`` rows of logits."""
        last = None if self._vocabulary is None else self._vocabulary - 1
        tokens = tokens.clamp(min=0, max=last)
        if self.step is None or not state.seen:
            return self._call(state, tokens, keep)
        rows = [self._call(state, part, 1) for part in tokens.split(self.step, 1)]
        return torch.cat(rows[-keep:], 1)

    def _call(self, state: State, tokens: Tensor, keep: int) -> Tensor:
        given: dict[str, Any] = {}
        if "logits_to_keep" in self._accepts:
            given["logits_to_keep"] = keep
        if "position_ids" in self._accepts:  # Bamba counts from 0 in every call
            steps = torch.arange(state.seen, state.seen + tokens.shape[1], device=tokens.device)
            given["position_ids"] = steps.expand(len(tokens), -1)
        if state.value is not None:
            given[self.name] = state.value
        self.continuing = state.seen > 0
        for (holder, _), attributes in zip(self.holders, state.attributes, strict=True):
            vars(holder).update(attributes)
        output = self.model(input_ids=tokens, use_cache=True, **given)
        state.attributes = [
            {name: vars(holder)[name] for name in names} for holder, names in self.holders
        ]
        returned = getattr(output, self.name, None)
        state.value = state.value if returned is None else returned
        state.seen += tokens.shape[1]
        self.calls += 1
        logits: Tensor = output.logits[:, -keep:]
        return logits.float() if logits.dtype == torch.float64 else logits
