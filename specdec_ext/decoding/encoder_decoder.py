"""Encoder-decoders: the decoder on what was encoded, as the causal model that the loop needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

__all__ = ["EncodedModel", "encoded"]


class EncodedModel:
    """An encoder-decoder model that has read its inputs; called as a causal model on decoder ids.

    Made by `encoded`. Every generation works on a copy of its own (`begin`), which shares the model
    and the encoder's output.

    Parameters
    ----------
    model : torch.nn.Module
        A Hugging Face encoder-decoder.
    states : Tensor
        ``[B, S, d]``, the encoder's output.
    mask : Tensor or None
        ``[B, S]``, zeros at padding of the encoder's input.
    """

    def __init__(self, model: Any, states: Tensor, mask: Tensor | None) -> None:
        config = model.config
        self.model, self.states, self.mask = model, states, mask
        self.config = SimpleNamespace(
            vocab_size=config.vocab_size,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
        self.generation_config = model.generation_config
        self.dtype, self.device, self.training = model.dtype, model.device, model.training
        self._cross: Any = DynamicCache()

    def begin(self) -> EncodedModel:
        """Give a copy that has not been called yet."""
        fresh = copy.copy(self)
        fresh._cross = DynamicCache()
        return fresh

    def select(self, rows: Tensor) -> None:
        """Keep only these requests."""
        self.states = self.states[rows]
        self.mask = None if self.mask is None else self.mask[rows]
        if len(self._cross):
            self._cross.batch_select_indices(rows)

    def get_input_embeddings(self) -> Any:
        """Return the decoder's embeddings."""
        return self.model.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
    ) -> Any:
        """Run the decoder; arguments are about decoder ids."""
        return self._run(input_ids, past_key_values, attention_mask)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`."""
        return self.forward(*args, **kwargs)

    def _run(
        self, input_ids: Tensor, cache: Cache | None, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        if len(self.states) != len(input_ids):
            raise ValueError(
                f"generate: {len(self.states)} inputs were encoded, but there are "
                f"{len(input_ids)} requests"
            )
        if cache is not None:
            kwargs["past_key_values"] = EncoderDecoderCache(cache, self._cross)
        return self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.states),
            # Whisper's encoder has no mask to give.
            **({} if self.mask is None else {"attention_mask": self.mask}),
            decoder_input_ids=input_ids,
            decoder_attention_mask=mask,
            use_cache=cache is not None,
            **kwargs,
        )


class _PositionedModel(EncodedModel):
    """One whose decoder embeds positions: where rows are ragged, it must be told them."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = True,
    ) -> Any:
        """Run the decoder; arguments are about decoder ids."""
        if position_ids is None:
            return self._run(input_ids, past_key_values, attention_mask)
        if "decoder_position_ids" in signature(self.model.forward).parameters:
            return self._run(
                input_ids, past_key_values, attention_mask, decoder_position_ids=position_ids
            )
        with _positions(self.model, position_ids):
            return self._run(input_ids, past_key_values, attention_mask)


def _embedded_positions(model: Any) -> Any:
    """Return the module that embeds a decoder's positions, None if it has none."""
    return getattr(model.get_decoder(), "embed_positions", None)


@contextmanager
def _positions(model: Any, position_ids: Tensor) -> Iterator[None]:
    """Let a decoder that counts positions by cache slots embed these, ``[B, m]``, instead."""

    def embed(module: Any, args: Any, output: Tensor) -> Tensor:
        return F.embedding(position_ids + getattr(module, "offset", 0), module.weight)

    handle = _embedded_positions(model).register_forward_hook(embed)
    try:
        yield
    finally:
        handle.remove()


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
        A Hugging Face encoder-decoder (T5, BART, Marian, Whisper and their likes), unmodified.
    attention_mask : Tensor, optional
        ``[B, S]``, zeros at padding of the encoder's input.
    encoder_outputs : optional
        What the encoder gave, if it has run.
    **encoder_inputs : Tensor
        What the encoder is called with otherwise: ``input_ids`` ``[B, S]`` or ``input_features``.

    Returns
    -------
    EncodedModel
        To be called on decoder ids: ``input_ids`` of `generate` are the decoder's prompt,
        usually ``[B, 1]`` of its start token.

    Raises
    ------
    TypeError
        A model that is no encoder-decoder, or whose decoder's positions are in no known place.

    Examples
    --------
    >>> inputs = tokenizer(texts, return_tensors="pt", padding=True)  # doctest: +SKIP
    >>> start = torch.full((len(texts), 1), t5.config.decoder_start_token_id)  # doctest: +SKIP
    >>> generate(encoded(t5, **inputs), encoded(small_t5, **inputs), start)  # doctest: +SKIP
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise TypeError(f"encoded: {type(model).__name__} is no encoder-decoder")
    embedding = _embedded_positions(model)
    told = "decoder_position_ids" in signature(model.forward).parameters
    if not (embedding is None or told or isinstance(embedding, torch.nn.Embedding)):
        raise TypeError(
            f"encoded: the decoder of {type(model).__name__} embeds positions by "
            f"{type(embedding).__name__}; ragged batches could not be told theirs"
        )
    if encoder_outputs is None:
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        encoder_outputs = model.get_encoder()(**encoder_inputs, **given)
    states = encoder_outputs[0]
    audio = "input_features" in signature(model.forward).parameters
    kind = EncodedModel if embedding is None else _PositionedModel
    return kind(model, states, None if audio else attention_mask)
