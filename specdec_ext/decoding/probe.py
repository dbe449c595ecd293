"""What a model can be asked to do with its cache, found out by asking the model itself.

Whether the slots of a cache may hold masked places (*holes*) among a row's tokens, whether rows may
begin at different slots (*padding*), whether a tree or a cache of one fixed size is understood:
all this depends on how a model counts distances and positions, which no signature tells. So a
short text is run as it would be in each of these ways, on one row, and the answers are compared
with those of a plain run. This takes a few calls on a handful of tokens. What was found is kept
for as long as the process lives, for each model class, configuration and dtype.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cache import (
    CachedModel,
    Traits,
    accepted_arguments,
    described,
    smallest_window,
    vocabulary_size,
)

__all__ = [
    "ROUNDING",
    "SAME",
    "check_features",
    "check_model",
    "check_static",
    "check_trees",
    "find_traits",
    "ordinary_texts",
]

CONTEXT, TAIL, GAP = 7, 3, 4  # tokens before, tokens asked about, slots of a small hole
LONGEST_SPAN = 8192  # slots of a large hole at most: a wider window is known by configuration alone
SAME = 4.0  # answers may differ by this many times what two plain runs differ by
ROUNDING = 16.0  # or by this many units in the last place of the largest logit: 8.1 were seen
UNRELATED = 0.25  # of the difference that another text makes: answers that do not see the cache
UNTRIED = "is in training mode: what it understands cannot be found out; call eval()"

POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")

# Answers, by what identifies the model (see `_identity`) and by the question.
_Found = dict[tuple[Hashable, "_Question"], Any]
_found: _Found = {}
_found_of: weakref.WeakKeyDictionary[Any, _Found] = weakref.WeakKeyDictionary()


class _Unsettled(Exception):
    """The model's answers settle nothing; carries what to assume for the time being."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def check_model(model: Any) -> None:
    """Refuse a model whose answers over a cache are not those without one.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model called as Hugging Face models are.

    Raises
    ------
    ValueError
        The model ignores the cache, keeps its context elsewhere, or cannot be called so.
    """
    _raise(model, _remembered(model, _Question("plain"), lambda: _Probe(model).plain_fault()))


def find_traits(model: Any, span: int, *, static: bool) -> Traits:
    """Find out how rows of different lengths may lie in one cache.

    Parameters
    ----------
    model : torch.nn.Module
        As in `check_model`.
    span : int
        Slots that the cache may come to have. Holes up to this size are tried, so that a window
        that matters within it shows.
    static : bool
        Whether the cache is to keep one size.
    """
    traits: Traits = _remembered(
        model,
        _Question("traits", static, span),
        lambda: _Probe(model, static).find_traits(span),
        is_free=lambda known: known.holes and known.padding,
    )
    return traits


def check_static(model: Any, span: int) -> None:
    """Refuse a model that does not understand caches of one fixed size.

    Parameters
    ----------
    model, span
        As in `find_traits`.

    Raises
    ------
    ValueError
        Its answers over such a cache differ from those over a growing one.
    """
    fault = _remembered(
        model,
        _Question("static", True, span),
        lambda: _Probe(model, static=True).static_fault(span),
        is_free=lambda known: known is None,
    )
    _raise(model, fault)


def check_trees(model: Any, span: int, *, static: bool) -> None:
    """Refuse a model that does not understand trees: a 4-D mask and position ids of their own.

    Parameters
    ----------
    model, span, static
        As in `find_traits`.

    Raises
    ------
    ValueError
        Its answers at a tree's nodes are not those behind each node's own path.
    """
    fault = _remembered(
        model,
        _Question("tree", static, span),
        lambda: _Probe(model, static).tree_fault(span),
        is_free=lambda known: known is None,
    )
    _raise(model, fault)


def check_features(model: Any) -> None:
    """Refuse a model that does not return the hidden states behind its logits.

    Parameters
    ----------
    model : torch.nn.Module
        As in `check_model`.

    Raises
    ------
    ValueError
        It has none to return, or takes no ``output_hidden_states``.
    """
    question = _Question("features")
    _raise(model, _remembered(model, question, lambda: _Probe(model).features_fault()))


def _raise(model: Any, fault: str | None) -> None:
    if fault is not None:
        raise ValueError(f"generate: {type(described(model)).__name__} {fault}")


class _Question(NamedTuple):
    """What is asked about a model, for caches of one size or growing ones, of so many slots."""

    what: str
    static: bool = False
    span: int = 0


def _remembered(
    model: Any,
    question: _Question,
    ask: Callable[[], Any],
    is_free: Callable[[Any], bool] = lambda known: False,
) -> Any:
    """Return the answer to a question about a model, asked once for its class and configuration.

    An answer without a restriction (``is_free``) is the answer for all smaller caches, too: no
    window that is wide enough for more slots is too narrow for fewer.
    """
    inner = described(model)
    known: _Found
    known, key = _found, _identity(inner)
    if key is None:
        try:
            known = _found_of.setdefault(model, {})
        except TypeError:  # of which no weak reference can be held
            known = {}
    for (other, asked), answer in list(known.items()):  # other threads may add to them
        if other == key and asked[:2] == question[:2] and asked.span > question.span:
            if is_free(answer):
                return answer
    if (key, question) not in known:
        try:
            with torch.inference_mode():
                known[key, question] = ask()
        except _Unsettled as unsettled:  # other weights may settle it
            return unsettled.answer
    return known[key, question]


def _identity(model: Any) -> Hashable:
    """Return what tells models apart whose answers may differ in kind; None: only the model."""
    # What was encoded for one generation says nothing about others; the model behind it does.
    inner = getattr(model, "model", model) if hasattr(model, "begin") else model
    config: Any = getattr(inner, "config", None)
    if not hasattr(config, "to_json_string"):
        return None
    return (
        type(model),
        type(inner),
        config.to_json_string(use_diff=False),
        getattr(config, "_attn_implementation", None),
        getattr(inner, "dtype", None),
        str(getattr(inner, "device", None)),
    )


class _Answers(NamedTuple):
    """What a model says in a plain run, and how exactly.

    Attributes
    ----------
    rows : Tensor
        ``[TAIL, V]``, the logits behind each token of the tail.
    tolerance : float
        Answers that differ by no more are equal to the model's precision.
    sensitivity : float
        By how much another context changes them.
    """

    rows: Tensor
    tolerance: float
    sensitivity: float


class _Probe:
    """Runs one short text through a model in several ways.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    static : bool
        Whether the runs that are held against the plain one are over a cache of one size.
    """

    def __init__(self, model: Any, static: bool = False) -> None:
        self.model = model
        self.static = static
        self.traits = Traits(first=None)  # as far as they are known
        self.device = _device(model)
        text, other = ordinary_texts(model, CONTEXT + TAIL + 1, self.device)
        self.context, self.tail, self.branch = text.split([CONTEXT, TAIL, 1], 1)
        self.other = other[:, :CONTEXT]

    # ---- questions -------------------------------------------------------------------------------

    def plain_fault(self) -> str | None:
        """Say what is wrong with the model's answers over a cache, None if nothing is."""
        if getattr(self.model, "training", False):
            raise _Unsettled(None)
        model = self._open(static=False).model
        try:
            whole, other = (
                model(input_ids=torch.cat([context, self.tail], 1), use_cache=False)
                .logits[0, -TAIL:]
                .float()
                for context in (self.context, self.other)
            )
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it cannot be run without a cache: there is nothing to compare with
            return None
        sensitivity, precision = _difference(whole, other), self._rounding(whole)
        if sensitivity <= precision:
            raise _Unsettled(None)
        try:
            chained = self._chain(self.tail)
        except torch.OutOfMemoryError:  # says nothing about the model
            raise
        except Exception as error:  # the model's own, of any kind
            return f"cannot go on behind a cache: {type(error).__name__}: {error}"
        difference = _difference(whole, chained)
        if difference <= max(precision, UNRELATED * sensitivity):
            return None
        return (
            f"gives other answers over a key-value cache than without one: logits {difference:.2g} "
            f"apart, where another text changes them by {sensitivity:.2g}. It ignores the cache, "
            "or keeps a state elsewhere, which cannot roll back rejected tokens"
        )

    def find_traits(self, span: int) -> Traits:
        """Tell how rows of different lengths may lie in one cache."""
        apart = Traits(holes=False, padding=False, first=None)
        plain = self._plain(untried=apart, insensitive=Traits(first=self._firsts()[0]))
        if not self._find_first(plain):
            return apart
        # A model that counts slots fails with a small gap already, within its positions.
        padding = self._same(plain, self._padded) and all(
            self._same(plain, self._with_gap, gap, 0) for gap in (GAP, self._reach(span))
        )
        window = smallest_window(self.model)
        holes = (
            padding
            and (window is None or window >= span)
            and all(
                self._same(plain, self._with_gap, gap, CONTEXT - 2)
                for gap in (GAP, min(span, LONGEST_SPAN))
            )
        )
        return self.traits._replace(holes=holes, padding=padding)

    def static_fault(self, span: int) -> str | None:
        """Say what is wrong with the answers over a cache of one size, None if nothing is."""
        self._open()  # refuses models whose layers are not known
        plain = self._plain(untried=UNTRIED, insensitive=None)
        if not self._find_first(plain):
            return "cannot be run over a static cache: it counts positions or distances in slots"
        span = self._reach(span)
        far = self._far(plain, span)
        return self._fault(far, "over a static cache", self._behind(span), self._behind, span, True)

    def tree_fault(self, span: int) -> str | None:
        """Say what is wrong with the answers at a tree's nodes, None if nothing is."""
        plain = self._plain(untried=UNTRIED, insensitive=None)
        if not self._find_first(plain):
            return "cannot run a tree: nodes need position ids of their own"
        branch = torch.cat([self.tail[:, :1], self.branch], 1)
        expected = torch.cat([plain.rows, self._chain(branch)[-1:]])
        fault = self._fault(plain, "at the nodes of a tree", expected, self._tree, 0)
        if fault is None:
            span = self._reach(span)
            expected = torch.cat([self._chain(self.tail, span), self._chain(branch, span)[-1:]])
            far = self._far(plain, span)
            fault = self._fault(far, "at the nodes of a tree", expected, self._tree, span)
        return fault

    def features_fault(self) -> str | None:
        """Say why the last hidden states of a call cannot be had, None if they can."""
        try:
            cached = self._open(static=False, features=True)
            cached.prefill(self.context, None)
            cached.forward(self.tail)
        except torch.OutOfMemoryError:  # says nothing about the model
            raise
        except Exception as error:  # the model's own, of any kind
            return (
                "does not return the hidden states that the draft reads: "
                f"{type(error).__name__}: {error}"
            )
        return None

    # ---- answers ---------------------------------------------------------------------------------

    def _plain(self, *, untried: Any, insensitive: Any) -> _Answers:
        """Run the text plainly; unsettled where the answers are random, or depend on nothing."""
        if getattr(self.model, "training", False):
            raise _Unsettled(untried)
        rows = self._chain(self.tail)
        again = [self._chain(self.tail, fed=fed) for fed in (TAIL + 1, TAIL + 2)]
        noise = max(_difference(rows, other) for other in again)
        tolerance = max(SAME * noise, self._rounding(rows))
        sensitivity = _difference(rows, self._chain(self.tail, context=self.other))
        if sensitivity <= tolerance:
            raise _Unsettled(insensitive)
        return _Answers(rows, tolerance, sensitivity)

    def _far(self, plain: _Answers, gap: int) -> _Answers:
        """Return the plain answers with the tolerance of answers behind ``gap`` slots more.

        Attention sums over all slots, in float32 whatever the model's own type, and what n terms'
        rounding comes to grows with the square root of n.
        """
        rows = self._chain(self.tail, gap)
        noise = _difference(rows, self._behind(gap))
        sums = self._rounding(rows, torch.float32) * math.sqrt(1 + gap / (CONTEXT + TAIL))
        tolerance = max(plain.tolerance, SAME * noise, self._rounding(rows), sums)
        return plain._replace(tolerance=tolerance)

    def _rounding(self, rows: Tensor, dtype: torch.dtype | None = None) -> float:
        """Return by how much rounding alone, to the model's type or another, may change logits."""
        finite = rows[rows.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        kind: Any = dtype or getattr(self.model, "dtype", torch.float32)
        kind = torch.float32 if kind == torch.float64 else kind  # as logits come here
        return ROUNDING * float(torch.finfo(kind).eps) * largest

    def _find_first(self, plain: _Answers) -> bool:
        """Find the position id of a text's first token, by which the answers stay the same."""
        for first in self._firsts():
            self.traits = Traits(first=first)
            if self._same(plain, self._with_gap, 0, 0):
                return True
        return False

    def _firsts(self) -> list[int | None]:
        """Return what that id may be; None: position ids are not given."""
        if "position_ids" not in accepted_arguments(self.model):
            return [None]
        pad = getattr(getattr(described(self.model), "config", None), "pad_token_id", None)
        behind_pad = pad + 1 if isinstance(pad, int) and pad >= 0 else 0  # as RoBERTa counts
        return [*dict.fromkeys([0, behind_pad, 1, 2]), None]

    def _same(self, plain: _Answers, run: Callable[..., Tensor], *how: Any) -> bool:
        """Tell whether a run gives the plain run's answers; one that fails does not."""
        try:
            return _difference(run(*how), plain.rows) <= plain.tolerance
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return False

    def _fault(
        self, plain: _Answers, where: str, expected: Tensor, run: Callable[..., Tensor], *how: Any
    ) -> str | None:
        try:
            difference = _difference(run(*how), expected)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            said = (str(error) or repr(error)).splitlines()[0]
            return f"gives no answers {where}: {type(error).__name__}: {said}"
        if difference <= plain.tolerance:
            return None
        return (
            f"gives other answers {where} than in plain decoding: logits {difference:.2g} apart, "
            f"its precision is {plain.tolerance:.2g}"
        )

    def _reach(self, span: int) -> int:
        """Return how many more slots the text may have where all of them count as positions."""
        config: Any = getattr(described(self.model), "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        limits = (getattr(config, name, None) for name in POSITION_LIMITS)
        known = [limit for limit in limits if isinstance(limit, int)]
        gap = max(0, min([span, LONGEST_SPAN, *known]) - CONTEXT - TAIL - 4)
        while gap:
            try:
                self._chain(self.tail, gap)
                break
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a limit that the configuration calls otherwise
                gap //= 2
        return gap

    # ---- runs, each ``[TAIL, V]`` ----------------------------------------------------------------

    def _open(
        self, slots: int = 0, *, static: bool | None = None, features: bool = False
    ) -> CachedModel:
        """Open the model for one row."""
        ends = torch.tensor([slots + CONTEXT + 2 * TAIL], device=self.device)
        opened = CachedModel(
            self.model,
            ends,
            room=slots + CONTEXT + 2 * TAIL,
            static=self.static if static is None else static,
            traits=self.traits,
            reads_features=features,
        )
        if hasattr(opened.model, "begin"):
            opened.model.select(torch.zeros_like(ends))
        return opened

    def _chain(
        self, tail: Tensor, gap: int = 0, *, fed: int | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Run plainly; the last ``fed`` tokens in one call over the cache of the others."""
        text = torch.cat([self.context if context is None else context, tail], 1)
        before = text.shape[1] - (fed or tail.shape[1])
        cached = self._open(gap, static=False)
        cached.prefill(text[:, :before], None)
        if gap:
            _widen(cached, gap, 0, visible=True)
        return cached.forward(text[:, before:])[0, -tail.shape[1] :].float()

    def _behind(self, gap: int, static: bool = False) -> Tensor:
        """Run behind ``gap`` slots more that all tokens see, the last token in a call of its own.

        Some read no mask in a call of one token (LED), and would see a static cache's slots that
        are not in use. Such a call also rounds otherwise than one of several tokens.
        """
        cached = self._open(gap, static=static)
        cached.prefill(self.context, None)
        if gap:
            _widen(cached, gap, 0, visible=True)
        parts = self.tail.split([TAIL - 1, 1], 1)
        return torch.cat([cached.forward(part) for part in parts], 1)[0].float()

    def _with_gap(self, gap: int, at: int) -> Tensor:
        """Run with ``gap`` masked slots before slot ``at``, and a mask even if there is none."""
        cached = self._open(gap)
        cached.prefill(self.context, None)
        _widen(cached, gap, at, visible=False)
        return cached.forward(self.tail)[0].float()

    def _padded(self) -> Tensor:
        """Run with padding in the call that reads the context."""
        padding = self.context[:, :1].expand(-1, GAP)
        padded = torch.cat([padding, self.context], 1)
        mask = torch.ones_like(padded)
        mask[:, :GAP] = 0
        cached = self._open(GAP)
        cached.prefill(padded, mask)
        return cached.forward(self.tail)[0].float()

    def _tree(self, gap: int) -> Tensor:
        """Run the tail as a path, and a branch beside its second token, ``[TAIL + 1, V]``."""
        first, second, third = self.tail.split(1, 1)
        nodes = torch.cat([first, self.branch, second, third], 1)
        seen = torch.tensor(
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], device=self.device
        )
        cached = self._open(gap)
        cached.prefill(self.context, None)
        if gap:
            _widen(cached, gap, 0, visible=True)
        cached.begin_tree()
        depths = torch.tensor([0, 1, 1, 2], device=self.device)
        rows = cached.forward_nodes(nodes, seen.bool()[None], depths)[0].float()
        return rows[[0, 2, 3, 1]]


def _widen(cached: CachedModel, gap: int, at: int, *, visible: bool) -> None:
    """Put ``gap`` slots more before slot ``at``, with copies of the first slot in them."""
    slots = cached.slots
    index = [*range(at), *[0] * gap, *range(at, slots)]
    real = [1] * at + [int(visible)] * gap + [1] * (slots - at)
    device = cached.ends.device
    cached.arrange(
        torch.tensor([index], device=device),
        torch.tensor([real], device=device) if not visible or cached.static else None,
    )


def _difference(some: Tensor, others: Tensor) -> float:
    """Return the largest difference of logits; infinite where only one of two is finite."""
    some, others = some.double(), others.double()
    finite = some.isfinite()
    if not torch.equal(finite, others.isfinite()):
        return float("inf")
    return float((some - others)[finite].abs().max()) if bool(finite.any()) else 0.0


def _device(model: Any) -> torch.device:
    """Return where a model's token ids go."""
    device = getattr(model, "device", None)
    if isinstance(device, torch.device):
        return device
    parameters = getattr(model, "parameters", lambda: iter(()))()
    first = next(iter(parameters), None)
    return torch.device("cpu") if first is None else first.device


def ordinary_texts(model: Any, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two texts of ordinary tokens, ``[1, length]``, that differ everywhere."""
    config = getattr(described(model), "config", None)
    special = {
        token
        for name in ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id")
        for token in _listed(getattr(config, name, None))
    }
    size = vocabulary_size(model) or 4 * length
    ordinary = [token for token in range(min(size, 8 * length)) if token not in special]
    tokens = ordinary or [0]
    step = max(len(tokens) // (length + 1), 1)
    text = [[tokens[(i + k) * step % len(tokens)] for i in range(length)] for k in (0, 1)]
    return torch.tensor(text[:1], device=device), torch.tensor(text[1:], device=device)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
