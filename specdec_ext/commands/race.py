"""``demo --race``: plain and speculative decoding side by side, at the times that they really took.

Both runs are made first, in turns, neither while the other runs, and without a display; the
turn of median factor is then replayed. Short runs are replayed in slow motion, which is said.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from .page import ACCEPTED, REPLACED, TARGET, Page, printable
from .pair import Pair, Prompt
from .pieces import Piece, Reader, pieces_of, shown
from .runs import Recording, both_ways

__all__ = ["race"]

SHORTEST = 6.0  # seconds that the slower run is shown for at least
FACTORS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
FRAMES = 20  # a second
COLOURS = {ACCEPTED: "green", REPLACED: "red strike", TARGET: "bright_blue"}
LABELS = {ACCEPTED: "accepted", REPLACED: "replaced", TARGET: "the target's own"}
NAMES = ("plain", "speculative")

Timed = list[tuple[float, list[Piece]]]  # when a round came, and what it brought


def race(pair: Pair, prompt: Prompt, args: argparse.Namespace) -> int:
    """Run both, show the race, and return the exit status."""
    out = Page(sys.stdout)
    live = out.colour
    if live:
        _need_rich()
    out.status("timing both, in turns ...")
    runs = both_ways(pair, prompt, args)
    out.status("")
    timed = [_timed(pair, prompt, run) for run in runs]
    if live:
        _replay(timed, runs, slow_motion(max(run.seconds for run in runs)))
    else:
        _as_text(out, prompt, timed, runs)
    out.line()
    out.line(verdict(*runs), "strong")
    out.line("Times are those of runs that were made before, in turns, without a display;", "faint")
    out.line("neither ran while the other did. Prompts are included.", "faint")
    return 0


def slow_motion(seconds: float) -> int:
    """Return how many times slower than it was a run is shown."""
    return next((f for f in FACTORS if f * seconds >= SHORTEST), FACTORS[-1])


def verdict(plain: Recording, speculative: Recording) -> str:
    """Say who won."""
    factor = speculative.speed / plain.speed
    count = (
        ""
        if len(plain.tokens) == len(speculative.tokens)
        else (f" (plain: {len(plain.tokens)} tokens)")
    )
    return (
        f"Speculative decoding: {factor:.2f} times the tokens a second, "
        f"{len(speculative.tokens)} tokens{count} in {speculative.seconds:.3g} s against "
        f"{plain.seconds:.3g} s, {len(speculative.rounds)} calls of the target against "
        f"{len(plain.rounds)}."
    )


def _need_rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "--race needs rich in a terminal: pip install 'specdec_ext[race]' (or pipe the output, "
            "which is plain text then)"
        ) from error


def _timed(pair: Pair, prompt: Prompt, run: Recording) -> Timed:
    reader = Reader(pair.tokenizer, prompt.ids[0].tolist())
    return [
        (found.end, [piece for burst in found.bursts for piece in pieces_of(burst, reader)])
        for found in run.rounds
    ]


def _as_text(
    out: Page, prompt: Prompt, timed: list[Timed], runs: tuple[Recording, Recording]
) -> None:
    """Write both completions one after the other, for what shows no colours."""
    out.line(f"{prompt.name}, completed both ways:")
    for name, rounds, run in zip(NAMES, timed, runs, strict=True):
        out.rule()
        out.line(f"{name}: {run.speed:.1f} tokens a second")
        for _, pieces in rounds:
            for piece in pieces:
                out.text(_visible(piece), piece.kind)
        out.line()
    out.rule()
    for kind, label in LABELS.items():
        out.text(label, kind)
        out.text("   ")
    out.line()


def _visible(piece: Piece) -> str:
    return shown(piece.text) if piece.kind == REPLACED else piece.text


def _replay(timed: list[Timed], runs: tuple[Recording, Recording], slower: int) -> None:
    """Show both runs at their true times, or so many times slower."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    last = max(run.seconds for run in runs)
    begin = time.perf_counter()
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            now = min((time.perf_counter() - begin) / slower, last)
            live.update(_frame(console, timed, runs, now, slower), refresh=True)
            if now >= last:
                return
            time.sleep(1 / FRAMES)


def _frame(
    console: Any, timed: list[Timed], runs: tuple[Recording, Recording], now: float, slower: int
) -> Any:
    """Draw what there was at a moment, in seconds of the runs."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    sides = Table.grid(expand=True)
    width = max(console.width // 2 - 4, 8)
    height = max(min(console.height - 8, 24), 3)
    fastest = max(run.speed for run in runs)
    panels = []
    for name, rounds, run in zip(NAMES, timed, runs, strict=True):
        sides.add_column(ratio=1)
        text = _text_until(rounds, now)
        lines = text.wrap(console, width)[-height:]
        body = Text("\n").join(lines)
        body.append("\n" * (height - len(lines)))
        gauge = _gauge(rounds, run, now, fastest, width)
        panels.append(Panel(Group(body, gauge), title=name))
    sides.add_row(*panels)
    legend = Text("  ")
    for kind, label in LABELS.items():
        legend.append(label, COLOURS[kind]).append("   ")
    pace = "at true speed" if slower == 1 else f"slow motion, {slower} times slower"
    legend.append(f"{now:.2f} s, {pace}", "dim")
    return Group(sides, legend)


def _text_until(rounds: Timed, now: float) -> Any:
    from rich.text import Text

    text = Text()
    for when, pieces in rounds:
        if when > now:
            break
        for piece in pieces:
            seen = (c if c == "\n" else printable(c) for c in _visible(piece).expandtabs(4))
            text.append("".join(seen), COLOURS[piece.kind])
    return text


def _gauge(rounds: Timed, run: Recording, now: float, fastest: float, width: int) -> Any:
    """Draw tokens a second so far, against the faster run's mean."""
    from rich.text import Text

    written = sum(
        piece.kind != REPLACED for when, pieces in rounds if when <= now for piece in pieces
    )
    speed = run.speed if now >= run.seconds else written / now if now else 0.0
    done = "  done" if now >= run.seconds else ""
    full = round(width * min(speed / fastest, 1.0))
    bar = Text("━" * full, "bold").append("━" * (width - full), "dim")
    return bar.append(f"\n{written:4d} tokens, {speed:.1f} a second{done}", "not dim not bold")
