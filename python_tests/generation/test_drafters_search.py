"""The host's search structures against brute force, on hostile texts, and what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_ext._host import InputMatcher, RepeatFinder

FEW = st.integers(0, 2)
ANY = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.lists(FEW, max_size=40) | st.lists(ANY, max_size=40)


def latest_repeat(text: list[int], max_match: int) -> tuple[int, int]:
    """The longest suffix that occurs earlier, of max_match tokens at most, and its last end."""
    for length in range(min(max_match, len(text) - 1), 0, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                return length, end
    return 0, -1


def copied(text: list[int], end: int, count: int) -> list[int]:
    text = list(text)
    start = len(text)
    for i in range(count):
        text.append(text[end + 1 + i])
    return text[start:]


@given(TEXTS, st.integers(1, 6) | st.just(100), st.integers(0, 5))
def test_repeats_equal_brute_force(text, max_match, count):
    finder = RepeatFinder(max_match)
    for n in range(len(text)):
        finder.append(text[n : n + 1])
        length, end = latest_repeat(text[: n + 1], max_match)
        assert (finder.match_length, finder.match_end) == (length, end)
        expected = copied(text[: n + 1], end, count) if length else []
        assert finder.continuation(count, 1) == expected
        assert finder.continuation(count, length + 1) == []
    at_once = RepeatFinder(max_match)
    at_once.append(text)
    assert len(at_once) == len(finder) == len(text)
    assert (at_once.match_length, at_once.match_end) == latest_repeat(text, max_match)


@given(TEXTS, TEXTS)
def test_matches_equal_brute_force(text, output):
    """Also: some suffix occurs exactly once if and only if the longest that occurs at all does."""
    matcher = InputMatcher(text)
    for n in range(len(output)):
        matcher.append(output[n : n + 1])
        ends: dict[int, list[int]] = {}
        for length in range(1, n + 2):
            suffix = output[n + 1 - length : n + 1]
            ends[length] = [
                e for e in range(length - 1, len(text)) if text[e - length + 1 : e + 1] == suffix
            ]
        assert matcher.match_length == max((k for k, found in ends.items() if found), default=0)
        once = {found[0] for found in ends.values() if len(found) == 1}
        assert len(once) <= 1
        assert matcher.unique_end == (once.pop() if once else -1)


def fibonacci(n: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


def pseudo_random(n: int, vocabulary: int) -> list[int]:
    state, text = 1, []
    for _ in range(n):
        state = state * 6364136223846793005 + 1442695040888963407 & 2**64 - 1
        text.append((state >> 33) % vocabulary)
    return text


HOSTILE = {
    "one token": lambda n: [0] * n,
    "no token twice": lambda n: list(range(n)),
    "ids that share their low bits": lambda n: [(i % 997) << 48 for i in range(n)],
    "a period and a break": lambda n: ([0] * 300 + [1]) * (n // 301),
    "periods that grow": lambda n: sum(([0] * i + [1] for i in range(int((2 * n) ** 0.5))), []),
    "halves": lambda n: [0] * (n // 2) + [1] + [0] * (n // 2),
    "Fibonacci": fibonacci,
    "coins": lambda n: pseudo_random(n, 2),
    "words": lambda n: pseudo_random(n, 300),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_visits_are_bounded_by_a_constant_a_token(kind):
    """The bound of suffix_automaton.h: 7 to append, 2 to follow, 2 to shorten, max_match labels."""
    for n in (2_000, 20_000):
        text = HOSTILE[kind](n)
        for max_match in (1, 16):
            finder = RepeatFinder(max_match)
            finder.append(text)
            assert finder.visits <= (11 + max_match) * len(text)
        matcher = InputMatcher(text)
        assert matcher.visits <= 7 * len(text)
        built = matcher.visits
        matcher.append(text[::-1] + text)
        assert matcher.visits - built <= 2 * 2 * len(text)


def test_an_unbounded_match_would_cost_more():
    """Control of the bound: labels of all lengths make one token's text quadratic."""
    finder = RepeatFinder(2_000)
    finder.append([0] * 2_000)
    assert finder.visits > 500 * 2_000


def test_arguments():
    for max_match in (0, -3):
        with pytest.raises(ValueError, match=f"max_match must be at least 1, got {max_match}"):
            RepeatFinder(max_match)
    finder = RepeatFinder(4)
    assert finder.continuation(3, 1) == [] and (finder.match_length, finder.match_end) == (0, -1)
    for wrong in ([2**63], [1.5], ["a"], None, 3):
        with pytest.raises(TypeError):
            finder.append(wrong)
        with pytest.raises(TypeError):
            InputMatcher(wrong)
    finder.append([5, 6, 5])
    assert len(finder) == 3
    assert finder.continuation(-1, 1) == [] and finder.continuation(0, 1) == []
    assert finder.continuation(3, -5) == [6, 5, 6]  # no match is never copied, whatever min_match
    assert InputMatcher([]).unique_end == -1
