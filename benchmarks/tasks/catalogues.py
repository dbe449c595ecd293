"""Message catalogues: gettext's .po and .mo, and Home Assistant's JSON files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from typing import Any

from tasks.records import SourceError


def gettext_pairs(content: bytes) -> Iterator[tuple[str, str, str]]:
    """Yield context, English text and translation of a catalogue's messages, .po or .mo.

    Messages without a translation, fuzzy and obsolete ones are left out. Of a message with a
    plural both forms come.
    """
    try:
        import polib
    except ImportError as error:
        raise SourceError(
            "polib is missing, which reads gettext catalogues: pip install polib"
        ) from error
    is_compiled = content[:4] in (b"\xde\x12\x04\x95", b"\x95\x04\x12\xde")
    if is_compiled:
        catalogue = _compiled(polib, content)
    else:
        catalogue = polib.pofile(content.decode("utf-8"))
    for entry in catalogue:
        if not is_compiled and (entry.obsolete or entry.fuzzy):
            continue
        texts = [(entry.msgid, entry.msgstr)]
        if entry.msgid_plural:
            forms = entry.msgstr_plural
            texts = [(entry.msgid, forms.get(0, "")), (entry.msgid_plural, forms.get(1, ""))]
        for english, translated in texts:
            if english and translated:
                yield entry.msgctxt or "", english, translated


def _compiled(polib: Any, content: bytes) -> Any:
    """Read a .mo: polib wants those as files."""
    with tempfile.NamedTemporaryFile(suffix=".mo") as file:
        file.write(content)
        file.flush()
        return polib.mofile(file.name)


def without_accelerator(text: str) -> str:
    """Remove the mark before the letter that is pressed with Alt: ``_File``, ``~File``."""
    for mark in "_~":
        if text.count(mark) == 1:
            text = text.replace(mark, "")
    return text


def dialog(catalogue: str, context: str) -> str:
    """Name the document of one of LibreOffice's messages.

    Contexts of dialogs are ``dialog|element``. Others name one message only: those of one
    catalogue are taken as one document.
    """
    name, bar, _ = context.partition("|")
    return f"{catalogue}/{name}" if bar else catalogue


def json_pairs(english: bytes, translated: bytes) -> Iterator[tuple[str, str]]:
    """Yield the texts under the same keys of two JSON files."""
    yield from _leaves(json.loads(english), json.loads(translated))


def _leaves(one: Any, other: Any) -> Iterator[tuple[str, str]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (key for key in one if key in other):
            yield from _leaves(one[key], other[key])
    elif isinstance(one, str) and isinstance(other, str):
        yield one, other
