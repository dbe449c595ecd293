"""A causal model with a key-value cache that rolls back, row by row.

Rows of a batch accept different numbers of draft tokens, but all rows of a cache have equally many
slots. So rejected slots that other rows need become *holes* (zeros in the attention mask, beside
explicit position ids) and slots that no row needs are cropped. Where holes pass a share of the
cache, each row's tokens are gathered at its end (*compaction*); what remains is ordinary left
padding. A batch without padding and holes, as one request always is, needs neither mask nor
position ids.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tree_masks import additive_mask
from .cache_names import cache_name, own_cache_name
from .counts import Counts

try:
    from transformers.cache_utils import Cache, DynamicCache

    from .layers import FixedLayer, GrowingLayer
except ImportError as error:
    raise ImportError(
        "specdec_ext.generate drives Hugging Face models: pip install 'specdec_ext[hf]'"
    ) from error

__all__ = [
    "CachedModel",
    "Traits",
    "accepted_arguments",
    "cache_argument",
    "described",
    "refuse_unsuitable",
    "smallest_window",
    "vocabulary_size",
]

#: Layers that hold keys and values alone (`DummyLayer`: none, another layer's are used).
ATTENTION_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")

#: Longer prompts run by themselves where a tree comes next: its mask has a row for each token.
_LONGEST_IN_A_MASK = 1024


class Traits(NamedTuple):
    """How rows of different lengths may lie in one cache of a model; see `find_traits`.

    Attributes
    ----------
    holes : bool
        Whether masked slots may lie among a row's tokens. Where distance is counted in slots (a
        sliding window, ALiBi), holes would stretch it: there they are closed at once.
    padding : bool
        Whether rows may begin at different slots, behind masked ones.
    first : int or None
        The position id of a text's first token; None: position ids are not given.
    """

    holes: bool = True
    padding: bool = True
    first: int | None = 0


class CachedModel:
    """A causal model and its cache, for rows that advance by different numbers of tokens.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model called as Hugging Face models are.
    ends : Tensor
        ``[B]`` int64, the position at which each request must stop: no position id reaches it.
    room : int
        Slots to allocate at first.
    compact_above : float
        Compact when more than this share of the slots would go.
    static : bool
        Let the model see all allocated slots in every call, under a mask as wide: shapes depend on
        the number of new tokens alone, as a compiled model wants it.
    traits : Traits
        How the rows may lie.
    reads_features : bool
        Whether every call is to keep its last hidden states, as `features`.

    Attributes
    ----------
    features : Tensor or None
        ``[B, m, D]``: see `HostedModel.features`.
    """

    def __init__(
        self,
        model: Any,
        ends: Tensor,
        *,
        room: int = 0,
        compact_above: float = 0.25,
        static: bool = False,
        traits: Traits = Traits(),  # noqa: B008  (immutable)
        reads_features: bool = False,
    ) -> None:
        # What keeps a state of each request, beside the cache, does so for one generation.
        self.model = model.begin() if hasattr(model, "begin") else model
        self.ends = ends
        self.compact_above = compact_above
        self.calls = 0
        self.static = static
        self.cache = _static_cache(model, room) if static else _growing_cache(room)
        self.traits = traits
        self.features: Tensor | None = None
        self._reads_features = reads_features
        self._vocabulary = vocabulary_size(model)
        self._accepts = accepted_arguments(model)
        self._cache_name = cache_argument(model)
        self.slots = 0
        self.lengths = [0] * ends.shape[0]  # tokens in the cache, of each row
        self._mask: Tensor | None = None  # [B, capacity] int64; None: no padding and no hole
        if static:
            self._mask = torch.ones(ends.shape[0], room, dtype=torch.int64, device=ends.device)
        self._next: Tensor = torch.zeros_like(ends)  # [B], `lengths` on the device, while masked
        self._tree_slots = 0  # the last ones, of the tree that is being run
        self._tree_next = self._next
        self._prompt: Tensor | None = None  # [B, P - 1], until a call has run it

    @torch.inference_mode()
    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None, *, rides: bool = False
    ) -> None:
        """Run all of the prompt but its last token; ``attention_mask`` has zeros at padding.

        Parameters
        ----------
        input_ids : Tensor
            ``[B, P - 1]``.
        attention_mask : Tensor or None
            ``[B, P - 1]``; None: no padding.
        rides : bool
            Whether the next call is to run it, with the tokens that it appends.
        """
        slots = input_ids.shape[1]
        if slots == 0:
            return
        if self.static:
            self._reserve(slots)
        if attention_mask is not None and self._mask is not None:
            self._mask[:, :slots] = attention_mask
        elif attention_mask is not None:
            self._mask = attention_mask.long()
        if self._mask is not None:
            self._next = self._mask[:, :slots].sum(1)
        self.lengths = [slots] * len(self.lengths) if self._mask is None else self._next.tolist()
        self._prompt = input_ids
        if not rides:
            self._run_prompt()

    def _run_prompt(self) -> None:
        """Run a prompt that waits by itself; that is no call."""
        if self._prompt is None:
            return
        prompt, self._prompt = self._prompt, None
        kwargs: dict[str, Any] = {}
        if self._mask is not None:
            kwargs["attention_mask"] = self._visible(prompt.shape[1])
            kwargs["position_ids"] = self._prompt_positions(prompt)
        self._call(prompt, rows=1, **kwargs)
        self.calls -= 1

    def _prompt_positions(self, prompt: Tensor) -> Tensor:
        """Return the position ids of a prompt in the first slots, ``[B, P - 1]``."""
        if self._mask is None:
            return torch.arange(prompt.shape[1], device=prompt.device).expand_as(prompt)
        return (self._mask[:, : prompt.shape[1]].cumsum(1) - 1).clamp_(min=0)

    def forward(self, tokens: Tensor, *, last_only: bool = False) -> Tensor:
        """Append tokens to every row: `HostedModel.forward`."""
        new = tokens.shape[1]
        prompt, self._prompt = self._prompt, None
        fed = tokens if prompt is None else torch.cat([prompt, tokens], 1)
        kwargs: dict[str, Any] = {}
        if self._mask is not None:
            slots = self.slots + fed.shape[1]
            self._reserve(slots)
            kwargs["attention_mask"] = self._visible(slots)
            steps = torch.arange(new, device=tokens.device)
            # Past its end a row is fed to keep the batch rectangular; those logits are unused.
            ids = torch.minimum(self._next[:, None] + steps, self.ends[:, None] - 1)
            if prompt is not None:
                ids = torch.cat([self._prompt_positions(prompt), ids], 1)
            kwargs["position_ids"] = ids
            self._next = self._next + new
        logits = self._call(fed, rows=1 if last_only else new, **kwargs)
        self.lengths = [length + new for length in self.lengths]
        return logits

    def begin_tree(self) -> None:
        """Begin a tree: what `forward_nodes` appends from here on are its nodes."""
        self._tree_slots = 0
        self._tree_next = self._next

    def forward_nodes(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> Tensor:
        """Append nodes of a tree to every row: `HostedModel.forward_nodes`."""
        if self._prompt is not None:
            return self._forward_prompt_and_nodes(tokens, visible, depths)
        batch, new = tokens.shape
        start = self.slots - self._tree_slots
        self._tree_slots += new
        if self._mask is None:
            before = visible.new_ones(batch, start)
            first = torch.full_like(self.ends, start)
        else:
            self._reserve(self.slots + new)
            before, first = self._mask[:, :start].bool(), self._tree_next
            self._next = self._next + new
        seen = torch.cat([before[:, None].expand(-1, new, -1), visible], 2)
        positions = torch.minimum(first[:, None] + depths, self.ends[:, None] - 1)
        return self._call_nodes(tokens, seen, positions, new)

    def _forward_prompt_and_nodes(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> Tensor:
        """Run the prompt that waits and a tree's first nodes behind it in one call.

        Every token of the prompt is told what it sees, too; so a long prompt goes by itself, where
        attention that is causal by nature costs less.
        """
        assert self._prompt is not None
        prompt, new = self._prompt, tokens.shape[1]
        slots = prompt.shape[1]
        if slots > _LONGEST_IN_A_MASK:
            self._run_prompt()
            return self.forward_nodes(tokens, visible, depths)
        self._prompt = None
        self._tree_slots += new
        real = torch.ones_like(prompt) if self._mask is None else self._mask[:, :slots]
        steps = torch.arange(slots, device=prompt.device)
        causal = (steps[:, None] >= steps) & real.bool()[:, None]
        causal = causal | (steps[:, None] == steps)  # no row, not even padding's, sees nothing
        causal = torch.nn.functional.pad(causal, (0, new))
        behind = torch.cat([real.bool()[:, None].expand(-1, new, -1), visible], 2)
        first = torch.tensor(self.lengths, device=prompt.device)
        if self._mask is not None:
            self._reserve(slots + new)
            first, self._next = self._tree_next, self._next + new
        nodes = torch.minimum(first[:, None] + depths, self.ends[:, None] - 1)
        positions = torch.cat([self._prompt_positions(prompt), nodes], 1)
        fed = torch.cat([prompt, tokens], 1)
        return self._call_nodes(fed, torch.cat([causal, behind], 1), positions, new)

    def _call_nodes(self, tokens: Tensor, seen: Tensor, positions: Tensor, new: int) -> Tensor:
        """Run tokens that see ``seen`` ``[B, m, slots]``; return the last ``new`` rows."""
        seen = seen[:, None]
        if self.static and self._mask is not None:
            seen = torch.nn.functional.pad(seen, (0, self._mask.shape[1] - seen.shape[3]))
        logits = self._call(
            tokens,
            rows=new,
            attention_mask=additive_mask(seen, getattr(self.model, "dtype", torch.float32)),
            position_ids=positions,
        )
        self.lengths = [length + new for length in self.lengths]
        return logits

    def keep_nodes(self, nodes: Tensor, kept: Counts) -> None:
        """End a tree: `HostedModel.keep_nodes`."""
        count = self._tree_slots
        starts = torch.full_like(self.ends, self.slots - count)
        accepted = (kept.device - 1).clamp(min=0)
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.keep_path(nodes[:, 1:], accepted, starts)
        self.rollback(count - kept)

    def keep_tree(self, nodes: Tensor, first: int) -> None:
        """Drop nodes of a tree that goes on: `HostedModel.keep_tree`."""
        start, count = self.slots - self._tree_slots, first + nodes.shape[1]
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.gather(start + nodes, start + first)
        dropped = self._tree_slots - count
        self.slots, self._tree_slots = start + count, count
        self.lengths = [length - dropped for length in self.lengths]
        if self._mask is not None:
            self._next = self._next - dropped

    def _call(self, tokens: Tensor, *, rows: int, **kwargs: Any) -> Tensor:
        """Run tokens; return the logits of the last ``rows`` of them."""
        if rows < tokens.shape[1] and "logits_to_keep" in self._accepts:
            kwargs["logits_to_keep"] = rows
        position_ids = kwargs.pop("position_ids", None)
        if position_ids is not None and self.traits.first is not None:
            kwargs["position_ids"] = position_ids + self.traits.first
        if self._reads_features:
            kwargs["output_hidden_states"] = True
        last = None if self._vocabulary is None else self._vocabulary - 1
        output = self.model(
            input_ids=tokens.clamp(min=0, max=last),
            use_cache=True,
            **{self._cache_name: self.cache},
            **kwargs,
        )
        if not hasattr(output, "logits"):
            raise TypeError(
                f"generate: {type(self.model).__name__} must return logits, as models with a "
                f"language-model head do, got {type(output).__name__}"
            )
        if self._reads_features:
            self.features = _last_hidden_states(self.model, output, tokens)
        self.calls += 1
        self.slots += tokens.shape[1]
        logits: Tensor = output.logits[:, -rows:]
        return logits.float() if logits.dtype == torch.float64 else logits

    def rollback(self, drop: Counts, *, across_holes: bool = False) -> None:
        """Forget the last tokens of each row: `HostedModel.rollback`."""
        common, most = min(drop.host), max(drop.host)
        if self._prompt is not None:
            if not most:
                return  # nothing was run yet
            self._run_prompt()
        if most > common and self._mask is None:
            self._mask = torch.ones(
                len(drop.host), self.slots, dtype=torch.int64, device=drop.device.device
            )
            self._next = torch.full_like(self.ends, self.slots)
        if self._mask is not None and (most > common or across_holes):
            recent = self._mask[:, 0 if across_holes else self.slots - most : self.slots]
            from_end = recent.flip(1).cumsum(1).flip(1)  # 1 for a row's last token
            recent *= from_end > drop.device[:, None]
        if common:
            self.cache.crop(-common)
            self.slots -= common
        self.lengths = [length - n for length, n in zip(self.lengths, drop.host, strict=True)]
        if self._mask is None:
            return
        self._mask[:, self.slots :] = 1
        self._next = self._next - drop.device
        self._compact(always=not self.traits.holes and most > common)

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these rows of the batch, given on the device and on the host."""
        if self._prompt is None:
            self.cache.batch_select_indices(rows)
        else:
            self._prompt = self._prompt[rows]  # the cache is empty
        if hasattr(self.model, "begin"):
            self.model.select(rows)
        self.ends = self.ends[rows]
        self.lengths = [self.lengths[i] for i in indices]
        if self._mask is not None:
            self._mask, self._next = self._mask[rows], self._next[rows]
            self._tree_next = self._tree_next[rows]
            if self._prompt is None:
                self._compact()

    def _compact(self, *, always: bool = False) -> None:
        """Gather each row's tokens at its end, if that saves enough slots."""
        longest = max(self.lengths)
        if not always and self.slots - longest <= self.compact_above * self.slots:
            return
        assert self._mask is not None
        holes_first = self._mask[:, : self.slots].sort(dim=1, stable=True).indices
        kept = holes_first[:, self.slots - longest :]
        even = min(self.lengths) == longest
        padding = longest - self._next
        columns = torch.arange(longest, device=kept.device)
        self.arrange(kept, None if even else (columns >= padding[:, None]).long())

    def arrange(self, index: Tensor, real: Tensor | None) -> None:
        """Let the slots be others of those that are there.

        Parameters
        ----------
        index : Tensor
            ``[B, n]`` int64, which slot of each row comes where.
        real : Tensor or None
            ``[B, n]`` int64, 0 where a slot is to be masked. None: nowhere.
        """
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.gather(index)
        self.slots = index.shape[1]
        if real is None and not self.static:
            self._mask = None
            self.lengths = [self.slots] * len(self.lengths)
            return
        if real is None:
            real = torch.ones_like(index)
        if self._mask is None:
            self._mask = torch.ones_like(index)
        self._reserve(self.slots)
        self._mask[:, : self.slots] = real
        self._mask[:, self.slots :] = 1
        self._next = real.sum(1)

    def _visible(self, slots: int) -> Tensor:
        """Return the mask of the first ``slots`` slots; of a static cache, of all slots.

        (What a static cache has behind them, the causal mask hides.)
        """
        assert self._mask is not None
        return self._mask if self.static else self._mask[:, :slots]

    def _reserve(self, slots: int) -> None:
        """Make the mask at least this wide, and a static cache; slots not in use yet are ones."""
        assert self._mask is not None
        missing = slots - self._mask.shape[1]
        if missing <= 0:
            return
        extra = max(missing, self._mask.shape[1])
        self._mask = torch.nn.functional.pad(self._mask, (0, extra), value=1)
        if self.static:
            room = self._mask.shape[1]
            layers: list[Any] = self.cache.layers
            for layer in layers:
                layer.reserve(room)


def _last_hidden_states(model: Any, output: Any, tokens: Tensor) -> Tensor:
    """Return what a model's output head has read, ``[B, m, D]``, for ``tokens`` ``[B, m]``.

    Every layer's states come in its output, at no more computation, but only the last ones are
    kept. This is transformers' own way to ask for them, which leaves the model and its other
    callers alone: a hook of ours on a module would be seen by every thread that runs it.
    """
    states = getattr(output, "decoder_hidden_states", None)  # an encoder-decoder's
    states = getattr(output, "hidden_states", None) if states is None else states
    last = states[-1] if states else None
    if not isinstance(last, Tensor) or last.dim() != 3 or last.shape[:2] != tokens.shape:
        found = "none" if last is None else f"{list(getattr(last, 'shape', ()))}"
        raise ValueError(
            f"generate: {type(described(model)).__name__} must return hidden states, the last "
            f"ones [B, m, D], with output_hidden_states=True for {list(tokens.shape)} tokens, got "
            f"{found}"
        )
    return last


def _growing_cache(room: int) -> Cache:
    layer: Any = functools.partial(GrowingLayer, room)
    return Cache(layer_class_to_replicate=layer)


def _static_cache(model: Any, room: int) -> Cache:
    """Return a cache whose layers are there before the first call: their size shapes its mask."""
    config: Any = getattr(described(model), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    if count is None:
        raise ValueError(
            "generate: a static cache needs a Hugging Face causal model, or an encoded one whose "
            f"decoder has one list of layers, got {type(model).__name__}"
        )
    layers: list[Any] = [FixedLayer(room) for _ in range(count)]
    return Cache(layers=layers)


def described(model: Any) -> Any:
    """Return the model that has a configuration: a wrapper (DataParallel, say) may hold it."""
    seen = model
    for _ in range(3):  # wrappers of wrappers
        if hasattr(seen, "config"):
            return seen
        seen = getattr(seen, "module", getattr(seen, "_orig_mod", None))
    return model


def vocabulary_size(model: Any) -> int | None:
    """Return how many ids the model can embed, if it says so."""
    model = described(model)
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embeddings, "num_embeddings", None)
    return getattr(getattr(model, "config", None), "vocab_size", None) if size is None else size


def accepted_arguments(model: Any) -> set[str]:
    """Return which of the optional arguments ``model.forward`` names (a bare wrapper: all)."""
    parameters = inspect.signature(described(model).forward).parameters.values()
    if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return {"position_ids", "logits_to_keep", own_cache_name()}
    return {p.name for p in parameters}


def cache_argument(model: Any) -> str:
    """Return the name by which a model takes its cache, that of a class it is made from at worst.

    A forward that passes on ``**kwargs`` hides it.
    """
    name = cache_name(accepted_arguments(model))
    for cls in type(described(model)).__mro__:
        if name is None and "forward" in vars(cls):
            name = cache_name(inspect.signature(vars(cls)["forward"]).parameters)
    # A model with neither is refused elsewhere, or called in vain: by its own message.
    return own_cache_name() if name is None else name


def cache_layers(model: Any) -> list[Any]:
    """Return the layers of the cache that a model would make itself, [] if it does not say."""
    config = getattr(described(model), "config", None)
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return []
    try:
        return list(DynamicCache(config=config).layers)
    except Exception as error:  # the configuration says too little, in a way of its own
        raise ValueError(
            f"generate: for {type(described(model)).__name__} transformers cannot make a cache: "
            f"{type(error).__name__}: {error}"
        ) from error


def smallest_window(model: Any) -> int | None:
    """Return the smallest sliding window that a model's configuration tells of."""
    layers = (layer for layer in cache_layers(model) if getattr(layer, "is_sliding", False))
    return min((layer.sliding_window for layer in layers), default=None)


def refuse_unsuitable(model: Any) -> None:
    """Refuse models whose cache, as they describe it, cannot roll back.

    Raises
    ------
    ValueError
        An encoder-decoder that was not wrapped, or a model that remembers nothing.
    """
    model = described(model)
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"generate: {type(model).__name__} is an encoder-decoder; wrap it and its inputs in "
            "specdec_ext.decoding.encoder_decoder.encoded()"
        )
    if cache_name(accepted_arguments(model)) is None:
        raise ValueError(
            f"generate: {type(model).__name__} has no key-value cache, so it cannot roll back "
            "rejected tokens; attention layers only"
        )
