"""The host's search structures against brute force, on hostile texts, and what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_ext._host import CopyReader, InputMatcher, SuffixTrie

FEW = st.integers(0, 2)
ANY = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.lists(FEW, max_size=40) | st.lists(ANY, max_size=40)


class PlainTrie:
    """What `SuffixTrie` is to do, in plain Python: every piece of a text with its own count."""

    def __init__(self, max_match):
        self.max_match, self.open, self.texts = max_match, 0, {0: []}
        self.count, self.newest = {}, {}

    def append(self, tokens):
        text = self.texts[self.open]
        for token in tokens:
            text.append(token)
            for length in range(1, min(self.max_match + 1, len(text)) + 1):
                piece = tuple(text[len(text) - length :])
                self.count[piece] = self.count.get(piece, 0) + 1
                self.newest[piece] = self.open + len(text) - 1

    def close(self):
        closed = self.open
        self.open += len(self.texts[closed]) + 1
        self.texts[self.open] = []
        return closed

    def drop(self, number):
        text = self.texts.pop(number)
        for begin in range(len(text)):
            for end in range(begin + 1, min(len(text), begin + self.max_match + 1) + 1):
                piece = tuple(text[begin:end])
                self.count[piece] -= 1
                if not self.count[piece]:
                    del self.count[piece], self.newest[piece]

    def followers(self, context):
        """(count, newest, token) of what followed: the most frequent first, then the newest."""
        found = [
            (count, self.newest[piece], piece[-1])
            for piece, count in self.count.items()
            if piece[:-1] == tuple(context)
        ]
        return sorted(found, reverse=True)

    def grow(self, context, *, nodes, depth, breadth, min_match, least, any_length):
        best = None
        for match in range(min(self.max_match, len(context)), min_match - 1, -1):
            if not self.followers(context[len(context) - match :]):
                continue
            found = self.behind(
                context[len(context) - match :], nodes, depth, breadth, min_match, least
            )
            if best is None or found[0] > best[0]:
                best = found
            if not any_length:
                break
        return best or (0, [], [])

    def behind(self, context, nodes, depth, breadth, min_match, least):
        """The sum of survivals, and of each node, level by level, path and survival."""
        waiting, chosen, offered = [], [], 0

        def offer(path, agreed, before):
            nonlocal offered
            text = [*context, *path]
            window = min(agreed, self.max_match)
            while not (found := self.followers(text[len(text) - window :])) and window > min_match:
                agreed = window = window - 1
            total = sum(count for count, _, _ in found)
            for count, newest, token in found[:breadth]:
                survival = before * (agreed**2 / (agreed**2 + 2)) * (count / total)
                if survival >= least:
                    child = ((*path, token), agreed + 1, survival, newest)
                    waiting.append((-survival, offered, child))
                    offered += 1

        if depth:
            offer((), len(context), 1.0)
        while waiting and len(chosen) < nodes:
            waiting.sort()
            path, agreed, survival, newest = waiting.pop(0)[2]
            chosen.append((path, survival, newest))
            if len(path) < depth:
                offer(path, agreed, survival)
        level, ordered = [()], []
        while level:
            level = [
                node for parent in level for node in (n for n, *_ in chosen) if node[:-1] == parent
            ]
            ordered += level
        survivals = {path: survival for path, survival, _ in chosen}
        total = 0.0
        for path in ordered:
            total += survivals[path]
        return total, ordered, [survivals[path] for path in ordered], chosen


class PlainCopies:
    """What `CopyReader` is, by its definition and without any index."""

    def __init__(self, prompt):
        self.text, self.inputs, self.anchor = list(prompt), len(prompt), 0

    def append(self, tokens):
        for token in tokens:
            self.text.append(token)
            match, source = self.source()
            if match >= 2:
                self.anchor = source

    def source(self):
        """The length of the longest suffix that occurred before, and the place to copy."""
        n = len(self.text)
        for match in range(n - 1, 0, -1):
            found = [i for i in range(match, n) if self.text[i - match : i] == self.text[-match:]]
            ahead = [i for i in found if self.anchor <= i < self.inputs]
            if found:
                return match, (ahead or found[-1:])[0]
        return 0, -1

    def copy(self, most, min_match, least):
        match, place = self.source()
        text, survival, survivals = list(self.text), 1.0, []
        for i in range(most if match >= max(min_match, 1) else 0):
            survival *= (match + i) ** 2 / ((match + i) ** 2 + 2)
            if survival < least:
                break
            text.append(text[place + i])
            survivals.append(survival)
        return text[len(self.text) :], survivals


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=5),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.15, 0.5]),
)
@settings(max_examples=300, deadline=None)
def test_copies_in_reading_order_equal_plain_python(prompt, parts, min_match, least):
    reader, plain = CopyReader(), PlainCopies(prompt)
    reader.append_input(prompt)
    for part in [[], *parts]:
        reader.append(part)
        plain.append(part)
        assert (reader.match_length, reader.source) == plain.source()
        found = reader.copy(most=7, min_match=min_match, least=least)
        assert (found.tokens, found.survivals) == plain.copy(7, min_match, least)
        assert found.parents == list(range(-1, len(found.tokens) - 1))
        assert found.expected == pytest.approx(sum(found.survivals))
    assert len(reader) == len(plain.text)


def text_of(trie, place):
    return next((n for n, text in trie.texts.items() if n <= place < n + len(text)), -1)


STEPS = st.lists(
    st.tuples(st.just("append"), st.lists(FEW, max_size=12) | st.lists(ANY, max_size=4))
    | st.tuples(st.just("close"), st.none())
    | st.tuples(st.just("drop"), st.integers(0, 9)),
    max_size=12,
)


@given(
    STEPS, st.lists(FEW, max_size=7), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9),
    st.integers(0, 5), st.integers(1, 3), st.sampled_from([0.0, 0.2, 0.5]), st.booleans(),
)  # fmt: skip
def test_growth_equals_plain_python(
    steps, context, max_match, min_match, nodes, depth, breadth, least, any_length
):
    """Any texts appended, closed and dropped: counts, order, survivals and shape."""
    trie, plain, closed = SuffixTrie(max_match), PlainTrie(max_match), []
    for what, value in steps:
        if what == "append":
            trie.append(value)
            plain.append(value)
        elif what == "close":
            closed.append(plain.close())
            assert trie.close() == closed[-1]
        elif closed:
            number = closed.pop(value % len(closed))
            trie.drop(number)
            plain.drop(number)
    assert len(trie) == sum(map(len, plain.texts.values()))
    assert trie.nodes <= 1 + len(plain.count)
    how = {
        "nodes": nodes, "depth": depth, "breadth": breadth, "min_match": min_match, "least": least,
        "any_length": any_length,
    }  # fmt: skip
    for end in (context, plain.texts[plain.open][-7:]):
        found, expected = trie.grow(end, **how), plain.grow(end, **how)
        paths = []
        for token, parent in zip(found.tokens, found.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert paths == expected[1] and found.survivals == expected[2]
        assert found.expected == expected[0]
        first = [newest for path, _, newest in (expected[3] if paths else []) if path == paths[0]]
        assert found.text == (text_of(plain, first[0]) if paths else -1)


@given(st.lists(st.lists(FEW, max_size=20), max_size=6), st.integers(1, 6), st.randoms())
def test_dropped_texts_leave_nothing(texts, max_match, random):
    trie, numbers = SuffixTrie(max_match), []
    for text in texts:
        trie.append(text)
        numbers.append(trie.close())
    random.shuffle(numbers)
    for number in numbers:
        trie.drop(number)
    assert len(trie) == 0 and trie.nodes == 1


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
    """The bounds of suffix_trie.h, and of suffix_automaton.h: 7 to append, 2 to follow."""
    for n in (2_000, 20_000):
        text = HOSTILE[kind](n)
        for max_match in (1, 16):
            trie = SuffixTrie(max_match)
            trie.append(text)
            assert trie.visits <= (max_match + 1) * len(text)
            assert trie.nodes <= 1 + (max_match + 2) * len(text)
            built = trie.visits
            trie.drop(trie.close())
            assert trie.visits - built <= (2 * max_match + 3) * len(text) and trie.nodes == 1
        matcher = InputMatcher(text)
        assert matcher.visits <= 7 * len(text)
        built = matcher.visits
        matcher.append(text[::-1] + text)
        assert matcher.visits - built <= 2 * 2 * len(text)


def test_an_unbounded_context_would_cost_more():
    """Control of the bound: contexts of all lengths make one token's text quadratic."""
    trie = SuffixTrie(1000)
    trie.append([0] * 2_000)
    assert trie.visits > 500 * 2_000


def test_arguments():
    for max_match in (0, -3, 1025):
        with pytest.raises(ValueError, match=rf"max_match must be in \[1, 1024\], got {max_match}"):
            SuffixTrie(max_match)
    trie = SuffixTrie(4)
    how = {"nodes": 3, "depth": 3, "breadth": 1, "least": 0.0, "any_length": False}
    assert trie.grow([], min_match=1, **how).tokens == []
    for wrong in ([2**63], [1.5], ["a"], None, 3):
        with pytest.raises(TypeError):
            trie.append(wrong)
        with pytest.raises(TypeError):
            trie.grow(wrong, min_match=1, **how)
        with pytest.raises(TypeError):
            InputMatcher(wrong)
    trie.append([5, 6, 5])
    assert len(trie) == 3
    for name in ("nodes", "depth", "breadth"):
        assert trie.grow([5], min_match=1, **{**how, name: -1}).tokens == []
    assert trie.grow([5], min_match=-5, **how).tokens == [6, 5, 6]  # no match is never copied
    for number in (0, 1, -1):  # the one that grows, and none
        with pytest.raises(ValueError, match=f"closed and not dropped, got {number}"):
            trie.drop(number)
    number = trie.close()
    trie.drop(number)
    with pytest.raises(ValueError, match=f"closed and not dropped, got {number}"):
        trie.drop(number)
    assert InputMatcher([]).unique_end == -1
