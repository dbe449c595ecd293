"""The decoder of a Spec-Drafter: T5's layers, under which the slots of a block see each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.t5.modeling_t5 import T5Attention, T5PreTrainedModel, T5Stack

from ..decoding.cache_names import own_cache_name
from ..tree_masks import additive_mask

__all__ = ["BlockDecoder"]


class BlockDecoder(T5PreTrainedModel):
    """T5's decoder layers under the masks and the positions of blocks."""

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        # T5's own stack initialises its layers as T5 does. In a class that is not its own,
        # transformers takes attention layers for initialised, and leaves weights of order 1.
        stack = T5Stack(config)
        self.block = stack.block
        self.final_layer_norm, self.dropout = stack.final_layer_norm, stack.dropout
        self.post_init()

    def forward(
        self,
        embeddings: Tensor,
        visible: Tensor,
        distances: Tensor,
        states: Tensor,
        source_mask: Tensor | None,
        cache: EncoderDecoderCache | None,
    ) -> Tensor:
        """Run the layers.

        Parameters
        ----------
        embeddings : Tensor
            ``[B, n, d]``.
        visible : Tensor
            ``[b, n, t]`` bool, b = B or 1: which keys a query sees.
        distances : Tensor
            ``[b, n, t]`` int64, a key's position less the query's.
        states, source_mask, cache
            As in `specdec_ext.models.spec_drafter.BlockState`.

        Returns
        -------
        Tensor
            ``[B, n, d]``.
        """
        hidden = self.dropout(embeddings)
        bias = self._position_bias(distances)
        mask = additive_mask(visible[:, None], hidden.dtype)
        source_bias = None
        for layer in self.block:
            hidden, _, source_bias = layer(
                hidden,
                mask,
                bias,
                states,
                source_mask,
                source_bias,
                **{own_cache_name(): cache},
            )
        normed: Tensor = self.dropout(self.final_layer_norm(hidden))
        return normed

    def _position_bias(self, distances: Tensor) -> Tensor:
        """Return what is added to scores, ``[b, heads, n, t]``.

        T5's decoder has one bucket for all that lies to the right, where nothing is seen; here the
        slots of a block see each other, so the buckets are those of T5's encoder, for both sides.
        """
        bias: Tensor = _biases(self)(_buckets(self, distances, bidirectional=True))
        return bias.permute(0, 3, 1, 2)

    def copy_biases_from(self, decoder: T5Stack) -> None:
        """Make the biases of all that lies to the left those of T5's own decoder."""
        farthest = max(each.config.relative_attention_max_distance for each in (self, decoder))
        left = -torch.arange(farthest + 1)
        # Where a bucket here is of several there, it has the bias of the farthest.
        pairs = dict(
            zip(
                _buckets(self, left, bidirectional=True).tolist(),
                _buckets(decoder, left, bidirectional=False).tolist(),
                strict=True,
            )
        )
        _biases(self).weight[list(pairs)] = _biases(decoder).weight[list(pairs.values())]


def _biases(stack: T5PreTrainedModel) -> nn.Embedding:
    """Return the biases of self-attention by bucket of distance, which all layers share."""
    layers: Any = stack.block
    biases: nn.Embedding = layers[0].layer[0].SelfAttention.relative_attention_bias
    return biases


def _buckets(stack: T5PreTrainedModel, distances: Tensor, *, bidirectional: bool) -> Tensor:
    """Return the buckets of distances, a key's position less the query's."""
    buckets: Tensor = T5Attention._relative_position_bucket(
        distances,
        bidirectional=bidirectional,
        num_buckets=stack.config.relative_attention_num_buckets,
        max_distance=stack.config.relative_attention_max_distance,
    )
    return buckets
