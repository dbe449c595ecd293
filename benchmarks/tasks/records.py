"""What every reader yields, and the licences that a shipped model may have learned from."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

TRANSLATION, SUMMARISATION, CORRECTION = TASKS = ("translation", "summarisation", "correction")

# Weights that are shipped are trained on these alone. PSF-2.0 is the standard library's, which the
# shipped pair of models has learned from already.
PERMISSIVE = frozenset({"Apache-2.0", "BSD-3-Clause", "MPL-2.0", "PSF-2.0"})


class SourceError(RuntimeError):
    """A source cannot be had here; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Record:
    """One example: a source text, the text wanted for it, and where both come from.

    A ``document`` is what its author wrote as one: a page, a module, a dialog, all packages of one
    Debian source. It is never divided between training and test.
    """

    source: str
    target: str
    document: str
    origin: str
    licence: str

    @property
    def permissive(self) -> bool:
        """Whether a shipped model may have learned from it."""
        return set(self.licence.split(" AND ")) <= PERMISSIVE


def one_line(text: str) -> str:
    """Return a text with each run of white space as one space; soft hyphens are left out."""
    return " ".join(text.replace("\u00ad", "").split())


def same_text(text: str) -> str:
    """Return what two texts have in common that differ in case and white space only."""
    return one_line(unicodedata.normalize("NFKC", text)).casefold()


_SENTENCE_END = re.compile(r"(?<=[a-zäöüß0-9)\"'»“][.!?])\s+(?=[A-ZÄÖÜ\"'„»])")
_ABBREVIATION = re.compile(
    # One letter ends "e.g." and "z. B.", a digit a German ordinal.
    r"(?:\b(?:etc|vs|cf|approx|bzw|usw|ca|Nr|evtl|ggf|vgl|Abb|Dr|[a-z])|\d)\.$"
)


def sentences(text: str) -> list[str]:
    """Split English or German prose at the ends of its sentences."""
    found: list[str] = []
    for piece in _SENTENCE_END.split(text):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += " " + piece
        else:
            found.append(piece)
    return found
