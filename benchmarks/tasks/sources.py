"""Where the data comes from: each source's licence, what is fetched for it, and how it is read."""

from __future__ import annotations

import gzip
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks import (
    catalogues,
    correction,
    debian,
    descriptions,
    docstrings,
    manpages,
    markup,
    pypi,
)
from tasks.records import (
    CORRECTION,
    SUMMARISATION,
    TRANSLATION,
    Record,
    SourceError,
    one_line,
    sentences,
)

# Fixed, so that another day gives the same data; Debian's are those of its release.
WHEELS = {
    "Django": "5.2.19",
    "codespell": "2.4.3",
    "homeassistant": "2024.3.3",
    "jupyterlab-language-pack-de-DE": "4.5.post3",
}


@dataclass
class Store:
    """Fetches what sources ask for, and remembers what it was, for the manifest."""

    folder: Path
    suite: str
    mirror: str
    used: dict[str, Path | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.debian = debian.Debian(self.folder / "debian", self.suite, self.mirror)

    def packages(self, *names: str) -> list[Path]:
        """Fetch Debian packages."""
        self.debian.packages(names)
        found = [self.debian.package(name) for name in names]
        for name, path in zip(names, found, strict=True):
            self.used[f"{name} {debian.version(path)}"] = path
        return found

    def entries(self, ending: str) -> Iterable[descriptions.Entry]:
        """Fetch and read a package list of Debian."""
        path = self.debian.lists(ending)
        self.used[f"{ending} of {self.suite}"] = path
        return debian.paragraphs(path)

    def wheel(self, name: str) -> Path:
        """Fetch a wheel in the version written down here."""
        path = pypi.wheel(self.folder / "wheels", name, WHEELS[name])
        self.used[f"{name} {WHEELS[name]}"] = path
        return path


Read = Callable[[Store], Iterator[tuple[str, str, str]]]


@dataclass(frozen=True)
class Source:
    """A reader yields document, source text and target text; `records` adds the rest.

    A document is named relative to ``shelf``: sources that share a shelf share documents.
    """

    name: str
    task: str
    licence: str
    what: str
    read: Read
    shelf: str = ""

    def records(self, store: Store) -> Iterator[Record]:
        """Yield its records: texts on one line, but for code."""
        for document, source, target in self.read(store):
            yield Record(
                source=source if self.name.startswith("docstrings") else one_line(source),
                target=one_line(target),
                document=f"{self.shelf or self.name}/{document}",
                origin=self.name,
                licence=self.licence,
            )


# ---- translation ---------------------------------------------------------------------------------


def _libreoffice_help(store: Store) -> Iterator[tuple[str, str, str]]:
    german, english = store.packages("libreoffice-help-de", "libreoffice-help-en-us")
    root = "usr/share/libreoffice/help/{}/text/"
    yield from _pages(
        _folder(english, root.format("en-US"), ".html"),
        _folder(german, root.format("de"), ".html"),
        markup.by_identity,
    )


def _libreoffice_messages(store: Store) -> Iterator[tuple[str, str, str]]:
    (package,) = store.packages("libreoffice-l10n-de")
    for name, content in debian.files_of(package, lambda name: name.endswith(".mo")):
        for context, english, german in catalogues.gettext_pairs(content):
            plain = map(catalogues.without_accelerator, (english, german))
            yield catalogues.dialog(Path(name).stem, context), *plain


def _manual_pages(store: Store) -> Iterator[tuple[str, str, str]]:
    (german, *packages) = store.packages("manpages-de", *manpages.ORIGINALS)
    originals: dict[str, bytes] = {}
    for package in packages:
        originals = _folder(package, "usr/share/man/man", ".gz") | originals
    yield from _pages(
        {name: gzip.decompress(page) for name, page in originals.items()},
        {n: gzip.decompress(p) for n, p in _folder(german, "usr/share/man/de/man", ".gz").items()},
        manpages.pairs,
    )


def _debian_translations(store: Store) -> Iterator[tuple[str, str, str]]:
    yield from descriptions.translations(
        store.entries("Translation-en"),
        store.entries("Translation-de"),
        descriptions.source_packages(store.entries("Packages")),
    )


def _debian_handbook(store: Store) -> Iterator[tuple[str, str, str]]:
    (package,) = store.packages("debian-handbook")
    root = "usr/share/doc/debian-handbook/html/{}/"
    around = frozenset({"li.previous", "li.next", "li.up", "li.home", "ul.docnav"})
    yield from _pages(
        _folder(package, root.format("en-US"), ".html"),
        _folder(package, root.format("de-DE"), ".html"),
        lambda ours, theirs: markup.by_structure(ours, theirs, around),
    )


def _gnome_help(store: Store) -> Iterator[tuple[str, str, str]]:
    (package,) = store.packages("gnome-user-docs")
    people = frozenset({"info", "credit", "name", "email", "years", "cite"})
    yield from _pages(
        _folder(package, "usr/share/help/C/", ".page"),
        _folder(package, "usr/share/help/de/", ".page"),
        lambda ours, theirs: markup.by_structure(ours, theirs, people),
    )


def _home_assistant(store: Store) -> Iterator[tuple[str, str, str]]:
    path = store.wheel("homeassistant")
    files = dict(
        pypi.files_of(path, lambda n: "/translations/" in n and n.endswith(("en.json", "de.json")))
    )
    for name, german in files.items():
        english = files.get(name.removesuffix("de.json") + "en.json")
        if name.endswith("de.json") and english is not None:
            for pair in catalogues.json_pairs(english, german):
                yield Path(name).parent.parent.name, *pair


def _django(store: Store) -> Iterator[tuple[str, str, str]]:
    path = store.wheel("Django")
    for name, content in pypi.files_of(path, lambda n: "/de/" in n and n.endswith(".po")):
        for _, english, german in catalogues.gettext_pairs(content):
            yield name, english, german


def _jupyterlab(store: Store) -> Iterator[tuple[str, str, str]]:
    path = store.wheel("jupyterlab-language-pack-de-DE")
    for name, content in pypi.files_of(path, lambda n: n.endswith(".mo")):
        for _, english, german in catalogues.gettext_pairs(content):
            yield Path(name).stem, english, german


def _folder(package: Path, root: str, ending: str) -> dict[str, bytes]:
    """Read a package's files below a folder, by their paths in it."""
    found = debian.files_of(package, lambda name: name.startswith(root) and name.endswith(ending))
    return {name.removeprefix(root): content for name, content in found}


def _pages(
    ours: dict[str, bytes],
    theirs: dict[str, bytes],
    pairs: Callable[[str, str], Iterable[tuple[str, str]]],
) -> Iterator[tuple[str, str, str]]:
    """Yield the pairs of each page that is there in both languages."""
    for name in sorted(ours.keys() & theirs.keys()):
        # A few old manual pages are in Latin-1; what is no UTF-8 is dropped by a cleaning rule.
        texts = (page.decode("utf-8", errors="replace") for page in (ours[name], theirs[name]))
        for pair in pairs(*texts):
            yield name, *pair


# ---- summarisation -------------------------------------------------------------------------------


def _debian_summaries(store: Store) -> Iterator[tuple[str, str, str]]:
    yield from descriptions.summaries(
        store.entries("Translation-en"), descriptions.source_packages(store.entries("Packages"))
    )


def _docstrings(package: str) -> Read:
    def read(store: Store) -> Iterator[tuple[str, str, str]]:
        is_python = package == "stdlib"
        try:
            of = platform.python_version() if is_python else importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise SourceError(
                f"the package {package} is not installed here: pip install {package}, or leave "
                f"docstrings-{package} out with --only"
            ) from error
        store.used[f"{'Python' if is_python else package} {of}"] = "installed here"
        for name, text in docstrings.modules(package):
            for code, summary in docstrings.functions(text):
                yield name, code, summary

    return read


# ---- correction ----------------------------------------------------------------------------------

CODESPELL = "codespell"
NEEDS_SENTENCES = f"{CODESPELL} needs sentences: choose a translation source beside it"
# The list's own licence, which is not that of the program.
CODESPELL_LICENCE = "CC-BY-SA-3.0"


def misspelt(store: Store, records: Iterable[Record]) -> Iterator[Record]:
    """Yield misspelt sentences out of the English side of translation records."""
    (content,) = (
        content
        for _, content in pypi.files_of(
            store.wheel("codespell"), lambda name: name == "codespell_lib/data/dictionary.txt"
        )
    )
    text = content.decode("utf-8")
    misspellings = correction.backwards(correction.read_list(text))
    known = correction.listed(text)
    for record in records:
        for wrong, right in correction.corrupted(sentences(record.source), misspellings, known):
            licence = f"{record.licence} AND {CODESPELL_LICENCE}"
            yield Record(wrong, right, record.document, f"{CODESPELL}:{record.origin}", licence)


# ---- the table -----------------------------------------------------------------------------------


def _no_reader(_: Store) -> Iterator[tuple[str, str, str]]:
    raise SourceError(NEEDS_SENTENCES)
    yield


SOURCES = {
    source.name: source
    for source in (
        Source(
            "libreoffice-help", TRANSLATION, "MPL-2.0",
            "LibreOffice's help pages, paragraph by paragraph", _libreoffice_help,
        ),
        Source(
            "libreoffice-messages", TRANSLATION, "MPL-2.0",
            "LibreOffice's dialogs and messages", _libreoffice_messages,
        ),
        Source(
            "home-assistant", TRANSLATION, "Apache-2.0",
            "Home Assistant's dialogs", _home_assistant,
        ),
        Source("django", TRANSLATION, "BSD-3-Clause", "Django's messages", _django),
        Source("jupyterlab", TRANSLATION, "BSD-3-Clause", "JupyterLab's messages", _jupyterlab),
        Source(
            "manpages", TRANSLATION, "GPL-3+ AND the originals' own",
            "manual pages by manpages-l10n, beside those of the packages", _manual_pages,
        ),
        Source(
            "debian-translations", TRANSLATION, "each package's own",
            "Debian's package descriptions, sentence by sentence", _debian_translations, "debian",
        ),
        Source(
            "debian-handbook", TRANSLATION, "GPL-2+ or CC-BY-SA-3.0",
            "The Debian Administrator's Handbook", _debian_handbook,
        ),
        Source(
            "gnome-help", TRANSLATION, "CC-BY-SA-3.0", "GNOME's help pages", _gnome_help,
        ),
        Source(
            "debian-summaries", SUMMARISATION, "each package's own",
            "Debian's package descriptions: long to short", _debian_summaries, "debian",
        ),
        Source(
            "docstrings-stdlib", SUMMARISATION, "PSF-2.0",
            "functions of Python's standard library to their summaries", _docstrings("stdlib"),
        ),
        Source(
            "docstrings-torch", SUMMARISATION, "BSD-3-Clause",
            "functions of torch to their summaries", _docstrings("torch"),
        ),
        Source(
            "docstrings-sympy", SUMMARISATION, "BSD-3-Clause",
            "functions of sympy to their summaries", _docstrings("sympy"),
        ),
        Source(
            "docstrings-transformers", SUMMARISATION, "Apache-2.0",
            "functions of transformers to their summaries", _docstrings("transformers"),
        ),
        Source(
            CODESPELL, CORRECTION, f"the sentence's AND {CODESPELL_LICENCE}",
            "the English sentences of the translation sources chosen, misspelt", _no_reader,
        ),
    )
}  # fmt: skip
