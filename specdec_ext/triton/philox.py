"""Philox4x32-10 (Salmon et al., SC 2011) and its counters: csrc/core/philox.h, bit for bit.

Words are the low halves of 64-bit integers: a product of two is then plain, on every device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import contract

ACCEPT = tl.constexpr(contract.DOMAIN_ACCEPT)
RESIDUAL = tl.constexpr(contract.DOMAIN_RESIDUAL)
COUPLED = tl.constexpr(contract.DOMAIN_COUPLED)

WORD = tl.constexpr(0xFFFFFFFF)

#: The largest float64 below 1; a bare literal would be float32.
BELOW_ONE = tl.constexpr(0.9999999999999999)


class Coins(NamedTuple):
    """Where the uniforms come from: given ones [B, n], or counters from seeds and positions [B]."""

    uniforms: Any
    uniforms_stride_b: Any
    uniforms_stride_s: Any
    seeds: Any
    seeds_stride: Any
    positions: Any
    positions_stride: Any
    stream: Any


@triton.jit
def philox4x32_10(key, c0, c1, c2, c3):
    """Encrypt a counter of four words, uint64 each and below 2^32, under a 64-bit key."""
    k0 = key & WORD
    k1 = key >> 32
    for _ in tl.static_range(10):
        even = c0 * 0xD2511F53
        odd = c2 * 0xCD9E8D57
        c0 = (odd >> 32) ^ c1 ^ k0
        c1 = odd & WORD
        c2 = (even >> 32) ^ c3 ^ k1
        c3 = even & WORD
        k0 = (k0 + 0x9E3779B9) & WORD
        k1 = (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


@triton.jit
def counter_uniform(seed, position, domain, index, stream):
    """53 random bits in [0, 1) at counter (0, position, index | domain << 16 | stream << 24).

    Everything int64, of shapes that broadcast to that of `index`.
    """
    zero = index * 0
    last = (index + ((zero + domain) << 16) + ((zero + stream) << 24)).to(tl.uint64)
    place = (position + zero).to(tl.uint64)
    first, second, _, _ = philox4x32_10(
        seed.to(tl.uint64), last * 0, place & WORD, place >> 32, last
    )
    return ((second << 32 | first) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def verify_uniform(seed, position, slot, gamma, stream):
    """Uniform of a slot: the coin of draft token slot + 1, or the final draw (slot gamma)."""
    final = slot == gamma
    index = tl.where(final, 0, slot + 1)
    domain = tl.where(final, RESIDUAL, ACCEPT).to(tl.int64)
    return counter_uniform(seed, position, domain, index, stream)


@triton.jit
def is_uniform(u):
    """Whether u lies in [0, 1)."""
    return (u >= 0.0) & (u < 1.0)


@triton.jit
def clamp_uniform(u):
    """Clamp to [0, 1 - 2^-53], NaN to 0."""
    below_one = tl.full([], BELOW_ONE, tl.float64)
    return tl.where(is_uniform(u), u, tl.where(u >= 1.0, below_one, 0.0))


@triton.jit
def coins_at(coins, b, slots, gamma):
    """Uniforms of a vector of slots (int64, at most gamma) of request b."""
    if coins.uniforms is not None:
        place = coins.uniforms + b * coins.uniforms_stride_b + slots * coins.uniforms_stride_s
        found = clamp_uniform(tl.load(place))
    elif coins.seeds is not None:
        seed = tl.load(coins.seeds + b * coins.seeds_stride)
        position = tl.load(coins.positions + b * coins.positions_stride)
        found = verify_uniform(seed, position, slots, gamma, coins.stream)
    else:
        found = slots.to(tl.float64) * 0.0  # a rule that looks at no coin
    return found
