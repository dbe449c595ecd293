"""How a model with recurrent state may be called from a state: found out by trying.

Not every model continues as it would have read on. Some take several tokens after a state as if
they were the first (Mamba, FalconMamba, Jamba, Zamba: their scan begins at zero; RecurrentGemma),
some compute something else for a single one (Nemotron-H, Zamba2: no lower limit on time steps).
`continuation` tries a model on a short text, against its own forward pass without a cache, and
remembers what it found; `caller` makes what calls the model so.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from .cache_names import cache_name
from .module_views import with_copies
from .probe import ordinary_texts
from .states import Caller, State, state_argument

__all__ = ["Continuation", "caller", "continuation"]

PROBE = 12  # tokens of the text that a model is tried on
FORGOTTEN = 5  # of its first tokens a faulty continuation might know nothing
#: What models raise where they are called in a way they were not made for.
FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, LookupError)
#: How, and on how many tokens at least, in the order in which they are tried.
WAYS = (("whole", 1), ("whole", 2), ("scan", 1), ("stepwise", 1), ("single", 1))


class Continuation(NamedTuple):
    """How a model continues from a state as it would have read on.

    Attributes
    ----------
    way : str
        "whole": a call runs any number of tokens. "scan": so it does once the selective scans
        begin at the state. "stepwise": once the modules that keep the state are called for one
        token at a time, within a call. "single": only calls on one token are right.
    fewest : int
        Fewest tokens that a call may run.
    shares : bool
        Whether a state may hold several rows.
    makes_own : bool
        As in `Caller`.
    holders : tuple of (str, list of str)
        Names of the modules that keep state themselves, and of their attributes that hold it.
    """

    way: str
    fewest: int
    shares: bool
    makes_own: bool
    holders: tuple[tuple[str, list[str]], ...]


#: What was found, for each model: how much a fault shows depends on its weights.
_known: weakref.WeakKeyDictionary[Any, dict[Any, Continuation]] = weakref.WeakKeyDictionary()


def caller(model: Any, found: Continuation) -> Caller:
    """Return what calls a model in the way that was found.

    A model that is right as it is will be called itself; else a copy that shares its weights.
    """
    copies: dict[str, nn.Module] = {}
    paths = [path for path, _ in found.holders]
    mixers = _mixers(model, paths) if found.way in ("scan", "stepwise") else []
    if paths or mixers:
        model, copies = with_copies(model, [*paths, *mixers])
    called = Caller(
        model,
        [(copies[path], names) for path, names in found.holders],
        makes_own=found.makes_own,
        step=1 if found.way == "single" else None,
    )
    for path in mixers:
        change = _scanning if found.way == "scan" else _stepping
        vars(copies[path])["forward"] = change(copies[path], called)
    return called


# --- trying ---------------------------------------------------------------------------------------


def continuation(model: Any, device: torch.device) -> Continuation:
    """Find out how a model may be called from a state, or remember it.

    Parameters
    ----------
    model : torch.nn.Module
        A model that keeps a state. It is called, but copies take the states in.
    device : torch.device
        Where its inputs are.

    Raises
    ------
    ValueError
        In no way does it continue as its forward pass without a cache reads on.
    """
    known = _known.setdefault(model, {})
    dtype = next((parameter.dtype for parameter in model.parameters()), None)
    key = dtype, device.type, model.training
    if key not in known:
        with torch.inference_mode():
            known[key] = _Trial(model, device).result()
    return known[key]


class _Trial:
    """A model's own forward pass on a random text, against which its continuations are held."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model
        paths = [path for path, _ in model.named_modules() if path]
        try:  # states that modules keep go to copies: the model may be at work elsewhere
            self.view, self.copies = with_copies(model, paths)
        except TypeError:  # wrapped modules cannot be copied; they keep no state, or it fails
            self.view, self.copies = model, {}
        self.texts = torch.cat(ordinary_texts(model, PROBE, device))
        self.expected = self._uncached(self.texts[:1])
        forgetful = self._uncached(self.texts[:1, FORGOTTEN:])
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        self.rounding = 4 * eps * _size(self.expected)
        self.influence = _size(forgetful - self.expected[:, FORGOTTEN:])  # of a forgotten state

    def _uncached(self, texts: Tensor) -> Tensor:
        try:
            logits: Tensor = self.view(input_ids=texts, use_cache=False).logits
        except FAILURES as error:
            raise self._refusal(f"its forward pass without a cache fails: {error}") from error
        return logits.double()

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"generate: {type(self.model).__name__} keeps a state, and {why}")

    def result(self) -> Continuation:
        """Return how the model continues.

        The least error of all ways is taken for the model's precision: a way is wrong if another is
        much better.
        """
        makes_own, holders = self._where_state_is()
        tried: dict[tuple[str, int], float] = {}
        for way, fewest in WAYS:
            found = Continuation(way, fewest, False, makes_own, holders)
            tried[way, fewest] = error = self._error(found)
            if error <= self.rounding < self.influence / 32:
                break  # no way is better
        least = min(tried.values())
        if least > max(self.influence / 4, self.rounding):
            raise self._refusal(
                "its answers from that state are not those of its forward pass on the whole text; "
                "it can be neither rolled back nor decoded"
            )
        tolerance = 4 * least + self.rounding
        right = [how for how, error in tried.items() if error <= tolerance]
        settled = self.influence > 4 * tolerance
        if not settled:  # states matter too little to tell: keep to what is done in plain decoding
            right = [how for how in right if how[0] == "stepwise"] or right
        found = Continuation(*right[0], False, makes_own, holders)
        return found._replace(shares=self._shared_error(found) <= tolerance)

    def _where_state_is(self) -> tuple[bool, tuple[tuple[str, list[str]], ...]]:
        """Tell whether the model makes its state itself, and which modules keep some."""
        before = {path: _tensors(module) for path, module in self.copies.items()}
        try:
            output = self.view(input_ids=self.texts[:1, :2], use_cache=True)
        except FAILURES as error:
            raise self._refusal(f"calling it with one fails: {error}") from error
        holders = []
        for path, module in self.copies.items():
            now = _tensors(module)
            changed = [name for name in now if now[name] is not before[path].get(name)]
            if changed:
                holders.append((path, changed))
        name = state_argument(self.model)
        returned = getattr(output, name or "", None)
        return not (returned is None or type(returned) is DynamicCache), tuple(holders)

    def _error(self, found: Continuation) -> float:
        """Hold a way of continuing against the forward pass, from states as rounds meet them."""
        if found.way in ("scan", "stepwise") and not _mixers(
            self.model, [p for p, _ in found.holders]
        ):
            return float("inf")
        try:
            called = caller(self.model, found)
            state = called.begin()
            pieces = self._pieces(called, state, [1, *[1] * 7] if found.fewest == 1 else [2, 2, 3])
            state = called.begin()
            pieces += self._pieces(called, state, [FORGOTTEN])
            saved = state.save()
            for lengths in ([2, 5], [7]):
                state.load(saved)
                pieces += self._pieces(called, state, lengths)
        except FAILURES:
            return float("inf")
        return max(self._distance(logits, start, self.expected) for start, logits in pieces)

    def _pieces(self, called: Caller, state: State, lengths: Sequence[int]) -> list[Any]:
        """Run pieces of the text; return where each begins and its logits."""
        pieces = []
        for length in lengths:
            start = state.seen
            tokens = self.texts[:1, start : start + length]
            pieces.append((start, called.run(state, tokens, length)))
        return pieces

    @staticmethod
    def _distance(logits: Tensor, start: int, expected: Tensor) -> float:
        return _size(logits.double() - expected[:, start : start + logits.shape[1]])

    def _shared_error(self, found: Continuation) -> float:
        """Hold rows that share a state against each alone, after they swapped places and parted."""
        order = torch.tensor([1, 0], device=self.texts.device)
        expected = torch.cat([self._uncached(text[None]) for text in self.texts])[order]
        try:
            called = caller(self.model, found)
            state = called.begin()
            called.run(state, self.texts[:, :FORGOTTEN], 1)
            saved = state.save().select(order, 2)
            state = state.select(order, 2)
            state.load(saved)
            texts = self.texts[order, FORGOTTEN:]
            *shared, last = texts.split(
                [found.fewest, found.fewest, texts.shape[1] - 2 * found.fewest], 1
            )
            logits = [called.run(state, part, part.shape[1]) for part in shared]
            rows = torch.arange(2, device=order.device).split(1)
            alone = [called.run(state.select(row, 2), last[row], last.shape[1]) for row in rows]
            logits.append(torch.cat(alone))
        except FAILURES:
            return float("inf")
        return self._distance(torch.cat(logits, 1), FORGOTTEN, expected)


def _size(logits: Tensor) -> float:
    """Return the root mean square of what is finite."""
    finite = logits[logits.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else float("inf")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors among a module's plain attributes."""
    return {name: held for name, held in vars(module).items() if isinstance(held, Tensor)}


# --- mixers ---------------------------------------------------------------------------------------


def _mixers(model: Any, holders: Sequence[str]) -> list[str]:
    """Name the modules that read and write a state: the innermost ones that are handed it.

    Modules that keep state themselves come in whole: the outermost of each.
    """
    if holders:
        return [p for p in holders if not any(p.startswith(f"{other}.") for other in holders)]
    paths = [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if hasattr(module, "layer_idx") and _takes_cache(module)
    ]
    return [p for p in paths if not any(other.startswith(f"{p}.") for other in paths)]


def _takes_cache(module: nn.Module) -> bool:
    code = unwrap(type(module).forward).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "cache_params" in names or cache_name(names) is not None


def _cache_among(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return next((held for held in (*args, *kwargs.values()) if isinstance(held, Cache)), None)


def _stepping(mixer: nn.Module, called: Caller) -> Callable[..., Any]:
    """Return a forward that runs a mixer for one token at a time, where it begins from a state."""
    forward = mixer.forward

    def step_by_step(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        length = hidden.shape[1]
        if length == 1 or not called.continuing:
            return forward(hidden, *args, **kwargs)

        def at(held: Any, i: int) -> Any:
            along = isinstance(held, Tensor) and held.dim() > 1 and held.shape[1] == length
            return held[:, i : i + 1] if along else held

        outputs = [
            forward(
                hidden[:, i : i + 1],
                *(at(held, i) for held in args),
                **{name: at(held, i) for name, held in kwargs.items()},
            )
            for i in range(length)
        ]
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs, 1)
        first = torch.cat([output[0] for output in outputs], 1)
        return (first, *outputs[-1][1:])

    return step_by_step


# --- selective scans ------------------------------------------------------------------------------


def _scanning(mixer: nn.Module, called: Caller) -> Callable[..., Any]:
    """Return a forward whose selective scans begin at the cached state, not at zero.

    The function that the mixer calls by the name ``mamba_selective_scan`` (in Python, or a kernel)
    is called as before; what the state before it adds to its output is added (`scan_from`).
    """
    function = unwrap(type(mixer).forward)
    name = "mamba_selective_scan"
    if name not in function.__code__.co_names or hasattr(mixer, "_hf_hook"):
        return mixer.forward  # attention, in a hybrid
    scan = function.__globals__[name]

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = _cache_among(args, kwargs)
        before: Tensor | None = None
        if called.continuing and cache is not None:
            before = cache.layers[mixer.layer_idx].recurrent_states[0]
        if before is None:
            return mixer.__class__.forward(mixer, *args, **kwargs)
        # Zamba's heads are scanned one after another.
        states = iter(before.unbind(1) if before.dim() == 4 else [before])

        def scan_from_state(*args: Any, **kwargs: Any) -> Any:
            return scan_from(next(states), scan, *args, **kwargs)

        bound = types.FunctionType(
            function.__code__,
            {**function.__globals__, name: scan_from_state},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        bound.__kwdefaults__ = copy.copy(function.__kwdefaults__)
        return bound(mixer, *args, **kwargs)

    return forward


def scan_from(
    before: Tensor,
    scan: Callable[..., Any],
    inputs: Tensor,
    steps: Tensor,
    rates: Tensor,
    into: Tensor,
    out_of: Tensor,
    *args: Any,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Any:
    """Run a selective scan that begins at a state, by one that begins at zero.

    The recurrence ``h_t = exp(A dt_t) h_(t-1) + dt_t B_t u_t``, ``y_t = C_t h_t`` is linear: the
    state before it adds ``C_t exp(A (dt_1 + ... + dt_t)) h_0``. (Gu and Dao, arXiv 2312.00752.)

    Parameters
    ----------
    before : Tensor
        ``[B, D, N]``, h_0.
    scan : callable
        The scan that begins at zero; all that follows are its arguments.
    inputs, steps : Tensor
        ``[B, D, L]``, u, and dt before ``delta_bias`` and softplus.
    rates : Tensor
        ``[D, N]``, A.
    into, out_of : Tensor
        ``[B, N, L]``, B and C.
    z : Tensor, optional
        ``[B, D, L]``, the gate.
    delta_bias : Tensor, optional
        ``[D]``.
    delta_softplus, return_last_state : bool
        As in the scan.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        ``[B, D, L]``, and with ``return_last_state`` the state ``[B, D, N]``.
    """
    found, last = scan(
        inputs, steps, rates, into, out_of, *args, z=None, delta_bias=delta_bias,
        delta_softplus=delta_softplus, return_last_state=True, **kwargs,
    )  # fmt: skip
    if delta_bias is not None:
        steps = steps + delta_bias.to(steps.dtype)[..., None]
    if delta_softplus:
        steps = F.softplus(steps)
    wide = torch.promote_types(steps.dtype, torch.float32)
    passed = steps.to(wide).cumsum(-1)[..., None] * rates.to(wide)[:, None]  # [B, D, L, N]
    carried = passed.exp() * before.to(wide)[:, :, None]
    found = found + torch.einsum("bdln,bnl->bdl", carried, out_of.to(wide)).to(found.dtype)
    if z is not None:
        found = found * F.silu(z)
    if not return_last_state:
        return found
    return found, last + carried[:, :, -1].to(last.dtype)
