"""Draw what `python -m specdec_ext demo` shows on a terminal, up to its table, as docs/demo.svg.

    python docs/draw_demo.py [options of the demo]

The table is left out: its times are of the machine that draws. Needs a Unix terminal (``pty``).
"""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).with_name("demo.svg")
COLUMNS = 96
END_OF_COMPLETION = b"measuring"
CELL, LINE, SIZE = 7.8, 17, 13  # pixels: width of a character, height of a line, size of the font

# The demo's terminal styles, and what they become.
CLASSES = {"1": "strong", "2": "faint", "32": "accepted", "31;9": "replaced", "94": "target"}
STYLE = """
text { font: %dpx ui-monospace, Menlo, Consolas, monospace; fill: #d0d7de; white-space: pre }
.strong { font-weight: bold; fill: #ffffff }
.faint { fill: #848d97 }
.accepted { fill: #3fb950 }
.replaced { fill: #ff7b72; text-decoration: line-through }
.target { fill: #58a6ff }
"""


class Run(NamedTuple):
    """Characters of one line and one style."""

    line: int
    column: int
    text: str
    style: str  # a value of CLASSES, or ""


def record(options: list[str]) -> str:
    """Run the demo on a terminal of its own; return what it wrote before its table."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec_ext", "demo", *options],
        env={**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm"},
        stdout=its,
    )
    os.close(its)
    written = b""
    try:
        while END_OF_COMPLETION not in written:
            written += os.read(ours, 4096)
    except OSError as error:  # the terminal closed: the demo ended, and not as it should
        raise SystemExit(f"the demo ended with status {process.wait()}") from error
    finally:
        process.terminate()
        process.wait()
        os.close(ours)
    return written.partition(END_OF_COMPLETION)[0].decode().replace("\r\n", "\n")


def runs(written: str) -> Iterator[Run]:
    """Split terminal output into runs of one style."""
    line = column = 0
    style = ""
    for part in re.split(r"(\x1b\[[0-9;]*[A-Za-z]|\n)", written):
        if part == "\n":
            line, column = line + 1, 0
        elif part.startswith("\x1b["):
            style = CLASSES.get(part[2:-1], "")
        elif text := part.strip("\r"):
            if inner := text.strip():  # readers of SVG differ about spaces at an end
                yield Run(line, column + text.index(inner), inner, style)
            column += len(text)


def draw(written: str) -> str:
    """Return an SVG of terminal output."""
    found = list(runs(written.strip("\n")))
    width = round((COLUMNS + 2) * CELL)
    height = round((found[-1].line + 3) * LINE)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" xml:space="preserve">',
        f"<style>{STYLE % SIZE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
    ]
    for line, column, text, style in found:
        x, y = (column + 1) * CELL, (line + 2) * LINE
        chosen = f' class="{style}"' if style else ""
        lines.append(
            f'<text x="{x:.1f}" y="{y}" textLength="{len(text) * CELL:.1f}"{chosen}>'
            f"{escape(text)}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(record(sys.argv[1:])), encoding="utf-8")
    print(f"wrote {PICTURE}")
