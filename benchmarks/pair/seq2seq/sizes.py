"""The four sizes, near 1 : 3 : 10 : 30 in parameters, and what share of the time each one gets.

The architecture is T5 v1.1's: gated GELU, no biases, relative positions, RMS norms in front. Three
things differ. The output layer is the shared embedding (T5 v1.1 has one of its own, which
transformers 5 no longer builds), and its input is therefore scaled by ``d_model ** -0.5``. There is
dropout, as in training on one task. The largest decoder is deep and the smallest ones are shallow:
a decoder's time for one token on a CPU goes with its number of layers, and a draft pays only if
that time is a small part of the target's (the cost ratio c of Leviathan et al., section 3.3).
"""

from __future__ import annotations

import torch
from transformers import T5Config, T5ForConditionalGeneration

# From the smallest to the largest: everything that compares sizes goes in this order.
SIZES: dict[str, dict[str, int]] = {
    "mini": {"d_model": 48, "d_ff": 128, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1},
    "small": {"d_model": 96, "d_ff": 256, "num_heads": 3, "num_layers": 2, "num_decoder_layers": 1},
    "base": {"d_model": 128, "d_ff": 352, "num_heads": 4, "num_layers": 6, "num_decoder_layers": 3},
    "large": {
        "d_model": 192,
        "d_ff": 512,
        "num_heads": 6,
        "num_layers": 6,
        "num_decoder_layers": 8,
    },
}
LARGEST = "large"

# Of the time for training. A larger model needs more time for the same text and gains more from it.
# With two trainings at a time the largest one has a core, and the others have the second one.
TIME_SHARES = {"mini": 0.05, "small": 0.10, "base": 0.35, "large": 0.50}

# The first part of the way, in which a size copies random tokens (see `data.Copies`), where the
# budget says so. Measured on translation: the largest one learns faster by it, the others are too
# small to learn it in that time and lose.
COPYING = {"large": 0.1}

# The learning rate at its height falls with the width; the embedding, whose entries are of order 1,
# takes larger steps than the matrices (Adafactor, with which T5 was trained, does that by itself).
PEAK_LR_TIMES_WIDTH = 0.25
EMBEDDING_LR = 0.01


def build_model(
    shape: dict[str, int], vocabulary: int, dropout: float, seed: int
) -> T5ForConditionalGeneration:
    """Return a freshly initialised model whose padding is token 0 and whose end is token 1."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=vocabulary,
        d_kv=shape["d_model"] // shape["num_heads"],
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        **shape,
    )
    return T5ForConditionalGeneration(config)
