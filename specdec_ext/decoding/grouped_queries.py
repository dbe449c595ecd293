"""Attention from a few tokens where heads share keys and values, without repeating those."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .checks import shown

__all__ = ["group_queries"]

NAME = "specdec_grouped"  # the implementation's name in transformers
# With more tokens, masks that are repeated for each head of a group cost what keys would.
_MOST_TOKENS = 64


@cache
def _registered() -> str:
    """Tell transformers of the implementation; return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations import sdpa_attention
    from transformers.masking_utils import sdpa_mask

    def grouped_attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        batch, heads, tokens, size = query.shape
        shared, mask = key.shape[1], attention_mask
        special = (kwargs.get(name) for name in ("dropout", "softcap", "s_aux", "position_bias"))
        if (
            shared == heads
            or tokens > _MOST_TOKENS
            or (tokens > 1 if mask is None else mask.shape[1] > 1)
            or any(option is not None and option != 0.0 for option in special)
        ):
            found: tuple[Tensor, None] = sdpa_attention.sdpa_attention_forward(
                module, query, key, value, mask, scaling=scaling, **kwargs
            )
            return found
        rows = heads // shared * tokens
        if mask is not None and tokens > 1:
            repeated = mask[:, :, None].expand(-1, -1, heads // shared, -1, -1)
            mask = repeated.reshape(mask.shape[0], 1, rows, mask.shape[3])
        attended = scaled_dot_product_attention(
            query.reshape(batch, shared, rows, size), key, value, attn_mask=mask, scale=scaling
        )
        return attended.view(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def group_queries(model: Any) -> None:
    """Make attention from a few tokens faster where heads share keys and values, in place.

    Under grouped-query attention several heads read the same keys and values. Where there is a
    mask, as in every call on several tokens behind a cache, transformers' ``sdpa`` attention copies
    all keys and values once for each of these heads, in every layer and call. After this call the
    queries of heads that share keys are rows of one head, and nothing is copied. That changes
    results by rounding alone. Calls on more than 64 tokens, and what the implementation does not
    know (dropout, soft caps, attention sinks, biases of positions), stay with transformers.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        On any device, whose attention is ``"sdpa"``, as it is by default. Afterwards it is
        ``"specdec_grouped"``; ``model.set_attn_implementation("sdpa")`` takes that back.

    Raises
    ------
    TypeError
        No model of transformers.
    ValueError
        Attention that is not ``"sdpa"``.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=9, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> group_queries(model)
    >>> model.config._attn_implementation
    'specdec_grouped'
    """
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"group_queries: model must be a model of transformers, got {shown(model)}")
    attention = model.config._attn_implementation
    if attention not in ("sdpa", NAME):
        raise ValueError(f"group_queries: attention must be 'sdpa', got {attention!r}")
    model.set_attn_implementation(_registered())
