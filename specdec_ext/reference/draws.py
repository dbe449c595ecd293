"""Randomness: Philox uniforms, race noise, and draws in integers (docs/design.md, "Randomness")."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..contract import DOMAIN_ACCEPT, DOMAIN_COUPLED, DOMAIN_DRAFT, DOMAIN_RESIDUAL

__all__ = [
    "ACCEPT",
    "COUPLED",
    "DRAFT",
    "RESIDUAL",
    "clamped",
    "inverse_cdf",
    "law_weights",
    "philox4x32",
    "philox_uniforms",
    "race",
    "race_noise",
    "residual_weights",
    "uniforms",
]

# Philox domains: what a draw is for.
ACCEPT, RESIDUAL = DOMAIN_ACCEPT, DOMAIN_RESIDUAL
DRAFT, COUPLED = DOMAIN_DRAFT, DOMAIN_COUPLED

MASK32 = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Parameters
    ----------
    counter : Tensor
        ``[..., 4]`` int64, each word in [0, 2^32).
    key : Tensor
        ``[..., 2]`` int64, each word in [0, 2^32).

    Returns
    -------
    Tensor
        ``[..., 4]`` int64, each word in [0, 2^32).
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        # int64 products wrap modulo 2^64, so the bits are those of the unsigned product.
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((odd >> 32) & MASK32) ^ c1 ^ k0,
            odd & MASK32,
            ((even >> 32) & MASK32) ^ c3 ^ k1,
            even & MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return torch.stack([c0, c1, c2, c3], dim=-1)


def philox_uniforms(
    seeds: Tensor, positions: Tensor, index: Tensor | int, domain: int, stream: int = 0
) -> Tensor:
    """One uniform in [0, 1) per seed, position and index: words 0 and 1 at counter word c0 = 0.

    Parameters
    ----------
    seeds, positions : Tensor
        int64, any shapes that broadcast with each other and with `index`.
    index : Tensor or int
        The node or draft index, in [0, 65536).
    domain : int
        `ACCEPT`, `RESIDUAL`, `DRAFT` or `COUPLED`.
    stream : int
        In [0, 256): one for every level of a hierarchy of models.

    Returns
    -------
    Tensor
        float64, multiples of 2^-53.
    """
    last = torch.as_tensor(index, dtype=torch.int64) | domain << 16 | stream << 24
    first, second = _words(seeds, positions, torch.tensor(0), last)[..., :2].unbind(-1)
    pair = second << 32 | first
    return ((pair >> 11) & (2**53 - 1)).double() * 2.0**-53


def _words(seeds: Tensor, positions: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Philox words at counter (first, position low, position high, last), broadcast; [..., 4]."""
    words = (first, positions & MASK32, (positions >> 32) & MASK32, last)
    key = torch.stack([seeds & MASK32, (seeds >> 32) & MASK32], dim=-1)
    return philox4x32(torch.stack(torch.broadcast_tensors(*words), dim=-1), key)


def race_noise(seed: int, position: int, tokens: Tensor, stream: int = 0) -> Tensor:
    """Exponential variables of the COUPLED race, one for every token: ``-log1p(-u)``.

    u has all 64 bits: a lattice of 2^-24 has no exponential above 16.6 and many at 0, so that it
    draws rare tokens at a wrong rate.

    Parameters
    ----------
    seed, position : int
        int64 values; the position is the absolute one of the token that is raced for.
    tokens : Tensor
        int64 ids, each in [0, 2^31).
    stream : int
        In [0, 256).

    Returns
    -------
    Tensor
        float64, positive, of the shape of `tokens`.
    """
    last = torch.tensor(COUPLED << 16 | stream << 24)
    words = _words(torch.tensor(seed), torch.tensor(_int64(position)), tokens >> 1, last)
    odd = (tokens & 1).bool()
    first = torch.where(odd, words[..., 2], words[..., 0])
    second = torch.where(odd, words[..., 3], words[..., 1])
    pair = second.double() * 2.0**32 + first.double()  # rounded once, as a uint64 would be
    u = ((pair + 0.5) * 2.0**-64).clamp(max=1.0 - 2.0**-53)
    return -torch.log1p(-u)


def _int64(value: int) -> int:
    """Wrap to int64, as a sum of positions does on the device."""
    return (value + 2**63) % 2**64 - 2**63


def race(weights: Tensor, noise: Tensor) -> int:
    """Find the arg min of noise / weights over positive weights, the lowest index among ties.

    For independent exponential noise it is distributed as the weights, and two laws that race on
    the same noise give the same token with probability sum_j 1 / sum_i max(p_i / p_j, q_i / q_j),
    at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024).
    """
    return int((noise / weights).masked_fill(weights <= 0, math.inf).argmin())


def uniforms(seeds: Tensor, positions: Tensor, n: int, *, stream: int = 0) -> Tensor:
    """Compute the coins of `verify`, [B, n]: those of nodes 1 .. n - 1, then the final draw."""
    nodes = torch.arange(1, n, dtype=torch.int64)
    seeds_, positions_ = seeds.cpu()[:, None], positions.cpu()[:, None]
    coins = philox_uniforms(seeds_, positions_, nodes, ACCEPT, stream)
    final = philox_uniforms(seeds_, positions_, 0, RESIDUAL, stream)
    return torch.cat([coins, final], dim=1).to(seeds.device)


def law_weights(weights: Tensor) -> Tensor:
    """Integer weights ``floor(w * 2^40)`` of an unnormalised law, w in [0, 1]; ``[V]`` int64."""
    return (weights * 2.0**40).floor().long()


def residual_weights(positive: Tensor) -> Tensor:
    """Integer weights ``floor(w / S * 2^62)`` of a residual with sum S, all 0 if S = 0; [V]."""
    total = positive.sum()
    if not total > 0:
        return torch.zeros_like(positive, dtype=torch.int64)
    return (positive / total * 2.0**62).floor().long()


def inverse_cdf(weights: Tensor, u: float) -> int:
    """Find the lowest index whose inclusive prefix sum exceeds ``umulhi(u53 << 11, total)``.

    Parameters
    ----------
    weights : Tensor
        ``[V]`` int64, not negative, with a positive total below 2^63.
    u : float
        The uniform; u53 = floor(u * 2^53) clamped to [0, 2^53 - 1].

    Returns
    -------
    int
        An index of positive weight.
    """
    prefix = weights.cumsum(0)
    u53 = min(max(math.floor(u * 2.0**53), 0), 2**53 - 1)
    t = (u53 << 11) * int(prefix[-1]) >> 64
    return int(torch.searchsorted(prefix, t, right=True))


def clamped(u: float) -> float:
    """Clamp to [0, 1 - 2^-53]; NaN becomes 0."""
    return 0.0 if math.isnan(u) else min(max(u, 0.0), 1.0 - 2.0**-53)
