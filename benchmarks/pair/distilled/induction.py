"""Weights to begin a draft with that copy from its context before it has learned anything.

Much of what a chat model answers stands in its context already: what it is asked to change, and
what it repeats. Looking it up takes two layers, an *induction head* (Olsson et al., arXiv
2209.11895): a head of the first layer tells each token which one stands before it, and a head of
the second looks for the places behind the token that is read now and proposes what stands there.
Training finds that out from billions of tokens only; it is quickly written down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ext.models.draft_llama import DraftLlama

SPREAD = 0.05  # standard deviation of the embedding
PAIRS = 8  # of a head's entries that tell distances, those that rotary positions turn fastest
NEAR = 3.0  # the larger, the more of its weight the first head gives to the token before
ALIKE = 2.5  # the larger, the more the second head gives to the places that match
COPIED = 14.0  # what the second head adds to a token, in norms of an embedding
BEFORE = 1.7  # what the first head adds, likewise
OTHERS = 0.1  # of the multilayer perceptrons' initial size, so that these are heard


def _told_apart(vectors: Tensor) -> Tensor:
    """Return vectors of one norm that vary equally in all directions.

    A head tells tokens apart by a part of their vectors only; where few directions held most of
    the variance, it would take any two frequent tokens for the same.
    """
    values, directions = torch.linalg.eigh(vectors.T @ vectors / len(vectors))
    scales = values.clamp(min=1e-6 * float(values[-1])).rsqrt()
    spread = vectors @ (directions * scales) @ directions.T
    return spread * (SPREAD * vectors.shape[1] ** 0.5 / spread.norm(dim=1, keepdim=True))


@torch.no_grad()
def begin_copying(draft: DraftLlama) -> None:
    """Write an induction head into a fresh draft's first two layers, in place.

    Parameters
    ----------
    draft : DraftLlama
        With biases in its attention, at least two layers, and at least three times as wide as a
        head.

    Raises
    ------
    ValueError
        It is smaller, or without biases.
    """
    config, layers = draft.config, draft.layers.layers
    width, size = config.hidden_size, config.hidden_size // config.num_attention_heads
    if len(layers) < 2 or width < 3 * size or not config.attention_bias:
        raise ValueError(
            "an induction head needs 2 layers, biases in attention, and a width of 3 heads, got "
            f"{len(layers)}, {config.attention_bias} and {width} with heads of {size}"
        )
    embedding = draft.layers.embed_tokens.weight
    embedding[:-1] = _told_apart(embedding[:-1])
    basis = torch.linalg.qr(torch.randn(width, width)).Q.to(embedding)
    read, before, copied = basis[: 3 * size].split(size)  # [size, D] each, at right angles
    for layer in layers[:2]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.mul_(OTHERS)
    _look_one_back(layers[0].self_attn, draft.layers.rotary_emb.inv_freq)
    layers[0].self_attn.v_proj.weight[:size] = read
    layers[0].self_attn.o_proj.weight[:, :size] = BEFORE * SPREAD * before.T
    second = layers[1].self_attn
    second.q_proj.weight[:size] = ALIKE * read
    second.k_proj.weight[:size] = ALIKE * before
    second.v_proj.weight[:size] = copied
    second.o_proj.weight[:, :size] = COPIED * SPREAD * copied.T


def _look_one_back(attention: torch.nn.Module, frequencies: Tensor) -> None:
    """Let the first head attend to the token before, whatever it is.

    The biases alone make its scores: a key is the query turned by one position, so that rotary
    positions bring both together where the key stands one place before the query.
    """
    size = 2 * len(frequencies)
    attention.q_proj.weight[:size] = 0.0
    attention.k_proj.weight[:size] = 0.0
    turned = frequencies[:PAIRS]
    height = NEAR * 8**0.5
    attention.q_proj.bias[:PAIRS] = height
    attention.k_proj.bias[:PAIRS] = height * turned.cos()
    attention.k_proj.bias[size // 2 : size // 2 + PAIRS] = height * turned.sin()
