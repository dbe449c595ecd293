"""Debian's package descriptions: in English and German, and long beside short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tasks.records import one_line, sentences

Entry = Mapping[str, str]


def source_packages(packages: Iterable[Entry]) -> dict[str, str]:
    """Return the source that each package is built from, out of the list ``Packages``."""
    return {
        entry["Package"]: entry.get("Source", entry["Package"]).partition(" ")[0]
        for entry in packages
    }


def split_description(description: str) -> tuple[str, list[str]]:
    """Return a description's short line and its paragraphs, each on one line.

    Lists and examples, which are indented, are paragraphs line by line.
    """
    short, *lines = description.split("\n")
    found: list[str] = []
    is_open = False
    for line in lines:
        if line.strip() in ("", "."):
            is_open = False
        elif line[:1].isspace() or line.startswith(("* ", "- ")) or not is_open:
            found.append(line)
            is_open = not line[:1].isspace()
        else:
            found[-1] += " " + line
    return one_line(short), [one_line(text) for text in found]


def translations(
    english: Iterable[Entry], german: Iterable[Entry], sources: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield package source, English and German text of each sentence that can be told apart.

    A paragraph of as many sentences in both languages is divided into them. A description of
    another number of paragraphs gives its short line only.
    """
    known = {
        entry["Description-md5"]: entry["Description-en"]
        for entry in english
        if "Description-en" in entry
    }
    for entry in german:
        ours = known.get(entry["Description-md5"])
        if ours is None or "Description-de" not in entry:
            continue
        short, paragraphs = split_description(ours)
        kurz, absaetze = split_description(entry["Description-de"])
        document = sources.get(entry["Package"], entry["Package"])
        yield document, short, kurz
        if len(paragraphs) == len(absaetze):
            for one, other in zip(paragraphs, absaetze, strict=True):
                yield from ((document, *pair) for pair in sentence_pairs(one, other))


def sentence_pairs(ours: str, theirs: str) -> list[tuple[str, str]]:
    """Pair two texts sentence by sentence, or as wholes where the numbers of sentences differ."""
    left, right = sentences(ours), sentences(theirs)
    return list(zip(left, right, strict=True)) if len(left) == len(right) else [(ours, theirs)]


def summaries(
    english: Iterable[Entry], sources: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield package source, long description on one line, and short description."""
    for entry in english:
        short, paragraphs = split_description(entry.get("Description-en", ""))
        document = sources.get(entry["Package"], entry["Package"])
        yield document, " ".join(paragraphs), short
