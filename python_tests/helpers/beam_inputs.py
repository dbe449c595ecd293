"""Inputs of `beam_verify`, and what comparisons of its results excuse."""

from __future__ import annotations

from typing import Any

import torch

from specdec_ext.contract import BeamVerifyResult


def make_inputs(
    seed: int,
    batch: int = 2,
    width: int = 3,
    gamma: int = 2,
    vocab: int = 50,
    dtype: torch.dtype = torch.float32,
    eos: int = 2,
) -> dict[str, Any]:
    """Random rows, and a tree of tokens of which many are among a row's best."""
    generator = torch.Generator().manual_seed(seed)
    nodes = width + 2 * width * gamma
    logits = (torch.randn(batch, nodes, vocab, generator=generator) * 2).to(dtype)
    best = logits.float().topk(min(width, vocab)).indices
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    parents = torch.full((batch, nodes), -1)
    for b in range(batch):
        for v in range(width, nodes):
            p = int(torch.randint(max(0, v - 2 * width), v, (), generator=generator))
            k = int(torch.randint(best.shape[2], (), generator=generator))
            tokens[b, v], parents[b, v] = best[b, p, k], p
    scores = -torch.rand(batch, width, generator=generator).cumsum(1) * 2
    return dict(
        target_logits=logits,
        scores=scores,
        tokens=tokens,
        parents=parents,
        gamma=gamma,
        eos_token_ids=torch.randint(vocab, (eos,), generator=generator),
    )


def assert_like(found: BeamVerifyResult, expected: BeamVerifyResult, exact: bool = False) -> None:
    """The same beams, with scores that differ by float32 roundings."""
    for name, got, wanted in zip(found._fields, found, expected, strict=True):
        if "scores" in name and not exact:
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=2e-6)
        else:
            assert torch.equal(got, wanted), name
