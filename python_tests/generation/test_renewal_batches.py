"""The renewal rule in batches, which are ready when their slowest request is."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from test_renewal import MIXED

from specdec_ext.decoding import RenewalRule
from specdec_ext.decoding.calibration import BatchTimes
from specdec_ext.decoding.progress import step_gains

#: Options with which all tokens count alike: the control.
ALIKE = {"ahead": math.inf}

# Milliseconds of a round of four requests by the longest draft: SmolLM2's with packed weights, on
# two cores.
OF_FOUR = (98, 130, 132, 135, 150, 163, 175, 180, 236, 243, 250, 264, 277, 290, 300, 305, 310)

#: Given the policy, what the running requests are, and a generator: what each drafts, and the
#: milliseconds that this takes.
Draft = Callable[[RenewalRule, list[Any], random.Random], tuple[list[int], float]]


def copies(policy: RenewalRule, going: list[str], rng: random.Random) -> tuple[list[int], float]:
    """Draft as a drafter does that estimates its tokens' chances and takes no time."""
    said = [
        [MIXED[kind][2]] * rng.randint(2, 10) if rng.random() < MIXED[kind][0] else []
        for kind in going
    ]
    policy.lengths()
    return policy.keep(said), 0.0


def samples(policy: RenewalRule, going: list[float], rng: random.Random) -> tuple[list[int], float]:
    """Draft as a model does, whose calls take 7 each."""
    lengths = policy.lengths()
    return lengths, 7.0 * max(lengths)


def factor(
    draft: Draft, requests: list[Any], rates: list[float], seed: int, options: dict[str, float]
) -> float:
    """Decode texts of 96 tokens side by side; return plain decoding's time over theirs.

    Their draft tokens are accepted at these rates. The first batches are practice.
    """
    now, rng = [0.0], random.Random(seed)
    policy = RenewalRule(16, clock=lambda: now[0], **options)
    for _ in range(4):
        policy.start(len(requests))
        going, tokens, begun = [*range(len(requests))], [0] * len(requests), now[0]
        while going:
            running = [requests[b] for b in going]
            drafted, spent = draft(policy, running, rng)
            now[0] += spent + OF_FOUR[max(drafted)] * (1 + rng.gauss(0, 0.03))
            accepted = [
                next((j for j in range(n) if rng.random() >= rates[b]), n)
                for b, n in zip(going, drafted, strict=True)
            ]
            policy.commit(drafted, accepted)
            for b, taken in zip(going, accepted, strict=True):
                tokens[b] += taken + 1
            left = [i for i, b in enumerate(going) if tokens[b] < 96]
            if len(left) < len(going):
                going = [going[i] for i in left]
                policy.select(left)
    return 96 * OF_FOUR[0] / (now[0] - begun)


def of_kinds(kinds: list[str], seed: int, options: dict[str, float]) -> float:
    return factor(copies, kinds, [MIXED[kind][1] for kind in kinds], seed, options)


def of_rates(rates: list[float], seed: int, options: dict[str, float]) -> float:
    return factor(samples, rates, rates, seed, options)


@pytest.mark.parametrize("options, waits", [({}, False), (ALIKE, True)])
def test_a_batch_does_not_wait_for_copies_of_one_request(options, waits):
    """Three texts with nothing to copy, and one whose copies save the batch no time."""
    mixed = [of_kinds(["copies", "free", "free", "free"], seed, options) for seed in range(6)]
    assert (statistics.mean(mixed) < 0.95) == waits  # 0.98; where all count alike 0.93
    alike = [of_kinds(["copies"] * 4, seed, options) for seed in range(3)]
    assert statistics.mean(alike) > 1.2


@pytest.mark.parametrize("options, waits", [({}, False), (ALIKE, True)])
def test_a_batch_does_not_wait_for_drafts_that_suit_others(options, waits):
    """Three texts that a draft model suits, and the one that is last whatever they draft."""
    mixed = [of_rates([0.7, 0.7, 0.7, 0.2], seed, options) for seed in range(6)]
    assert (statistics.mean(mixed) < 0.92) == waits  # 0.96; where all count alike 0.85
    alike = [of_rates([0.8] * 4, seed, options) for seed in range(3)]
    assert statistics.mean(alike) > 1.4


def rounds_of(line: dict[int, float], batch: int, **options: float) -> RenewalRule:
    """Make a rule that knows what rounds of such drafts take, at the beginning of a generation."""
    policy = RenewalRule(16, clock=lambda: 0.0, **options)
    policy.start(batch)
    for n in 30 * [*line]:
        policy.kept_drafts.times.observe(n, line[n])
    policy.lengths()
    return policy


def test_a_draft_counts_for_less_where_its_request_is_ahead():
    """Seven tokens ahead: 0.18 of a mean token's worth, and 1.82 of it for the other request."""
    for drafts, kept in ((([0.9] * 2, []), [0, 0]), (([], [0.9] * 2), [0, 2])):
        policy = rounds_of({0: 1.0, 1: 1.1, 2: 1.15}, 2)
        assert policy.keep([[0.99] * 7, []]) == [7, 0]  # both have come as far
        policy.commit([7, 0], [7, 0])
        policy.lengths()
        assert policy.keep(drafts) == kept


@pytest.mark.parametrize("options, kept", [({}, 5), (ALIKE, 12)])
def test_the_later_tokens_of_one_copy_count_for_less(options, kept):
    """A token costs 0.2 tokens of the batch, and the sixth of one request counts exp(-5 / 3)."""
    line = {n: 1 + 0.05 * n for n in (0, 1, 4, 12)}
    assert rounds_of(line, 4, **options).keep([[0.999] * 12, [], [], []]) == [kept, 0, 0, 0]
    assert rounds_of(line, 4, **options).keep([[0.999] * 12] * 4) == [12] * 4  # nobody gets ahead
    assert rounds_of(line, 1, **options).keep([[0.999] * 12]) == [12]


def run(policy: RenewalRule, batch: int, dearer: float, rounds: int) -> None:
    """Let so many rounds go by, in which a draft token adds this share to a plain round's time."""
    policy.start(batch)
    times = policy.kept_drafts.times
    for n in range(rounds):
        times.observe(n % 3, 1 + dearer * (n % 3))


def test_what_single_requests_taught_is_not_believed_of_a_batch():
    """A draft token costs one request nothing, and four a fifth of a round."""
    policy, drafts = RenewalRule(16, clock=lambda: 0.0), [[0.5, 0.5]] * 4
    run(policy, 1, 0.0, 90)
    run(policy, 4, 0.2, 30)
    assert policy.kept_drafts.times.relative(2) == pytest.approx(1.4)
    policy.lengths()
    assert policy.keep(drafts) == [1] * 4
    policy.select([2])  # and a single request is not held to what four have cost
    assert policy.kept_drafts.times.relative(2) == pytest.approx(1.0, abs=0.01)
    policy.lengths()
    assert policy.keep(drafts[:1]) == [2]
    policy.start(4)
    policy.lengths()
    assert policy.keep(drafts) == [1] * 4


def test_batches_of_about_a_size_share_what_rounds_take():
    batches = BatchTimes(c=0.4)
    alike = [[1], [2], [3], [4], [5], [6], [7], [8, 9], [10, 11], [14, 15], [28, 31], [32, 39]]
    for sizes in alike:
        assert len({id(batches.of(size)) for size in sizes}) == 1
    assert len({id(batches.of(sizes[0])) for sizes in alike}) == len(alike)
    assert batches.of(64).c == 0.4


def test_a_batch_size_begins_with_what_is_known_of_the_nearest():
    """And learns within a few rounds where that is wrong, but for what it has not seen itself."""
    batches = BatchTimes(c=0.4)
    for size, dearer in ((2, 0.0), (16, 0.3)):
        for n in range(90):
            batches.of(size).observe(n % 3, 1 + dearer * (n % 3))
    first = batches.of(12)
    assert first.relative(2) == pytest.approx(1.6) and first.c == pytest.approx(0.3)
    assert first.plain_seen and first.evidence == batches.of(16).evidence
    for n in range(15):
        first.observe(n % 3, 1 + 0.1 * (n % 3))
    assert first.relative(2) == pytest.approx(1.2) and batches.of(16).relative(2) > 1.59
    assert batches.of(3).relative(2) == pytest.approx(1.0, abs=0.01)


def test_a_new_batch_size_goes_on_believing_how_much_shorter_plain_rounds_are():
    """A round that drafts takes 1.4 plain ones and a tenth of that for each token."""
    batches = BatchTimes(c=0.4)
    for n in range(200):
        batches.of(4).observe(n % 5, 1.4 + 0.14 * (n % 5) if n % 5 else 1.0)
    new = batches.of(3)
    for n in (0, 0, 7):  # it has not seen this length before, and nothing to compare it with
        new.part()
        new.observe(n, 2.38 if n else 1.0)
        assert new.setup == pytest.approx(1.4, rel=0.02)
    assert new.relative(6) == pytest.approx(1.4 * 1.6, rel=0.05)


def test_a_rule_that_has_not_begun_knows_nothing_of_any_size():
    """As far from 4 as 1 is, 2 begins with what is known."""
    policy = RenewalRule(16, c=0.9, clock=lambda: 0.0)
    assert policy.times.c == 0.9
    run(policy, 4, 0.2, 90)
    policy.select([0, 3])
    assert policy.kept_drafts.times.relative(2) == pytest.approx(1.4, abs=0.01)


def test_steps_of_requests_that_keep_pace_count_in_full():
    chances = [0.9, 0.8, 0.7]
    alike = step_gains([chances] * 3, [1.0] * 3, 3.0)
    assert alike[0] == pytest.approx(2.7)
    # Who has one token accepted is not ahead where 1.7 of the others' two can be expected to be.
    assert alike[1] == pytest.approx(2.4)
    # A step later 2 are, where the others can be expected to have added 0.3 and 0.5.
    mixed = step_gains([[1.0] * 3, [0.3], [0.5]], [0.5, 1.0, 1.5], 3.0)
    assert mixed[2] == pytest.approx(0.5 * math.exp(-(2 - 0.4) / 3.0))
    assert step_gains([], [], 3.0) == [] and step_gains([[], []], [1.0, 1.0], 3.0) == []
