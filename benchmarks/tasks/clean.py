"""What makes a record worth keeping: for each task its rules, and the name of the first broken."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from tasks.records import CORRECTION, SUMMARISATION, TRANSLATION, Record, same_text

MOST_WORDS = 200  # of a text, where a person reads words
MOST_CHARACTERS = 1600  # of a text to summarise
# Lengths in characters of a translation and its source, both with EASE added for short texts.
LENGTH_RATIO = (0.5, 2.0)
EASE = 15

# What a program fills in or a browser reads: it has to be in both texts.
_PLACEHOLDER = re.compile(
    r"%\(\w+\)[a-z]|%\d+(?:\$[a-z])?|%[A-Z_]{3,}|%[sdif]\b|\{\{?[\w.]*\}?\}|\$\(\w+\)|\$\w+\$?"
    r"|\[%\w+\]|</?[a-zA-Z][^<>]*>|https?://[^\s<>)\"]+"
)
_LETTERS = re.compile(r"[^\W\d_]")


def placeholders(text: str) -> list[str]:
    """Return what must stay as it is, in an order of its own. Of addresses only the protocol."""
    found = _PLACEHOLDER.findall(text)
    return sorted("://" if "://" in one else one for one in found)


def numbers(text: str) -> list[str]:
    """Return the runs of digits: "1,000.5" and "1.000,5" have the same."""
    return sorted(re.findall(r"\d+", text))


def word_count(text: str) -> int:
    """Count the words as white space divides them."""
    return len(text.split())


def _ratio_fits(record: Record) -> bool:
    ratio = (len(record.target) + EASE) / (len(record.source) + EASE)
    return LENGTH_RATIO[0] <= ratio <= LENGTH_RATIO[1]


def _is_translated(record: Record) -> bool:
    """Whether a text was changed, and of a longer one at least three words in ten."""
    source, target = same_text(record.source), same_text(record.target)
    words, known = target.split(), set(source.split())
    return source != target and (
        len(words) < 6 or sum(word in known for word in words) <= 0.7 * len(words)
    )


def _has_words(text: str) -> bool:
    """Whether letters are the larger part of what is not space."""
    return 2 * len(_LETTERS.findall(text)) > len("".join(text.split()))


Rule = Callable[[Record], bool]
_EMPTY: tuple[str, Rule] = ("empty", lambda r: bool(r.source.strip() and r.target.strip()))
_READABLE: tuple[str, Rule] = (
    "unreadable characters",
    lambda r: not re.search("[\x00-\x08\x0b-\x1f\ufffd]", r.source + r.target),
)

RULES: dict[str, tuple[tuple[str, Rule], ...]] = {
    TRANSLATION: (
        _EMPTY,
        _READABLE,
        ("not translated", _is_translated),
        ("no words", lambda r: _has_words(r.source) and _has_words(r.target)),
        ("too long", lambda r: max(word_count(r.source), word_count(r.target)) <= MOST_WORDS),
        ("length ratio", _ratio_fits),
        ("numbers differ", lambda r: numbers(r.source) == numbers(r.target)),
        ("placeholders differ", lambda r: placeholders(r.source) == placeholders(r.target)),
    ),
    SUMMARISATION: (
        _EMPTY,
        _READABLE,
        ("no words", lambda r: _has_words(r.target)),
        ("summary too short", lambda r: word_count(r.target) >= 3),
        ("summary too long", lambda r: word_count(r.target) <= 40),
        ("too long", lambda r: len(r.source) <= MOST_CHARACTERS),
        ("no shorter than the source", lambda r: len(r.target) < 0.8 * len(r.source)),
    ),
    CORRECTION: (
        _EMPTY,
        _READABLE,
        ("nothing to correct", lambda r: r.source != r.target),
        ("not 4 to 60 words", lambda r: 4 <= word_count(r.target) <= 60),
        ("no words", lambda r: _has_words(r.target)),
        # A sentence: lists of options and code are left to the other tasks.
        ("no sentence", lambda r: r.target[0].isupper() and r.target[-1] in ".!?"),
    ),
}


def fault(task: str, record: Record) -> str | None:
    """Name the first rule of a task that a record breaks, or None."""
    return next((name for name, keeps in RULES[task] if not keeps(record)), None)


def cleaned(task: str, records: Iterable[Record], dropped: Counter[str]) -> Iterator[Record]:
    """Yield the records that break no rule; count the others by the rule."""
    for record in records:
        why = fault(task, record)
        if why is None:
            yield record
        else:
            dropped[why] += 1
