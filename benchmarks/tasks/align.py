"""Pairs out of a document and its translation, block by block, where their structures agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Block(NamedTuple):
    """A paragraph, heading, ...: what kind it is, and its text on one line."""

    kind: str
    text: str
    is_heading: bool = False


def aligned(ours: Sequence[Block], theirs: Sequence[Block]) -> Iterator[tuple[str, str]]:
    """Yield the texts that stand at the same place of both documents.

    The kinds of blocks must be the same in the same order: in the whole document, or else, where
    both have as many headings, in a section. Other sections yield nothing: nothing says there
    which block translates which.
    """
    if _kinds(ours) == _kinds(theirs):
        sections = [(ours, theirs)]
    else:
        left, right = _sections(ours), _sections(theirs)
        sections = list(zip(left, right, strict=True)) if len(left) == len(right) else []
    for one, other in sections:
        if _kinds(one) == _kinds(other):
            for mine, yours in zip(one, other, strict=True):
                yield mine.text, yours.text


def _kinds(blocks: Sequence[Block]) -> list[str]:
    return [block.kind for block in blocks]


def _sections(blocks: Sequence[Block]) -> list[list[Block]]:
    found: list[list[Block]] = [[]]
    for block in blocks:
        if block.is_heading:
            found.append([])
        found[-1].append(block)
    return found
