"""What a Spec-Drafter asks of the target whose layers it begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Stack

__all__: list[str] = []

# What layers of a target, and what all of its encoder, must share with those of a drafter, so that
# their weights mean the same here.
OF_A_LAYER = ("d_model", "d_kv", "d_ff", "num_heads", "feed_forward_proj", "layer_norm_epsilon")
OF_THE_ENCODER = (
    "vocab_size",
    *OF_A_LAYER,
    "num_layers",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
)
BIASES = "relative_attention_bias.weight"


def check_sizes(
    name: str, part: str, config: T5Config, other: T5Config, sizes: Sequence[str]
) -> None:
    """Refuse a target whose encoder or decoder has other sizes than a drafter's."""
    differing = [
        (size, getattr(config, size), getattr(other, size, None))
        for size in sizes
        if getattr(config, size) != getattr(other, size, None)
    ]
    if differing:
        wanted = ", ".join(f"{size}={own}" for size, own, _ in differing)
        found = ", ".join(f"{size}={value}" for size, _, value in differing)
        raise ValueError(
            f"{name}: the target's {part} must have {wanted}, as this drafter's has, got {found}"
        )


def check_target(name: str, target: Any) -> None:
    """Refuse a model that has no T5 encoder."""
    encoder = getattr(target, "get_encoder", lambda: None)()
    if not isinstance(encoder, T5Stack):
        raise TypeError(
            f"{name}: the target must be a T5 encoder-decoder (the drafter's layers are T5's), got "
            f"{type(target).__name__}"
        )
