"""Writes docs/models.md from a record of the sweep: what is supported, what is refused, and why.

python benchmarks/families/page.py benchmarks/results/families-....csv > docs/models.md
"""

from __future__ import annotations

import collections
import csv
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

#: Kinds of modes, by the beginnings of their names; a kind is refused where all its modes are.
KINDS: dict[str, tuple[str, ...]] = {
    "trees": ("tree", "grown tree", "static tree"),
    "static caches": ("static plain", "static chain", "generate_fn static"),
    "early exit": ("early exit",),
    "chains, and drafters of any kind": (
        "chain", "gamma", "n-gram", "lookup", "aggressive", "uniform", "hierarchy", "stack",
    ),
    "plain decoding (`draft=None`)": ("plain",),
    "`hf.generate_fn`": ("generate_fn 1", "generate_fn plain", "generate_fn ragged"),
}  # fmt: skip
WHY = {
    "trees": "The nodes of a tree lie side by side in the cache. A model must be able to take "
    "their mask (4-D) and their positions; one with a window, with ALiBi, or that counts its "
    "positions in cache slots, would see its own past at wrong distances.",
    "static caches": "A cache of one size is given to the model whole, under a mask. A model that "
    "counts positions in slots of the cache, or that keeps more than keys and values, cannot be "
    "run so.",
    "early exit": "The drafter runs the first layers of the target: it must have one list of "
    "layers, and be a causal model.",
}

INTRODUCTION = """\
# Which models can be used

`specdec_ext.generate`, `specdec_ext.hf.generate_fn` and `encoded()` take models of Hugging Face
transformers as they are. Which names may come is written nowhere in the code: what a model can do
with its cache is found out by asking it. At the first generation a short text is run through the
model in the ways that will be needed (with a hole in the cache, shifted, as a tree, over a static
cache), and the answers are compared with those of a plain run. So a model that is not named below
is tried in the same way. What a model does not understand is refused with a `ValueError` that names
the model and the reason; batches of models whose rows cannot share a cache are run row by row.

The lists below come from a sweep over the model families of transformers {transformers} that can be
built small, with random weights, in {modes} ways of running:

{listed}

Each text was compared with that of the model's own uncached, unpadded forward pass of one row.
`python benchmarks/families` runs these and more again; the record is
[{record}](../benchmarks/results/{record}). A name behind a colon is a variant of a configuration;
"encoded" is the encoder-decoder, run through `encoded()`.
"""


def refused_kinds(cells: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Return the kinds of modes all of which are refused to a family."""
    verdicts = collections.defaultdict(set)
    for cell in cells:
        for kind, beginnings in KINDS.items():
            if cell["mode"].startswith(beginnings) and cell["verdict"] != "n/a":
                verdicts[kind].add(cell["verdict"])
    return tuple(kind for kind in KINDS if verdicts[kind] == {"refused"})


def render(records: list[dict[str, str]], record: str) -> str:
    """Return the page for a record's cells."""
    families: dict[str, list[dict[str, str]]] = collections.defaultdict(list)
    for cell in records:
        families[cell["family"]].append(cell)
    built = {n: c for n, c in families.items() if c[0]["verdict"] != "not built"}
    groups: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for name, cells in built.items():
        groups[refused_kinds(cells)].append(name)
    modes = dict.fromkeys(cell["mode"] for cells in built.values() for cell in cells)
    modes.pop("all", None)  # a family of which nothing came
    text = [
        INTRODUCTION.format(
            transformers=records[0]["transformers"],
            modes=len(modes),
            listed=", ".join(modes) + ".",
            record=record,
        )
    ]
    for kinds in sorted(groups, key=lambda k: (len(k), -len(groups[k]))):
        names = groups[kinds]
        if not kinds:
            title = "Right in every way of running"
        elif len(kinds) >= len(KINDS) - 2 and KINDS_OF_ALL <= set(kinds):
            title = "Refused altogether"
        else:
            title = f"Right, but refused: {', '.join(kinds)}"
        text += [f"## {title}", "", f"{len(names)}: {', '.join(f'`{n}`' for n in names)}.", ""]
        if title == "Refused altogether":
            text += [f"- `{n}`: {_reason(built[n])}" for n in names] + [""]
    text += ["## Why", ""]
    text += [f"- **{kind}**: {why}" for kind, why in WHY.items()] + [""]
    odd = [
        cell
        for cells in built.values()
        for cell in cells
        if cell["verdict"] in ("host", "tie", "WRONG", "crash")
    ]
    if odd:
        text += [
            "## What is not plainly right or refused", "",
            "\"host\" is a text that transformers itself gives with a cache and that differs from "
            "its own uncached pass; \"n/a\" is what transformers cannot do without us.", "",
        ]  # fmt: skip
        seen = set()
        for cell in odd:
            key = cell["family"], cell["verdict"]
            if key not in seen:
                seen.add(key)
                where = [c["mode"] for c in odd if (c["family"], c["verdict"]) == key]
                text.append(f"- `{key[0]}`, {key[1]}: {', '.join(where)}")
        text.append("")
    text += ["## Not tried", "", "Transformers could not make a small model of these.", ""]
    text += [f"- `{n}`: {c[0]['detail']}" for n, c in families.items() if n not in built]
    return "\n".join(text).rstrip() + "\n"


KINDS_OF_ALL = {"chains, and drafters of any kind", "plain decoding (`draft=None`)"}


def _reason(cells: list[dict[str, str]]) -> str:
    """Return what a family's refusals say, without the type of the error."""
    said = next(cell["detail"] for cell in cells if cell["verdict"] == "refused")
    return said.partition(": ")[2].removeprefix("generate: ")


def main() -> None:
    """Print the page of the record that is named."""
    path = Path(sys.argv[1])
    with path.open(newline="") as file:
        print(render(list(csv.DictReader(file)), path.with_suffix(".md").name), end="")


if __name__ == "__main__":
    main()
