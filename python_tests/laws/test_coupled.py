"""The rule "coupled": what is emitted is a function of seeds, positions and the target alone.

First the equality itself, token for token, then what is read and reported, then the noise, whose 64
bits reach where coarser lattices fail. How often draft tokens are accepted: test_statistics.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from conftest import f64, log_probs

import specdec_ext
from specdec_ext import reference
from specdec_ext.testing import (
    VerifyCase,
    explain_outcome,
    make_case,
    philox_exponentials,
)

ALPHA = 1e-9


def ints(*values):
    return torch.tensor(values, dtype=torch.int64)


# ---- one law of output, whatever is drafted -----------------------------------------------------

V, LENGTH = 11, 9
SEEDS = ints(0, -1, 2**62 + 5, 7, 8, 9)
STARTS = ints(0, 5, 2**32 - 4, 2**40, 3, 2**63 - 3)  # the last one passes 2^63
B = len(SEEDS)
FILTERS = dict(
    temperature=torch.tensor([1.0, 0.7, 0.0, 1.5, 1.0, 1.0]),
    top_k=ints(0, 5, 0, 3, 0, 0),
    top_p=torch.tensor([1.0, 1.0, 1.0, 0.9, 0.6, 1.0]),
    min_p=torch.tensor([0.0, 0.02, 0.0, 0.0, 0.0, 0.1]),
)


def table(seed, scale=1.5):
    """Logits after each last token, [V, V]."""
    return scale * torch.randn(V, V, generator=torch.Generator().manual_seed(seed))


TARGET = table(1)


def plain(backend, target, rows=slice(None), stream=0):
    """Seeded sampling without speculation, one token at a time."""
    filters = {k: v[rows] for k, v in FILTERS.items()}
    seeds, positions = SEEDS[rows], STARTS[rows]
    tokens = [torch.zeros_like(seeds)]
    for i in range(LENGTH):
        drawn = backend.sample(
            target[tokens[-1]], seeds=seeds, positions=positions + i, domain=3, stream=stream,
            **filters,
        )  # fmt: skip
        tokens.append(drawn.tokens)
    return torch.stack(tokens[1:], 1)


def drafted(backend, drafter, last, gamma, positions, rows):
    """Draft tokens [b, gamma] and the logits that they come from, if they do."""
    filters = {k: v[rows] for k, v in FILTERS.items()}
    if drafter == "constant":
        return torch.full((len(last), gamma), 3), None
    if drafter == "placeholders":
        tokens = torch.randint(V, (len(last), gamma), generator=torch.Generator().manual_seed(0))
        tokens[:, gamma // 2] = -1
        return tokens, None
    logits = TARGET if drafter == "target" else TARGET + table(2, 0.7)
    tokens, laws = [last], []
    for i in range(gamma):
        laws.append(logits[tokens[-1]])
        drawn = backend.sample(
            laws[-1], seeds=SEEDS[rows], positions=positions, draft_index=i,
            domain=2 if drafter == "independent" else 3, **filters,
        )  # fmt: skip
        tokens.append(drawn.tokens)
    return torch.stack(tokens[1:], 1), torch.stack(laws, 1)


def speculative(backend, drafter, gamma, rows=slice(None)):
    """The same sequences by rounds of draft and verify, and how many draft tokens were kept."""
    positions = STARTS[rows].clone()
    count = len(positions)
    texts = [[0] for _ in range(count)]
    kept = 0
    while min(map(len, texts)) <= LENGTH:
        last = torch.tensor([text[-1] for text in texts])
        tokens, laws = drafted(backend, drafter, last, gamma, positions, rows)
        contexts = torch.cat([last[:, None], tokens.clamp(min=0)], 1)
        result = backend.verify(
            TARGET[contexts], tokens, laws, seeds=SEEDS[rows], positions=positions, rule="coupled",
            **{k: v[rows] for k, v in FILTERS.items()},
        )  # fmt: skip
        assert result.status.tolist() == [0] * count
        kept += int(result.num_accepted.sum())
        for text, new in zip(texts, result.tokens.tolist(), strict=True):
            text += [token for token in new if token >= 0]
        positions += result.num_accepted + 1
    return torch.tensor([text[1 : LENGTH + 1] for text in texts]), kept


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("drafter", ["race", "independent", "target", "constant", "placeholders"])
def test_output_is_that_of_plain_sampling(backend, drafter, gamma):
    expected = plain(backend, TARGET)
    tokens, kept = speculative(backend, drafter, gamma)
    assert torch.equal(tokens, expected)
    if drafter == "target":  # the same race twice
        assert kept >= B * LENGTH * gamma // (gamma + 1) - gamma * B
    # In other batches: alone, and in pairs the other way round.
    for rows in ([4], [5, 1]):
        assert torch.equal(speculative(backend, drafter, gamma, rows)[0], expected[rows])


def test_a_shared_race_is_kept_more_often_than_noise_of_its_own(backend):
    kept = {drafter: speculative(backend, drafter, 3)[1] for drafter in ("race", "independent")}
    assert kept["race"] > kept["independent"]


def test_noise_keyed_by_the_call_is_not_that_of_plain_sampling(backend):
    # The control: (call position, row) names a place differently for every gamma.
    class KeyedByTheCall:
        sample = backend.sample

        def verify(self, logits, tokens, draft, *, seeds, positions, **options):
            gamma = tokens.shape[1]
            for i in range(gamma + 1):
                here = dict(seeds=seeds, positions=positions * 16 + i)
                column = tokens[:, i : i + 1]
                step = backend.verify(logits[:, i : i + 2], column, **here, **options)
                last = i == gamma or not bool((step.num_accepted > 0).all())
                if last:
                    break
            emitted = torch.full((len(tokens), gamma + 1), -1)
            emitted[:, :i] = tokens[:, :i]
            emitted[:, i] = step.tokens[:, 0]
            count = torch.full_like(step.num_accepted, i)
            return step._replace(tokens=emitted, num_accepted=count)

    rows = (0, 1, 3, 4)
    expected = plain(backend, TARGET)[list(rows)]
    found = [
        torch.cat([speculative(KeyedByTheCall(), "target", gamma, [row])[0] for row in rows])
        for gamma in (1, 4)
    ]
    assert not torch.equal(found[0], found[1])
    assert not any(bool((tokens == expected).all(1).any()) for tokens in found)


def test_output_depends_on_seed_stream_and_position(backend):
    # The control: another stream, and plain sampling in another domain, give other tokens.
    expected = plain(backend, TARGET)
    assert not torch.equal(plain(backend, TARGET, stream=1), expected)
    others = [0, 1, 3, 4, 5]  # request 2 is greedy
    assert torch.equal(plain(backend, TARGET, stream=1)[2], expected[2])
    shifted = [
        backend.sample(TARGET[[0] * B], seeds=SEEDS, positions=STARTS + i, domain=3).tokens[others]
        for i in range(8)
    ]
    assert len({tuple(tokens.tolist()) for tokens in shifted}) == 8


def test_races_over_several_tiles(operator):
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(2, 4, 9001, generator=generator)
    noise = dict(seeds=ints(1, 2), positions=ints(10, 20), stream=3)
    races = [
        operator.sample(target[:, i], **noise, draft_index=i, domain=3).tokens for i in range(4)
    ]
    draft = torch.stack(races[:3], 1)
    result = operator.verify(target, draft, **noise, rule="coupled")
    assert result.num_accepted.tolist() == [3, 3]
    assert torch.equal(result.tokens, torch.stack(races, 1))
    expected = reference.verify(target, draft, **noise, rule="coupled")
    assert torch.equal(result.tokens, expected.tokens)


def test_winner_by_hand(backend):
    # E / p in plain integers and a logarithm; row i races at position + i.
    p = [0.1, 0.2, 0.3, 0.4]
    for seed, position in ((0, 0), (-5, 2**33 + 1), (2**63 - 1, -2)):
        times = [
            [
                e / x
                for e, x in zip(
                    philox_exponentials(seed, position + i, range(4), 9), p, strict=True
                )
            ]
            for i in range(3)
        ]
        winners = [row.index(min(row)) for row in times]
        for wrong in (None, 0, 1):
            draft = list(winners[:2])
            if wrong is not None:
                draft[wrong] = (draft[wrong] + 1) % 4
            result = backend.verify(
                log_probs([[p] * 3]), torch.tensor([draft]), rule="coupled", stream=9,
                seeds=ints(seed), positions=ints(position),
            )  # fmt: skip
            accepted = 2 if wrong is None else wrong
            assert result.num_accepted.tolist() == [accepted]
            assert result.tokens[0].tolist() == winners[: accepted + 1] + [-1] * (2 - accepted)
            probs = [1.0] * accepted + [0.0, math.nan][: 2 - accepted]
            assert result.accept_probs[0].tolist() == pytest.approx(probs, nan_ok=True)
            shown = [math.log(p[token]) for token in winners[: accepted + 1]]
            assert result.logprobs[0, : accepted + 1].tolist() == pytest.approx(shown, abs=1e-6)


def test_full_accept_probs(backend):
    inputs = dict(
        target_logits=log_probs([[[0.1, 0.2, 0.3, 0.4]] * 4]), rule="coupled",
        seeds=ints(4), positions=ints(1), full_accept_probs=True,
    )  # fmt: skip
    winners = [
        int(backend.sample(inputs["target_logits"][:, i], seeds=ints(4), positions=ints(1 + i),
                           domain=3).tokens)
        for i in range(3)
    ]  # fmt: skip
    draft = [winners[0], (winners[1] + 1) % 4, winners[2]]
    result = backend.verify(draft_tokens=torch.tensor([draft]), **inputs)
    assert result.accept_probs.tolist() == [[1, 0, 1]] and result.num_accepted.tolist() == [1]


# ---- what is not read, and what is reported -----------------------------------------------------


def coupled_inputs(**changes):
    base = dict(
        target_logits=torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)),
        draft_tokens=torch.zeros(2, 2, dtype=torch.int64),
        seeds=ints(1, 2), positions=ints(3, 4), rule="coupled",
    )  # fmt: skip
    base["draft_tokens"] = ints([4, 4], [1, 1])
    noise = dict(seeds=base["seeds"], positions=base["positions"])
    race = [
        reference.sample(base["target_logits"][:, i], **noise, draft_index=i, domain=3).tokens
        for i in range(2)
    ]
    base["draft_tokens"] = torch.stack(race, 1)  # all accepted
    return {**base, **changes}


def test_no_draft_law_is_read(backend):
    expected = backend.verify(**coupled_inputs())
    assert expected.num_accepted.tolist() == [2, 2]
    nan = torch.full((2, 2, 5), math.nan)
    for draft in (
        dict(draft_logits=nan),
        dict(draft_probs=-nan),
        dict(draft_logits=nan[0], draft_rows=torch.full((2, 2), 99)),
        dict(draft_logits=nan, draft_kinds=torch.zeros(2, 2, dtype=torch.int8)),
        dict(draft_logits=nan[..., :2], draft_token_ids=ints(-7, -7)),
    ):
        got = backend.verify(**coupled_inputs(**draft))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_law(backend, row, value):
    inputs = coupled_inputs()
    expected = backend.verify(**inputs)
    if value == -math.inf:
        inputs["target_logits"][0, row] = value
    else:
        inputs["target_logits"][0, row, 3] = value
    result = backend.verify(**inputs)
    assert result.status.tolist() == [1, 0] and result.num_accepted.tolist() == [row, 2]
    accepted = inputs["draft_tokens"][0, :row].tolist()
    assert result.tokens[0].tolist() == [*accepted, 0] + [-1] * (2 - row)
    assert torch.equal(result.tokens[1], expected.tokens[1])
    assert bool(result.logprobs[0, row:].isnan().all())
    assert bool(result.accept_probs[0, row:].isnan().all())


def test_ids_out_of_range_and_of_the_draft_alone(backend):
    inputs = coupled_inputs()
    expected = backend.verify(**inputs).tokens[0, 0]
    for token, status, ended in ((5, 2, True), (-3, 2, True), (-1, 0, True)):
        result = backend.verify(**{**inputs, "draft_tokens": ints([token, 0], [0, 0])})
        assert result.status.tolist()[0] == status and result.tokens[0, 0] == expected
        assert bool(result.accept_probs[0].isnan().all()) is ended
    # Vd > V: a legal id that the target never emits.
    wide = torch.zeros(2, 2, 8)
    result = backend.verify(**{**inputs, "draft_tokens": ints([7, 0], [0, 0])}, draft_logits=wide)
    assert result.status.tolist()[0] == 0 and result.accept_probs[0, 0] == 0
    assert result.tokens[0].tolist() == [int(expected), -1, -1]


def test_temperature_zero_is_greedy(backend):
    inputs = coupled_inputs(temperature=torch.zeros(2))
    inputs["draft_tokens"] = inputs["target_logits"].argmax(2)[:, :2]
    result = backend.verify(**inputs)
    assert torch.equal(result.tokens, inputs["target_logits"].argmax(2))
    assert bool((result.accept_probs == 1).all()) and bool((result.logprobs == 0).all())


def test_the_race_is_among_what_filters_keep(backend):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)).expand(500, 40)
    noise = dict(seeds=torch.arange(500), positions=torch.zeros(500, dtype=torch.int64))
    tokens = backend.sample(logits, **noise, domain=3, top_k=torch.full((500,), 3)).tokens
    assert set(tokens.tolist()) == set(logits[0].topk(3).indices.tolist())


def test_explained_by_an_independent_race(backend):
    # And the control: an outcome whose last token lost the race is refused.
    case = make_case(3, batch=6, gamma=3, rule="coupled", greedy_rows=False, full_accept_probs=True)
    result = backend.run(case)
    for b in range(case.batch):
        assert explain_outcome(result, case, b, backend.tolerance) == ""
    case = VerifyCase(coupled_inputs())
    result = backend.run(case)
    tokens = result.tokens.clone()
    tokens[0, 2] = (tokens[0, 2] + 1) % 5
    assert "race is won by" in explain_outcome(result._replace(tokens=tokens), case, 0)
    early = result._replace(
        tokens=torch.cat([tokens[:, :1], torch.full((2, 2), -1)], 1),
        num_accepted=torch.zeros_like(result.num_accepted),
    )
    assert "rejected" in explain_outcome(early, case, 0)


# ---- the noise ----------------------------------------------------------------------------------

# Position, seed 0, token 0: the least and the largest noise among 6e8 positions.
EXTREMES = {482_304_522: 1.4889910277549277e-10, 581_096_620: 20.434607689364881}


@pytest.mark.parametrize("position", EXTREMES)
@pytest.mark.parametrize("wins", [True, False])
def test_extreme_noise_decides_at_its_true_size(backend, position, wins):
    # Token 0 against token 1, whose weight puts it one part in a thousand on either side of a tie.
    first, second = philox_exponentials(0, position, [0, 1])
    assert first == pytest.approx(EXTREMES[position], rel=1e-12)
    ratio = first / second * (1 + 1e-3 if wins else 1 - 1e-3)  # of the weights
    logits = torch.tensor([[math.log(ratio), 0.0]], dtype=torch.float64).float()
    drawn = backend.sample(logits, seeds=ints(0), positions=ints(position), domain=3)
    assert drawn.tokens.tolist() == [0 if wins else 1]

    # The control: a lattice of 2^-24 is wrong on one side, of floor or middle points alike.
    def rounded(e, offset):
        return -math.log1p(
            -min((math.floor(-math.expm1(-e) * 2**24) + offset) * 2.0**-24, 1 - 2.0**-25)
        )

    for offset in (0.0, 0.5):
        outcomes = [
            rounded(first, offset) / (first / second * (1 + sign * 1e-3)) < rounded(second, offset)
            for sign in (1, -1)
        ]
        assert outcomes != [True, False]


def poisson_tails(count, mean):
    """Probability of a Poisson count this low, and this high."""
    count, mean = f64(count), f64(mean)
    low = torch.special.gammaincc(count + 1, mean)
    high = torch.special.gammainc(count, mean) if count > 0 else f64(1.0)
    return float(low), float(high)


def test_both_tails_of_the_noise():
    # Counts beyond each bound are binomial; Poisson's tails are larger. Power: a factor of 1.8 in a
    # tail with a mean of 64 is found with probability above .99 at 1e-9.
    count = 1 << 21
    noise = torch.cat([
        reference.race_noise(seed, 5, torch.arange(count // 4)) for seed in range(4)
    ])  # fmt: skip
    assert bool((noise > 0).all()) and len(noise.unique()) == count
    for k in range(4, 16):
        share = 2.0**-k
        below = int((noise < -math.log1p(-share)).sum())
        above = int((noise > -math.log(share)).sum())
        for found in (below, above):
            assert min(poisson_tails(found, count * share)) > ALPHA
    # The control: uniforms of 24 bits, as float32 generators give them, repeat and reach zero.
    lattice = (-torch.expm1(-noise) * 2**24).floor() * 2.0**-24
    assert len(lattice.unique()) < 0.95 * count
    assert -math.log1p(-(1 - 2.0**-24)) < 16.7 < float(max(EXTREMES.values()))


def test_fresh_seeds_where_none_are_given():
    torch.manual_seed(1)
    target, tokens = torch.zeros(3, 3, 500), torch.zeros(3, 2, dtype=torch.int64)
    first = specdec_ext.verify(target, tokens, rule="coupled").tokens
    assert not torch.equal(first, specdec_ext.verify(target, tokens, rule="coupled").tokens)
