"""Encoder-decoders: the decoder on what was encoded, as the causal model that the loop needs."""

from __future__ import annotations

import copy
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from .cache_names import cache_name, own_cache_name
from .decoder_distances import ToldDistances
from .decoder_positions import PositionTable, ToldPositions
from .decoder_trials import find_manner
from .module_views import outermost_lists, with_part

__all__ = ["EncodedModel", "encoded", "rows_of"]


class EncodedModel:
    """An encoder-decoder model that has read its inputs; called as a causal model on decoder ids.

    Made by `encoded`. Every generation works on a copy of its own (`begin`), which shares the model
    and the encoder's output, so that several threads can use one.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face encoder-decoder.
    outputs : ModelOutput
        What the encoder gave: ``last_hidden_state`` ``[B, S, d]``, and whatever the model reads
        beside it.
    mask : Tensor or None
        ``[B, S]``, zeros at padding of the encoder's input.
    """

    def __init__(self, model: Any, outputs: ModelOutput, mask: Tensor | None) -> None:
        text = model.config.get_text_config(decoder=True)
        self.outputs, self.mask = outputs, mask
        self.config = SimpleNamespace(
            **{
                name: getattr(model.config, name, getattr(text, name, None))
                for name in ("vocab_size", "eos_token_id", "pad_token_id")
            }
        )
        #: Where the decoder's layers are, as ``model.named_modules`` says it; None: nobody knows.
        self.layers = _path_of_layers(model)
        if self.layers is not None:
            self.config.num_hidden_layers = len(model.get_submodule(self.layers))
        self.generation_config = model.generation_config
        self.dtype, self.device, self.training = model.dtype, model.device, model.training
        self.writes = False  # whether the decoder changes what it is given
        self._begin(model)

    @property
    def states(self) -> Tensor:
        """What the encoder gave, ``[B, S, d]``."""
        states: Tensor = self.outputs[0]
        return states

    def begin(self) -> EncodedModel:
        """Give a copy that has not been called yet."""
        return self.with_model(self.model)

    def with_model(self, model: Any) -> EncodedModel:
        """Give a copy that runs another model, a view of this one, on what was encoded."""
        fresh = copy.copy(self)
        fresh._begin(model)
        return fresh

    def _begin(self, model: Any) -> None:
        """Be about to run a model, or a view of it, for the first time."""
        self.model = model
        self._cross: Any = DynamicCache()
        self._both: EncoderDecoderCache | None = None
        # Looked at once: every call of a small model would feel it.
        self._accepts = signature(model.forward).parameters
        self._look()

    def _look(self) -> None:
        """Make whatever view of the model is to be this object's alone."""

    def select(self, rows: Tensor) -> None:
        """Keep only these requests."""
        self.outputs = rows_of(self.outputs, rows)
        self.mask = None if self.mask is None else self.mask[rows]
        if len(self._cross):
            self._cross.batch_select_indices(rows)

    def get_input_embeddings(self) -> Any:
        """Return the decoder's embeddings; the encoder's may be of other tokens, or of images."""
        decoder = self.model.get_decoder()
        return getattr(decoder, "get_input_embeddings", lambda: None)()

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        **options: Any,
    ) -> Any:
        """Run the decoder; arguments are about decoder ids, ``options`` the model's own."""
        return self._run(self.model, input_ids, past_key_values, attention_mask, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`."""
        return self.forward(*args, **kwargs)

    def _run(
        self,
        model: Any,
        input_ids: Tensor,
        cache: Cache | None = None,
        mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if len(self.states) != len(input_ids):
            raise ValueError(
                f"generate: {len(self.states)} inputs were encoded, but there are "
                f"{len(input_ids)} requests"
            )
        if cache is not None:
            kwargs[cache_name(self._accepts) or own_cache_name()] = self._beside_cross(cache)
        if self.mask is not None and "attention_mask" in self._accepts:
            kwargs["attention_mask"] = self.mask
        outputs = self.outputs
        if self.writes:
            outputs = rows_of(outputs, torch.arange(len(input_ids), device=input_ids.device))
        return model(
            encoder_outputs=outputs,
            decoder_input_ids=input_ids,
            decoder_attention_mask=mask,
            use_cache=cache is not None,
            **kwargs,
        )

    def _beside_cross(self, cache: Cache) -> EncoderDecoderCache:
        """Return the decoder's own cache together with that of what it reads of the encoder."""
        if self._both is None or self._both.self_attention_cache is not cache:
            self._both = EncoderDecoderCache(cache, self._cross)
        return self._both


class _NumberedModel(EncodedModel):
    """One that is told positions by an argument."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        **options: Any,
    ) -> Any:
        """Run the decoder; arguments are about decoder ids, ``options`` the model's own."""
        if position_ids is not None:
            options["decoder_position_ids"] = position_ids
        return self._run(self.model, input_ids, past_key_values, attention_mask, **options)


class _PositionedModel(EncodedModel):
    """One whose decoder counts positions in cache slots: it is told them through a view of it."""

    def __init__(
        self,
        model: Any,
        outputs: ModelOutput,
        mask: Tensor | None,
        table: PositionTable,
    ) -> None:
        self._table = table
        super().__init__(model, outputs, mask)

    def _look(self) -> None:
        self._told = ToldPositions(self.model.get_submodule(self._table.path), self._table)
        self._view = with_part(self.model, self._table.path, self._told)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
        **options: Any,
    ) -> Any:
        """Run the decoder; arguments are about decoder ids, ``options`` the model's own."""
        past = _slots_of(past_key_values)
        slots = past + input_ids.shape[1]
        # In one call such a decoder counts without its padding tokens, in several with them.
        if position_ids is None and self._table.pad_token is not None:
            position_ids = torch.arange(past, slots, device=input_ids.device).expand_as(input_ids)
        if position_ids is None:
            return self._run(self.model, input_ids, past_key_values, attention_mask, **options)
        self._told.tell(input_ids, position_ids, slots)
        return self._run(self._view, input_ids, past_key_values, attention_mask, **options)


class _DistancedModel(EncodedModel):
    """One whose attention counts distances in cache slots: a view of it is told what they are."""

    def _look(self) -> None:
        # Most generations of one request need no view, and making one looks at every module.
        self._told: ToldDistances | None = None

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        **options: Any,
    ) -> Any:
        """Run the decoder; arguments are about decoder ids, ``options`` the model's own."""
        if attention_mask is None:  # slots are distances
            return self._run(self.model, input_ids, past_key_values, **options)
        if self._told is None:
            self._told = ToldDistances(self.model)
        self._told.tell(attention_mask, _slots_of(past_key_values), input_ids.shape[1])
        return self._run(self._told.view, input_ids, past_key_values, attention_mask, **options)


def _slots_of(cache: Cache | None) -> int:
    """Return how many slots of a cache are in use (those of one size count them on the device)."""
    return 0 if cache is None else int(cache.get_seq_length())


def _path_of_layers(model: Any) -> str | None:
    """Return where the one list of layers of a model's decoder is."""
    decoder = model.get_decoder()
    prefix = next((path for path, module in model.named_modules() if module is decoder), None)
    lists = [] if prefix is None else outermost_lists(decoder)
    return f"{prefix}.{lists[0]}" if len(lists) == 1 else None


def rows_of(outputs: ModelOutput, rows: Tensor) -> ModelOutput:
    """Return what the encoder gave for these requests."""
    batch = len(outputs[0])
    kept = {
        name: value[rows] if isinstance(value, Tensor) and value.shape[:1] == (batch,) else value
        for name, value in outputs.items()
    }
    return type(outputs)(**kept)


@torch.inference_mode()
def encoded(
    model: Any,
    *,
    attention_mask: Tensor | None = None,
    encoder_outputs: Any = None,
    **encoder_inputs: Tensor,
) -> EncodedModel:
    """Run the encoder of a model; what comes back is a target or a draft for `generate`.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face encoder-decoder (T5, BART, Marian, Whisper and their likes, or one that is
        put together from an encoder and a decoder), unmodified. Several threads can use it at once.
    attention_mask : Tensor, optional
        ``[B, S]``, zeros at padding of the encoder's input.
    encoder_outputs : optional
        What the encoder gave, if it has run.
    **encoder_inputs : Tensor
        What the encoder is called with otherwise: ``input_ids`` ``[B, S]``, ``input_features``,
        ``pixel_values`` ...

    Returns
    -------
    EncodedModel
        To be called on decoder ids: ``input_ids`` of `generate` are the decoder's prompt,
        usually ``[B, 1]`` of its start token.

    Raises
    ------
    TypeError
        A model that is no encoder-decoder.
    ValueError
        Its decoder cannot run several tokens in one call over a key-value cache (ProphetNet's), or
        has no causal mask there (FSMT's).

    Notes
    -----
    The decoder is run on a handful of tokens, the first time, to see how it can be told positions,
    or distances where it biases attention by these (T5). One that cannot be runs one request at a
    time where they would matter, and is refused trees.

    Examples
    --------
    >>> inputs = tokenizer(texts, return_tensors="pt", padding=True)  # doctest: +SKIP
    >>> start = torch.full((len(texts), 1), t5.config.decoder_start_token_id)  # doctest: +SKIP
    >>> generate(encoded(t5, **inputs), encoded(small_t5, **inputs), start)  # doctest: +SKIP
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise TypeError(f"encoded: {type(model).__name__} is no encoder-decoder")
    if encoder_outputs is None:
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        encoder_outputs = model.get_encoder()(**encoder_inputs, **given)
    if not isinstance(encoder_outputs, ModelOutput):
        encoder_outputs = BaseModelOutput(last_hidden_state=encoder_outputs[0])
    return _of_its_kind(model, encoder_outputs, attention_mask)


def _of_its_kind(model: Any, outputs: ModelOutput, mask: Tensor | None) -> EncodedModel:
    """Choose how the decoder is told positions, by what it does with them."""
    plain = EncodedModel(model, outputs, mask)
    if not len(plain.states):
        return plain

    def tell(table: PositionTable | None) -> EncodedModel:
        if table is None:
            return _DistancedModel(model, outputs, mask)
        return _PositionedModel(model, outputs, mask, table)

    manner = find_manner(plain, tell)
    if manner.fault is not None:
        raise ValueError(f"encoded: the decoder of {type(model).__name__} {manner.fault}")
    kind = plain
    if "decoder_position_ids" in plain._accepts or manner.heeds:
        kind = _NumberedModel(model, outputs, mask)
    elif manner.table is not None:
        kind = tell(manner.table)
    elif manner.distances:
        kind = tell(None)
    kind.writes = manner.writes
    return kind
