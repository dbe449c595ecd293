"""Sentences with misspellings that people make, to be corrected: codespell's list, backwards."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping

_WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)?")
# Of the words that have a known misspelling, about how many are misspelt.
SHARE = 0.15


def read_list(text: str) -> dict[str, str]:
    """Return misspelling to correction, of those with one correction only.

    Lines are ``wrong->right``, or ``wrong->right, other,`` where only a person can choose.
    """
    found = {}
    for line in text.splitlines():
        wrong, _, right = line.strip().partition("->")
        if right and "," not in right and _WORD.fullmatch(wrong) and _WORD.fullmatch(right):
            found[wrong.lower()] = right.lower()
    return found


def listed(text: str) -> set[str]:
    """Return every misspelling of the list, those with several corrections too."""
    return {line.partition("->")[0].strip().lower() for line in text.splitlines() if "->" in line}


def backwards(corrections: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each correct word's misspellings, in the order of the alphabet."""
    found: dict[str, list[str]] = {}
    for wrong in sorted(corrections):
        found.setdefault(corrections[wrong], []).append(wrong)
    return found


def words(text: str) -> list[str]:
    """Return the words of a text, in small letters."""
    return [word.lower() for word in _WORD.findall(text)]


def corrupt(sentence: str, misspellings: Mapping[str, list[str]]) -> str:
    """Misspell some words of a sentence, at least one where one is known; letters keep their case.

    The choice is a function of the sentence alone.
    """
    seed = hashlib.sha256(sentence.encode()).digest()
    draw = random.Random(int.from_bytes(seed[:8], "big"))
    places = [place for place in _WORD.finditer(sentence) if place[0].lower() in misspellings]
    if not places:
        return sentence
    chosen = [place for place in places if draw.random() < SHARE] or [draw.choice(places)]
    for place in reversed(chosen):
        wrong = _cased_as(place[0], draw.choice(misspellings[place[0].lower()]))
        sentence = sentence[: place.start()] + wrong + sentence[place.end() :]
    return sentence


def _cased_as(word: str, other: str) -> str:
    if word.isupper() and len(word) > 1:
        return other.upper()
    return other[:1].upper() + other[1:] if word[:1].isupper() else other


def corrupted(
    texts: Iterable[str], misspellings: Mapping[str, list[str]], known: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield misspelt and correct sentence, of those that are correct and can be misspelt.

    Parameters
    ----------
    texts : iterable of str
        Sentences.
    misspellings : mapping
        What `backwards` returns.
    known : set of str
        What `listed` returns: a sentence with one of these is not taken for correct.
    """
    for text in texts:
        if known.isdisjoint(words(text)):
            wrong = corrupt(text, misspellings)
            if wrong != text:
                yield wrong, text
