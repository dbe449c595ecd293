"""Are the trained sizes fit for tables of speculative decoding? Measurements, and gates.

Losses and acceptance are measured on held-out sentences with the reference's own words as context;
quality on texts that the models write, greedily and, as the papers do, by a search with five beams.
A gate compares a measured figure with what the tables need: sizes that are better the larger they
are, drafts that are neither useless nor perfect, and a target that has learned its task, which the
search tells: greedy texts of a model this small run into loops, and say little of what it knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tables.quality import bleu, chrf
from torch import Tensor

from pair.measurement import acceptance_mass
from pair.seq2seq.data import IGNORED, Pairs, batch_of, in_order
from pair.seq2seq.distillation import ROWS, write_targets
from pair.seq2seq.models import Family
from pair.seq2seq.training import forward_logits

CPU = torch.device("cpu")

# Nats a token between a size and the next larger one.
LOSS_GAP = 0.03
ALPHA_RANGE = (0.35, 0.9)
# BLEU between the largest model and each of the two it must leave behind.
BLEU_GAP = 2.0

# Of the search whose texts BLEU is asked of.
BEAMS = 5

COPYING = "copying"


class Gate(NamedTuple):
    """A figure, the open interval it must be in, and what it is."""

    name: str
    value: float
    low: float
    high: float = float("inf")

    @property
    def passed(self) -> bool:
        """Whether the figure is inside."""
        return self.low < self.value < self.high

    def line(self) -> str:
        """Return the gate as a line of text."""
        wanted = f"more than {self.low}" if self.high == float("inf") else f"{self.low}-{self.high}"
        return f"{'PASS' if self.passed else 'FAIL'} {self.name}: {self.value:.3f}, {wanted} wanted"


@torch.no_grad()
def held_out(family: Family, names: list[str], pairs: Pairs) -> dict[str, dict[str, float]]:
    """Measure losses, and acceptance by the last model, after the references' own prefixes.

    Parameters
    ----------
    family : Family
        The models.
    names : list of str
        Which of them; the last one is the target of all others.
    pairs : Pairs
        Held-out pairs.

    Returns
    -------
    dict
        Of each name ``loss`` (cross-entropy in nats a token), ``alpha_t1`` and ``alpha_t0``:
        E[sum min(p, q)] at temperatures 1 and 0, over all target tokens (Leviathan et al.,
        Corollary 3.6).
    """
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in names}
    tokens = 0
    for rows in in_order(pairs, ROWS):
        batch = batch_of(pairs, rows, CPU)
        kept = batch.labels.ne(IGNORED)
        labels = batch.labels[kept]
        target: Tensor | None = None
        for name in reversed(names):
            logits = forward_logits(family.models[name], batch, bfloat16=False)[kept]
            target = logits if target is None else target
            loss = F.cross_entropy(logits, labels, reduction="sum")
            masses = [acceptance_mass(target, logits, t).double().sum() for t in (1.0, 0.0)]
            sums[name] += torch.stack([loss.double(), *masses])
        tokens += len(labels)
    figures = ("loss", "alpha_t1", "alpha_t0")
    return {name: dict(zip(figures, (sums[name] / tokens).tolist(), strict=True)) for name in names}


def scores(hypotheses: list[str], references: list[str]) -> dict[str, float]:
    """Return BLEU, its standard error, and chrF, all in percent."""
    score = bleu(hypotheses, references)
    return {"bleu": score.value, "bleu_error": score.error, "chrf": chrf(hypotheses, references)}


def quality(
    family: Family, names: list[str], pairs: Pairs, no_repeat_ngram: int = 0
) -> dict[str, dict[str, float]]:
    """Score each model's texts and copies of the source.

    Entries that begin with ``greedy_`` are of greedy texts, the others of those that a search with
    `BEAMS` beams finds, among all texts or among those that repeat no ``no_repeat_ngram`` tokens.
    """

    def read(rows: list[list[int]]) -> list[str]:
        texts: list[str] = family.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return texts

    references = read(pairs.targets)
    found = {COPYING: scores(read(pairs.sources), references)}
    for name in names:
        model = family.models[name]
        searched = scores(
            read(write_targets(model, pairs, BEAMS, no_repeat_ngram=no_repeat_ngram)), references
        )
        greedy = scores(read(write_targets(model, pairs)), references)
        found[name] = searched | {f"greedy_{key}": value for key, value in greedy.items()}
    return found


def measure(family: Family, sentences: int, no_repeat_ngram: int = 0) -> list[dict[str, Any]]:
    """Measure the sizes on the test split: losses on all of it, quality on some sentences.

    Parameters
    ----------
    family : Family
        With two sizes at least.
    sentences : int
        At most so many are translated, evenly spread over the documents.
    no_repeat_ngram : int
        If it is n > 0, the search leaves out texts in which n tokens in a row occur twice, as T5's
        own configuration has it (n = 3) for summaries. Greedy texts are left as they are.

    Returns
    -------
    list of dict
        A record for copying and one for each size, from the smallest.
    """
    names = list(family.models)
    if len(names) < 2:
        raise ValueError(f"two trained sizes are needed to compare them, got {names}")
    losses = held_out(family, names, family.splits["test"])
    written = quality(family, names, family.splits["test"].some(sentences), no_repeat_ngram)
    records: list[dict[str, Any]] = [{"model": COPYING, **written[COPYING]}]
    for name in names:
        parameters = family.models[name].num_parameters()
        records.append({"model": name, "parameters": parameters, **losses[name], **written[name]})
    return records


def gates(records: list[dict[str, Any]]) -> list[Gate]:
    """Return the gates of `measure`'s records."""
    copying, *sizes = records
    smallest, largest = sizes[0], sizes[-1]
    found = [
        Gate(
            f"held-out loss of {one['model']} less that of {next_['model']}",
            one["loss"] - next_["loss"],
            LOSS_GAP,
        )
        for one, next_ in zip(sizes, sizes[1:], strict=False)
    ]
    found += [
        Gate(f"alpha of {one['model']} at T = {t}", one[f"alpha_t{t}"], *ALPHA_RANGE)
        for one in sizes[:-1]
        for t in (1, 0)
    ]
    found += [
        Gate(
            f"BLEU, {BEAMS} beams, of {largest['model']} less that of {other['model']}",
            largest["bleu"] - other["bleu"],
            BLEU_GAP,
        )
        for other in (copying, smallest)
    ]
    return found


def table(records: list[dict[str, Any]], passed: Iterable[Gate]) -> str:
    """Return records and gates as Markdown."""
    columns = {
        "parameters": ",d",
        "loss": ".3f",
        "alpha_t1": ".3f",
        "alpha_t0": ".3f",
        "bleu": ".2f",
        "bleu_error": ".2f",
        "chrf": ".2f",
        "greedy_bleu": ".2f",
        "greedy_chrf": ".2f",
    }
    lines = [
        "| model | parameters | loss, nats a token | alpha, T = 1 | alpha, T = 0 | "
        f"BLEU, {BEAMS} beams | its standard error | chrF | greedy: BLEU | chrF |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        cells = [format(record[c], f) if c in record else "" for c, f in columns.items()]
        lines.append(f"| {record['model']} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {gate.line()}" for gate in passed)])
