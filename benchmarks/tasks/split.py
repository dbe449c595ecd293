"""Training, validation and test, divided by document."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator

from tasks.records import Record, same_text

TRAIN, VALID, TEST = SPLITS = ("train", "valid", "test")
# Of 1,000 documents.
_TEST, _VALID = 30, 20


def split_of(document: str) -> str:
    """Say where a document belongs: a function of its name alone.

    Another source, task or version of a package moves no document.
    """
    place = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % 1000
    return TEST if place < _TEST else VALID if place < _TEST + _VALID else TRAIN


def distinct(records: Iterable[Record], repeated: Counter[str]) -> Iterator[Record]:
    """Yield each pair of texts once, the first time that it comes; count the others by origin."""
    seen: set[bytes] = set()
    for record in records:
        pair = same_text(record.source) + "\0" + same_text(record.target)
        key = hashlib.blake2b(pair.encode(), digest_size=16).digest()
        if key in seen:
            repeated[record.origin] += 1
        else:
            seen.add(key)
            yield record


def divide(records: Iterable[Record], leaked: Counter[str]) -> dict[str, list[Record]]:
    """Divide distinct records by their documents.

    A held-out record is left out, and counted by its origin, where its source or its target is
    also in training, or in test too where it is for validation: other documents say it as well.
    """
    found: dict[str, list[Record]] = {name: [] for name in SPLITS}
    for record in records:
        found[split_of(record.document)].append(record)
    seen = _texts(found[TRAIN])
    for name in (TEST, VALID):
        kept = []
        for record in found[name]:
            if seen.isdisjoint((same_text(record.source), same_text(record.target))):
                kept.append(record)
            else:
                leaked[record.origin] += 1
        found[name] = kept
        seen |= _texts(kept)
    return found


def _texts(records: Iterable[Record]) -> set[str]:
    return {same_text(text) for record in records for text in (record.source, record.target)}
