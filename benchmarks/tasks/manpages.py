"""Manual pages in roff (the ``man`` macros), and their translations by manpages-l10n.

A translation is made by po4a out of the original, paragraph by paragraph: macros between
paragraphs stay what they were, and those within one (``.B``, ``.BR``) become ``\\fB...\\fP``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from tasks.align import Block, aligned
from tasks.records import one_line

# The packages with the originals of the larger part of manpages-de in Debian 12. Of a page that two
# packages have, the first one's is taken.
ORIGINALS = (
    "anacron bcron bsdextrautils bsdgames bsdutils btrfs-progs bzip2 coreutils cpio cron "
    "cryptsetup diffutils dosfstools e2fsprogs eject fdisk fdutils file findutils gettext "
    "gettext-base grep groff-base grub-common gzip hostname info init-system-helpers iptables kbd "
    "kmod less libpam-systemd libsane-common make manpages mount mtools mutt nano ncal "
    "ncurses-bin netpbm nfs-common nfs-kernel-server parted psutils recutils sane-airscan "
    "sane-utils sed sharutils sysstat systemd systemd-boot systemd-container systemd-coredump "
    "systemd-homed "
    "systemd-journal-remote systemd-oomd systemd-resolved systemd-timesyncd systemd-userdbd tar "
    "texinfo thinkfan udev usbutils util-linux util-linux-extra uuid-runtime vlock vorbis-tools "
    "wdiff wodim x11-xserver-utils elogind"
).split()

_HEADINGS = frozenset({"SH", "SS"})
_PARAGRAPHS = frozenset("PP P LP TP TQ IP HP RS RE sp br SH SS".split())
# Text in a font of its own: arguments with spaces between them, or without where fonts alternate.
_FONTS = frozenset("B I SM SB".split())
_ALTERNATING = frozenset("BI BR IB IR RB RI".split())
_EXAMPLES = {"nf": "fi", "EX": "EE", "TS": "TE", "EQ": "EN", "de": ".", "ig": "."}
# What po4a adds at the end.
_ADDED = re.compile(r"^\.SH ÜBERSETZUNG\b", re.MULTILINE)

_GLYPHS = {
    "aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "em": "—", "en": "–",
    "bu": "•", "co": "©", "ha": "^", "ti": "~", "rs": "\\", "ga": "`", "mu": "×", "hy": "-",
    "mi": "-",
    "Fo": "«", "Fc": "»", "Bq": "„", "+-": "±", "->": "→", "<=": "≤", ">=": "≥",
    "la": "<", "ra": ">",
    "sq": "'", "ua": "↑", "da": "↓", "de": "°", "sc": "§", "+2": "+", "bv": "|", "or": "|",
    "lh": "",
}  # fmt: skip
_ESCAPE = re.compile(
    r"\\(?:f(?:\(..|\[[^\]]*\]|.)"  # fonts
    r"|s(?:[-+]?\d|\[[^\]]*\])"  # sizes
    r"|m\[[^\]]*\]"  # colours
    r"|h'[^']*'|v'[^']*'|w'[^']*'"  # moves
    r"|\[u(?P<code>[0-9A-F]{4,6})\]"
    r"|\[(?P<long>[^\]]+)\]|\((?P<two>..)|\*\((?P<string>..)"
    r"|(?P<one>.))"
)
_ONE = {"-": "-", " ": " ", "~": " ", "0": " ", "e": "\\", "'": "'", "`": "`", "t": " ", "\\": "\\"}
_NOTHING = frozenset("&,/%:^|c{}dup)")


def plain(text: str) -> str | None:
    """Return what a line of roff shows, or None where it has an escape that is not known here."""
    unknown = False

    def shown(match: re.Match[str]) -> str:
        nonlocal unknown
        if match["code"]:
            return chr(int(match["code"], 16))
        if glyph := match["long"] or match["two"] or match["string"]:
            glyph = {"Aq": "aq", "lq": "lq", "rq": "rq"}.get(glyph, glyph)
            unknown |= glyph not in _GLYPHS
            return _GLYPHS.get(glyph, "")
        if match["one"]:
            unknown |= match["one"] not in _ONE and match["one"] not in _NOTHING
            return _ONE.get(match["one"], "")
        return ""

    found = one_line(_ESCAPE.sub(shown, text))
    return None if unknown else found


def _arguments(rest: str) -> list[str]:
    """Split a macro's arguments: quotes hold spaces together, a backslash does the same."""
    rest = rest.split(r"\"")[0].replace("\\ ", "\\~")
    lexer = shlex.shlex(rest, posix=True)
    lexer.whitespace_split, lexer.quotes, lexer.escape, lexer.commenters = True, '"', "", ""
    try:
        return list(lexer)
    except ValueError:  # a quote that is not closed
        return rest.split()


class _Page:
    """Collects the blocks of one page."""

    def __init__(self) -> None:
        self.found: list[Block] = []
        self.lines: list[str] = []
        self.kind = ""
        self.waits_for_tag = False  # the next line is what .TP hangs in the margin
        self.until = ""  # within an example: the macro that ends it

    def flush(self) -> None:
        text = plain(" ".join(self.lines))
        if self.lines and text != "":
            self.found.append(Block(self.kind, text or "", self.kind in _HEADINGS))
        self.lines.clear()

    def begin(self, kind: str) -> None:
        self.flush()
        self.kind = kind

    def line(self, line: str) -> None:
        if self.until:
            if line[1:].split(" ")[0] == self.until and line[:1] == ".":
                self.until = ""
            return
        if not line.strip():
            self.begin("PP")
        elif line[0] in ".'" and not line.startswith(r"'\""):
            name, _, rest = line[1:].lstrip().partition(" ")
            self.macro(name, rest.strip())
        elif not line.startswith((r"\h'", r"'\"", r"\n", r"\{", r"\}")):
            self.text(line)

    def text(self, line: str) -> None:
        self.lines.append(line)
        if self.waits_for_tag:
            self.waits_for_tag = False
            self.begin("tagged")

    def macro(self, name: str, rest: str) -> None:
        if name in _EXAMPLES:
            self.begin(name)
            self.until = _EXAMPLES[name]
        elif name in _FONTS and rest:
            self.text(" ".join(_arguments(rest)))
        elif name in _ALTERNATING and rest:
            self.text("".join(_arguments(rest)))
        elif name in ("UR", "MT"):
            self.begin(name)
        elif name in _PARAGRAPHS:
            self.begin("PP" if name in ("P", "LP", "RS", "RE", "sp", "br") else name)
            self.waits_for_tag = name in ("TP", "TQ")
            if name in _HEADINGS and rest:
                self.text(" ".join(_arguments(rest)))
                self.begin("PP")
            elif name == "IP" and _arguments(rest):
                self.text(_arguments(rest)[0])
                self.begin("tagged")


def blocks(page: str) -> list[Block] | None:
    """Return the paragraphs, headings and tags of a page; None of one in mdoc's macros.

    A block that cannot be read keeps its place, with an empty text.
    """
    if re.search(r"^\.Dd\b", page, re.MULTILINE):
        return None
    reader = _Page()
    for line in page.split("\n"):
        reader.line(line)
    reader.flush()
    return reader.found


def pairs(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of an English page and its German translation."""
    added = _ADDED.search(theirs)
    left, right = blocks(ours), blocks(theirs[: added.start()] if added else theirs)
    if left is not None and right is not None:
        for one, other in aligned(left, right):
            if one and other:
                yield one, other
