"""Text on a terminal or in a file: colours or marks, wrapped by the width of characters."""

from __future__ import annotations

import os
import shutil
import unicodedata
from typing import TextIO

__all__ = ["ACCEPTED", "REPLACED", "TARGET", "Page", "cells", "printable"]

#: Who wrote a token: the draft, and it was accepted; the draft, and it was replaced; the target.
ACCEPTED, REPLACED, TARGET = "accepted", "replaced", "target"

STYLES = {
    "strong": "\x1b[1m",
    "faint": "\x1b[2m",
    ACCEPTED: "\x1b[32m",
    REPLACED: "\x1b[31;9m",
    TARGET: "\x1b[94m",
}
MARKS = {ACCEPTED: ("«", "»"), REPLACED: ("~", "~")}
ASCII_MARKS = {ACCEPTED: ("{", "}"), REPLACED: ("~", "~")}
RESET = "\x1b[0m"


def cells(character: str) -> int:
    """Return how many columns of a terminal a character takes."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def printable(character: str) -> str:
    """Return a character that no terminal obeys: control characters become their pictures."""
    code = ord(character)
    if code < 32:
        return chr(0x2400 + code)
    return "\u2421" if code == 127 else "\ufffd" if 128 <= code < 160 else character


class Page:
    """Text in columns: colours on a terminal, marks elsewhere, wrapped by width in cells.

    Parameters
    ----------
    stream : file
        Where to write.
    quiet : bool
        Write nothing.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self.stream, self.quiet = stream, quiet
        self.terminal = stream.isatty()
        self.colour = (
            self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self.width = min(shutil.get_terminal_size().columns, 100) if self.terminal else 88
        try:
            "«─»".encode(stream.encoding or "ascii")
            self.marks, self.dash = MARKS, "─"
        except UnicodeEncodeError:
            self.marks, self.dash = ASCII_MARKS, "-"
        self.column = 0
        self._style: str | None = None
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

    def text(self, text: str, style: str | None = None) -> None:
        """Write text that may hold any character, indented and wrapped."""
        if not text:
            return
        self._switch(style)
        for character in text.expandtabs(4):
            if character == "\n":
                self._newline()
                continue
            character = printable(character)
            size = cells(character)
            if self.column + size > self.width - 4:  # a margin of 2 on either side
                self._newline()
            if self.column == 0:
                self._put("  ")
            self._put(character)
            self.column += size

    def _switch(self, style: str | None) -> None:
        """End one style and begin another."""
        if style == self._style:
            return
        if self.colour:
            self._put((RESET if self._style else "") + (STYLES[style] if style else ""))
        else:
            closing = self.marks.get(self._style or "", ("", ""))[1]
            opening = self.marks.get(style or "", ("", ""))[0]
            if opening and self.column == 0:
                self._put("  ")
                self.column = 0
            self._put(closing + opening)
            self.column += len(closing + opening)
        self._style = style

    def _newline(self) -> None:
        # A style that went on over a line's end would paint the margin in some terminals.
        held = STYLES[self._style] if self.colour and self._style else ""
        self._put((RESET if held else "") + "\n" + held)
        self.column = 0

    def line(self, text: str = "", style: str | None = None) -> None:
        """Write one line of the demo's own."""
        self._switch(None)
        if self.column:
            self._newline()
        if text:
            styled = f"{STYLES[style]}{text}{RESET}" if style and self.colour else text
            self._put(f"  {styled}")
        self._put("\n")

    def rule(self) -> None:
        """Write a horizontal line."""
        self.line(self.dash * (self.width - 4), "faint")

    def status(self, text: str) -> None:
        """Show a passing line on a terminal; an empty one removes it."""
        if self.terminal and not self.quiet:
            self.stream.write(f"\r\x1b[K{'  ' + text if text else ''}")
            self.stream.flush()

    def _put(self, text: str) -> None:
        if not self.quiet:
            self.stream.write(text)

    def flush(self) -> None:
        """Show what was written."""
        self.stream.flush()
