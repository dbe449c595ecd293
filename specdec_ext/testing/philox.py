"""The operators' randomness in plain integers: Philox and what is made of its words."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: The largest float64 below 1.
BEFORE_ONE = 1.0 - 2.0**-53


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in plain integers, from Salmon et al. (SC 2011).

    Parameters
    ----------
    counter : sequence of int
        Four words in [0, 2^32).
    key : sequence of int
        Two words in [0, 2^32).

    Returns
    -------
    tuple of int
        Four words in [0, 2^32).

    Examples
    --------
    The first of the Random123 known-answer vectors:

    >>> [f"{word:08x}" for word in philox4x32([0, 0, 0, 0], [0, 0])]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    mask = 0xFFFFFFFF
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k0, right & mask, (left >> 32) ^ d ^ k1, left & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return a, b, c, d


def philox_uniform(seed: int, position: int, index: int, domain: int, stream: int = 0) -> float:
    """Give the uniform that operators draw at a counter; a multiple of 2^-53 in [0, 1).

    Parameters
    ----------
    seed, position : int
        int64 values, negative ones included.
    index : int
        Node of a coin, 0 for the final draw, or draft index; in [0, 65536).
    domain : int
        0 a coin, 1 the final draw, 2 a draft token.
    stream : int
        Level in a hierarchy of models, in [0, 256).

    Examples
    --------
    >>> philox_uniform(seed=0, position=0, index=0, domain=0) == (0xE169C58D6627E8D5 >> 11) / 2**53
    True
    """
    mask = 0xFFFFFFFF
    last = index | domain << 16 | stream << 24
    words = philox4x32(
        [0, position & mask, position >> 32 & mask, last], [seed & mask, seed >> 32 & mask]
    )
    return ((words[1] << 32 | words[0]) >> 11) * 2.0**-53


def philox_exponentials(
    seed: int, position: int, tokens: Sequence[int], stream: int = 0
) -> list[float]:
    """Give the noise of tokens in a COUPLED race, in plain integers but for the logarithm.

    Parameters
    ----------
    seed : int
        An int64 value.
    position : int
        The absolute position of the token that is raced for; modulo 2^64.
    tokens : sequence of int
        Ids in [0, 2^31).
    stream : int
        Level in a hierarchy of models, in [0, 256).

    Examples
    --------
    >>> [round(e, 4) for e in philox_exponentials(seed=0, position=0, tokens=[0, 1, 2])]
    [0.7784, 1.1083, 1.0563]
    """
    mask = 0xFFFFFFFF
    found: list[float] = []
    pairs: dict[int, tuple[int, int, int, int]] = {}  # one counter serves two tokens
    for token in tokens:
        pair, odd = divmod(token, 2)
        if pair not in pairs:
            pairs[pair] = philox4x32(
                [pair, position & mask, position >> 32 & mask, 3 << 16 | stream << 24],
                [seed & mask, seed >> 32 & mask],
            )
        words = pairs[pair][2:] if odd else pairs[pair][:2]
        u = (float(words[1] << 32 | words[0]) + 0.5) * 2.0**-64
        found.append(-math.log1p(-min(u, BEFORE_ONE)))
    return found
