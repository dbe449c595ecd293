"""Philox4x32-10 against Random123's published vectors; counters.

These are laid out as docs/design.md, "Randomness", says.
"""

from __future__ import annotations

import pytest
import torch

import specdec_ext
from specdec_ext import reference
from specdec_ext.testing import philox4x32, philox_uniform

# Random123, tests/kat_vectors: philox4x32 10, counter, key, result.
KNOWN_ANSWERS = [
    (
        [0x00000000, 0x00000000, 0x00000000, 0x00000000],
        [0x00000000, 0x00000000],
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    ),
    (
        [0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF],
        [0xFFFFFFFF, 0xFFFFFFFF],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

# Extremes of int64 and what is usual: all 64 bits of both count.
SEEDS = [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x243F6A8885A308D3, -1234567890123]
POSITIONS = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, -1, 77, 2**40 + 3]


@pytest.mark.parametrize("counter, key, expected", KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert list(philox4x32(counter, key)) == expected
    words = reference.philox4x32(torch.tensor(counter), torch.tensor(key))
    assert words.tolist() == expected


@pytest.mark.parametrize("stream", [0, 1, 255])
def test_uniforms_are_counters(backend, stream):
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    coins = backend.uniforms(seeds, positions, 6, stream=stream)
    for b, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        # Slot i - 1 is the coin of node i (domain 0), the last the final draw (domain 1, index 0).
        accept = [philox_uniform(seed, position, node, 0, stream) for node in range(1, 6)]
        final = philox_uniform(seed, position, 0, 1, stream)
        assert coins[b].tolist() == [*accept, final]


def test_uniforms_from_the_published_words():
    # Counter 0, key 0 is coin 0 of seed 0, position 0: (word1 << 32 | word0) >> 11, times 2^-53.
    pair = 0xE169C58D << 32 | 0x6627E8D5
    assert philox_uniform(0, 0, 0, 0) == (pair >> 11) * 2.0**-53
    assert reference.philox_uniforms(torch.tensor(0), torch.tensor(0), 0, 0) == (pair >> 11) / 2**53
    # The all-ones vector: seed -1, position -1, but a first counter word that no operator uses.
    words = philox4x32([0, 0xFFFFFFFF, 0xFFFFFFFF, 255 << 24 | 5], [0xFFFFFFFF] * 2)
    expected = ((words[1] << 32 | words[0]) >> 11) * 2.0**-53
    one = torch.tensor([-1])
    assert float(torch.ops.specdec.uniforms(one, one, 6, stream=255)[0, 4]) == expected


@pytest.mark.parametrize("slots", [1, 2, 300])
def test_number_of_slots(backend, slots):
    seeds = torch.tensor([5, 6])
    coins = backend.uniforms(seeds, seeds, slots)
    assert coins.shape == (2, slots) and coins.dtype == torch.float64
    # The final draw does not depend on how many coins precede it, the coins not on what follows.
    more = backend.uniforms(seeds, seeds, slots + 3)
    assert torch.equal(more[:, -1], coins[:, -1])
    assert torch.equal(more[:, : slots - 1], coins[:, :-1])


def token_of(u, vocab):
    """The index that a flat law gives: floor(u V), in integers."""
    return (int(u * 2**53) * vocab) >> 53


@pytest.mark.parametrize("domain", [1, 2])
@pytest.mark.parametrize("draft_index", [0, 1, 65_535])
@pytest.mark.parametrize("stream", [0, 255])
def test_draws_of_sample_are_counters(backend, domain, draft_index, stream):
    vocab = 4096  # flat: the token is the first 12 bits of the uniform
    got = backend.sample(
        torch.zeros(len(SEEDS), vocab),
        seeds=torch.tensor(SEEDS),
        positions=torch.tensor(POSITIONS),
        draft_index=draft_index,
        domain=domain,
        stream=stream,
    ).tokens.tolist()
    expected = [
        token_of(philox_uniform(seed, position, draft_index, domain, stream), vocab)
        for seed, position in zip(SEEDS, POSITIONS, strict=True)
    ]
    assert got == expected


def test_default_domain_of_sample_is_the_drafts(backend):
    seeds = torch.arange(64)
    draws = [
        backend.sample(torch.zeros(64, 4096), seeds=seeds, positions=seeds, **domain).tokens
        for domain in ({}, dict(domain=2), dict(domain=1))
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_every_use_of_randomness_is_a_stream_of_its_own(backend):
    # Coins, final draws and draft draws of one (seed, position), over streams: all different.
    seeds, positions = torch.tensor([7]), torch.tensor([9])
    seen = [backend.uniforms(seeds, positions, 50, stream=s).flatten() for s in range(8)]
    draft = [philox_uniform(7, 9, i, 2, s) for s in range(8) for i in range(50)]
    everything = torch.cat([*seen, torch.tensor(draft, dtype=torch.float64)])
    assert len(everything.unique()) == len(everything)


def test_operators_agree_bit_for_bit(operator):
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (500,), generator=generator)
    positions = torch.randint(-(2**63), 2**63 - 1, (500,), generator=generator)
    for stream in (0, 3):
        got = operator.uniforms(seeds, positions, 20, stream=stream)
        assert torch.equal(got, reference.uniforms(seeds, positions, 20, stream=stream))


def test_uniforms_are_uniform(operator):
    # A smoke test on top of the known answers: mean and bins of 2^18 numbers. Binomial counts stay
    # within 6.2 standard deviations except with probability 1e-9 a bin.
    seeds = torch.arange(4096)
    u = operator.uniforms(seeds, 3 * seeds, 64).flatten()
    assert bool((u >= 0).all()) and bool((u < 1).all())
    counts = torch.histc(u.float(), 64, 0, 1)
    deviation = (counts - len(u) / 64).abs().max() / (len(u) / 64) ** 0.5
    assert deviation < 6.5
    assert bool((u * 2**53 == (u * 2**53).floor()).all())
    assert bool(((u * 2**53) % 2 == 1).any())  # all 53 bits are there


def test_public_function():
    seeds, positions = torch.tensor(SEEDS), torch.tensor(POSITIONS)
    expected = reference.uniforms(seeds, positions, 4, stream=2)
    for backend in ("auto", "cpu", "reference"):
        got = specdec_ext.uniforms(seeds, positions, 4, stream=2, backend=backend)
        assert torch.equal(got, expected)
