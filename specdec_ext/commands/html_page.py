"""``demo --html``: one page, of one file, that shows every token and every round of a real run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

from ..contract import GREEDY_BELOW
from ..decoding.tracing import ModelCall
from .page import ACCEPTED, REPLACED, TARGET, printable
from .pair import Pair, Prompt
from .pieces import shown
from .race import verdict
from .runs import Recording, Written, both_ways, written

__all__ = ["page_of", "write_page"]

TEMPLATE = Path(__file__).with_name("html_page.html")
KINDS = {
    ACCEPTED: "draft token, accepted",
    REPLACED: "draft token, replaced",
    TARGET: "the target's own token",
}
MARGIN, LANE, BAR = 12, 74, 30  # pixels of the timeline: at the sides, a lane, a bar
CALL = 22  # pixels that a usual call of the target is long at least
WIDTH = 960


def write_page(pair: Pair, prompt: Prompt, args: argparse.Namespace, settings: str) -> str:
    """Run both, write the page to ``args.html``, and return what it says first.

    Parameters
    ----------
    pair : Pair
        The models.
    prompt : Prompt
        What is completed.
    args : argparse.Namespace
        With the demo's options.
    settings : str
        A line on the models and how they are run.
    """
    path = Path(args.html)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--html: there is no folder {path.absolute().parent}")
    plain, speculative = both_ways(pair, prompt, args)
    tokens = written(pair, prompt, speculative, args.temperature)
    path.write_text(
        page_of(
            prompt.text,
            tokens,
            plain,
            speculative,
            settings,
            greedy=args.temperature < GREEDY_BELOW,
            cuda=pair.device.type == "cuda",
            names=names_of(pair, tokens),
        ),
        encoding="utf-8",
    )
    return verdict(plain, speculative)


def names_of(pair: Pair, tokens: Iterable[Written]) -> dict[int, str]:
    """Return the names of tokens that are no text: stop tokens and the like."""
    special = set(pair.tokenizer.all_special_ids)
    ids = {found.piece.token for found in tokens} & special
    return {token: str(pair.tokenizer.convert_ids_to_tokens(token)) for token in ids}


def page_of(
    prompt: str,
    tokens: list[Written],
    plain: Recording,
    speculative: Recording,
    settings: str,
    *,
    greedy: bool,
    cuda: bool = False,
    names: dict[int, str] | None = None,
) -> str:
    """Return the page.

    Parameters
    ----------
    prompt : str
        The text before the first new token.
    tokens : list of Written
        What the speculative run wrote and replaced.
    plain, speculative : Recording
        Both runs.
    settings : str
        A line on the models and how they are run.
    greedy : bool
        Whether decoding was greedy; probabilities are those of temperature 1 then.
    cuda : bool
        Whether each call was waited for on a device.
    names : dict of int to str, optional
        Names of special tokens, which have no text.
    """
    count = {kind: sum(found.piece.kind == kind for found in tokens) for kind in KINDS}
    labels = _labels(tokens, names or {})
    notes = [
        "Both ways were run in turns, neither while the other did; shown is the turn of median "
        "factor.",
        "Probabilities are those of temperature 1: decoding was greedy."
        if greedy
        else "Probabilities are those at the temperature of the run.",
        "They were computed afterwards.",
        "Each call was waited for on the device, which slows both ways down." if cuda else "",
    ]
    values = {
        "settings": escape(settings),
        "verdict": escape(verdict(plain, speculative)),
        "accepted": str(count[ACCEPTED]),
        "replaced": str(count[REPLACED]),
        "own": str(count[TARGET]),
        "prompt": _text(prompt),
        "tokens": "".join(
            _token(found, label, first=i == 0)
            for i, (found, label) in enumerate(zip(tokens, labels, strict=True))
        ),
        "timeline": _timeline(plain, speculative),
        "rows": "".join(_row(found, label) for found, label in zip(tokens, labels, strict=True)),
        "notes": escape(" ".join(filter(None, notes))),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], template)


def _text(text: str) -> str:
    """Return text for a page: escaped, control characters as their pictures."""
    return escape("".join(c if c in "\n\t" else printable(c) for c in text))


def _labels(tokens: list[Written], names: dict[int, str]) -> list[str]:
    """Say what each token is; one without text is a part of a character, or has a name."""
    labels = []
    for found in tokens:
        piece = found.piece
        if piece.token in names:
            labels.append(names[piece.token])
        elif not piece.text:
            labels.append("(part of a character that a later token completes)")
        else:
            labels.append(f"“{shown(piece.text)}”")
    return labels


def _mark(found: Written, label: str) -> str:
    """Return what is shown, but is no text: for line ends, and for tokens without text."""
    piece = found.piece
    if not piece.text:
        return "▫" if label.startswith("(") else label
    return "↵" if piece.kind != REPLACED and "\n" in piece.text else ""


def _token(found: Written, label: str, *, first: bool) -> str:
    piece = found.piece
    text = shown(piece.text) if piece.kind == REPLACED else piece.text
    mark = _mark(found, label)
    draft = "" if found.draft is None else f"\ndraft's probability {found.draft:.3g}"
    title = (
        f"{label}\n{KINDS[piece.kind]}\ntarget's probability {found.target:.3g}{draft}\n"
        f"round {found.round}, position {found.position}"
    )
    attributes = {
        "class": f"token {piece.kind}",
        "role": "option",
        "aria-selected": "false",
        "tabindex": "0" if first else "-1",
        "data-kind": piece.kind,
        "data-round": str(found.round),
        "data-position": str(found.position),
        "aria-label": title.replace("\n", ", "),
        "title": title,
        **({"data-mark": mark} if mark else {}),
    }
    said = " ".join(f'{name}="{_text(value)}"' for name, value in attributes.items())
    return f"<span {said}>{_text(text)}</span>"


def _row(found: Written, label: str) -> str:
    draft = "" if found.draft is None else f"{found.draft:.3g}"
    cells = (
        found.position,
        label,
        KINDS[found.piece.kind],
        found.round,
        f"{found.target:.3g}",
        draft,
    )
    return "<tr>" + "".join(f"<td>{_text(str(cell))}</td>" for cell in cells) + "</tr>\n"


# --- the timeline -----------------------------------------------------------------------------


def _timeline(plain: Recording, speculative: Recording) -> str:
    """Draw both runs over one scale of time, as SVG."""
    last = max(plain.seconds, speculative.seconds)
    calls = sorted(c.end - c.begin for r in plain.rounds for c in r.calls)
    scale = max((WIDTH - 2 * MARGIN) / last, CALL / calls[len(calls) // 2])  # pixels a second
    width = round(last * scale + 2 * MARGIN)
    lanes = "".join(
        _lane(name, run, scale, 8 + lane * LANE)
        for lane, (name, run) in enumerate((("speculative", speculative), ("plain", plain)))
    )
    said = escape(f"Timeline. {verdict(plain, speculative)}")
    return (
        f'<svg role="img" aria-label="{said}" width="{width}" height="{2 * LANE + 30}" '
        f'viewBox="0 0 {width} {2 * LANE + 30}">{lanes}{_axis(last, scale, 2 * LANE + 8)}</svg>'
    )


def _lane(name: str, run: Recording, scale: float, top: float) -> str:
    head = f"{name}: {len(run.tokens)} tokens, {run.seconds * 1e3:,.1f} ms"
    drawn = [f'<g id="{name}"><text x="{MARGIN}" y="{top + 14}">{head}</text>']
    bars = top + 22

    def bar(kind: str, begin: float, end: float) -> str:
        return (
            f'<rect class="{kind}-bar" x="{MARGIN + begin * scale:.2f}" y="{bars}" '
            f'width="{(end - begin) * scale:.2f}" height="{BAR}"/>'
        )

    for number, found in enumerate(run.rounds, start=1):
        new = sum(len(burst.tokens) for burst in found.bursts)
        title = _said_of(number, found.calls, found.end - found.begin, new)
        inner = [bar("other", found.begin, found.end)]
        # A gap of half a pixel keeps calls apart; it is taken from no bar's beginning.
        gap = 0.5 / scale
        inner += [bar(c.model, c.begin, max(c.end - gap, c.begin)) for c in found.calls]
        middle = MARGIN + (found.begin + found.end) / 2 * scale
        inner.append(
            f'<text x="{middle:.2f}" y="{bars + BAR + 13}" text-anchor="middle">{new}</text>'
        )
        drawn.append(
            f'<g class="round" data-round="{number}"><title>{title}</title>{"".join(inner)}</g>'
        )
    return "".join([*drawn, "</g>"])


def _said_of(number: int, calls: Iterable[ModelCall], seconds: float, new: int) -> str:
    lines = [f"round {number}, {seconds * 1e3:.3g} ms, tokens: {new}"]
    for model in ("draft", "target"):
        times = [call.end - call.begin for call in calls if call.model == model]
        if times:
            lines.append(f"{model}: {len(times)} calls, {sum(times) * 1e3:.3g} ms")
    return "\n".join(lines)


def _axis(last: float, scale: float, top: float) -> str:
    """Mark round numbers of milliseconds, 80 pixels apart at least."""
    least = 80 / scale * 1e3
    step = next(m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5) if m * 10.0**e >= least)
    marks = []
    for i in range(int(last * 1e3 / step) + 1):
        x = MARGIN + i * step / 1e3 * scale
        marks.append(f'<text x="{x:.1f}" y="{top + 14}">{i * step:g} ms</text>')
    return "".join(marks)
