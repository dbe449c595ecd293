"""Documentation in HTML and Mallard: LibreOffice's help, the Debian handbook, GNOME's help."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

from tasks.align import Block, aligned
from tasks.records import one_line

# What begins a text of its own; every other element is a part of the text around it.
_BLOCKS = frozenset(
    "p h1 h2 h3 h4 h5 h6 li dt dd td th div ul ol table tr body title desc "  # HTML, Mallard
    "item name email years info credit section note steps list terms cite "
    "header footer aside nav".split()
)
_HEADINGS = frozenset("h1 h2 h3 h4 h5 h6 title".split())
_TEXTS = frozenset("p h1 h2 h3 h4 h5 h6".split())
_SKIPPED = frozenset("script style pre code-block screen label button".split())


class _Reader(HTMLParser):
    """Collects the texts of block elements, each with its element's name, class and id."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, str, str]] = []  # kind, id, text
        self.open: list[tuple[str, str, str]] = [("", "", "")]  # tag, kind, id
        self.text: list[str] = []
        self.skipped = 0

    def flush(self) -> None:
        text = one_line("".join(self.text))
        self.text.clear()
        _, kind, identity = self.open[-1]
        if text:
            self.found.append((kind, identity, text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _SKIPPED:
            self.skipped += 1
        elif tag in _BLOCKS:
            self.flush()
            given = dict(attrs)
            kind = tag if not given.get("class") else f"{tag}.{given['class']}"
            self.open.append((tag, kind, given.get("id") or ""))
        elif tag == "br":
            self.text.append(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element without content has no text: it opens nothing."""
        if tag == "br":
            self.text.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIPPED:
            self.skipped = max(self.skipped - 1, 0)
        elif tag in _BLOCKS and any(opened[0] == tag for opened in self.open):
            self.flush()
            while self.open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.text.append(data)


def _read(text: str) -> list[tuple[str, str, str]]:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    reader.flush()
    return reader.found


def by_identity(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of two HTML pages that bear the same id, once in each of them."""
    left, right = _identified(ours), _identified(theirs)
    for identity, text in left.items():
        if identity in right:
            yield text, right[identity]


def _identified(page: str) -> dict[str, str]:
    found: dict[str, str] = {}
    doubtful = set()
    for kind, identity, text in _read(page):
        if kind.partition(".")[0] not in _TEXTS or not identity:
            continue
        if identity in found:
            doubtful.add(identity)
        found[identity] = text
    return {identity: text for identity, text in found.items() if identity not in doubtful}


def by_structure(
    ours: str, theirs: str, left_out: frozenset[str] = frozenset()
) -> Iterator[tuple[str, str]]:
    """Yield the texts at the same place of two pages, by element and class.

    Elements may be left out by their name, or by name and class: ``li.next``.
    """
    yield from aligned(_blocks(ours, left_out), _blocks(theirs, left_out))


def _blocks(page: str, left_out: frozenset[str]) -> list[Block]:
    found = []
    for kind, _, text in _read(page):
        tag = kind.partition(".")[0]
        if tag and left_out.isdisjoint((tag, kind)):
            found.append(Block(kind, text, tag in _HEADINGS))
    return found
