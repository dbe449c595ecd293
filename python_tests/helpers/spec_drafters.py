"""Spec-Drafters for the tests: tiny ones with random weights."""

from __future__ import annotations

import torch

from specdec_ext.models.spec_drafter import SpecDrafter, SpecDrafterConfig


def spec_drafter(vocabulary: int, block_size: int, seed: int = 0, **changes) -> SpecDrafter:
    """Return a random drafter in float64, where batches make no near ties.

    Its weights are large, so that the source, the prefix and the slot all matter.
    """
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 1}
    config = SpecDrafterConfig(vocab_size=vocabulary, block_size=block_size, **{**sizes, **changes})
    model = SpecDrafter(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embedding" not in name:
                parameter.normal_(0, 0.5)
    return model
