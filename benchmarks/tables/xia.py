"""Tables of Xia et al. (arXiv 2203.16487), SpecDec: blocks drafted in one call of a Spec-Drafter.

They need a drafter of ``python benchmarks/pair/seq2seq drafter TASK``, in the folder of the task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pair.heads.evaluation import trained_heads
from pair.seq2seq.block_drafter import BETA, KIND, TAU, load_drafter
from pair.seq2seq.models import layers_of, model_folder

from specdec_ext.decoding import BlockDrafter, HeadsDrafter
from specdec_ext.models.heads import BlockwiseHeads
from specdec_ext.models.spec_drafter import SpecDrafter
from tables import hosts
from tables.costs import total
from tables.decode import PLAIN, Drafting, Way, decode, model_way, plain_way, way
from tables.quality import ROUGE_KINDS, bleu
from tables.rows import COUNTS, ENGLISH, QUALITY, ROUGE_COLUMNS, Measured, measure, texts
from tables.shared import Bench, Column, Result

BEAMS = 5
BEST_OF_BEAMS = f"transformers, {BEAMS} beams"
HOST = "transformers, greedy"
BLOCKS = (10, 25)
EVERY_BLOCK = (10, 15, 20, 25, 30)
HEADS = "heads"
TAUS, BETAS = (1.0, 2.0, 3.0, 4.0, 5.0), (3, 5)


class Printed(NamedTuple):
    """A row of the paper: Tok., BLEU, speed against 5 beams."""

    tokens: float | None
    bleu: float | None
    speed: float | None


# Table 1's targets: Transformer-base, and a second one with 12 encoder and 2 decoder layers.
BASE, DEEP = "6+6", "12+2"


def printed_table1(
    beams: float, greedy: float, heads: Sequence[float], blocks: Sequence[tuple[float, float]]
) -> dict[Any, Printed]:
    """Return a target's part of Table 1 in a direction, by ways to decode.

    ``beams`` and ``greedy`` are BLEU; ``heads`` the speeds of Blockwise Decoding with 10 and 25
    heads, which changes no text; ``blocks`` BLEU and speed of SpecDec with 10 and 25 tokens.
    """
    return {
        BEST_OF_BEAMS: Printed(1.0, beams, 1.0),  # by definition
        PLAIN: Printed(1.0, greedy, 1.1),
        **{
            (HEADS, block): Printed(None, greedy, speed)
            for block, speed in zip(BLOCKS, heads, strict=True)
        },
        **{block: Printed(None, *own) for block, own in zip(BLOCKS, blocks, strict=True)},
    }


# By whether a task was prepared with ``--reverse`` (German to English), and by target.
TABLE_1 = {
    (False, BASE): printed_table1(28.89, 28.73, (1.9, 1.6), ((28.90, 4.2), (28.93, 5.1))),
    (True, BASE): printed_table1(32.53, 32.18, (2.0, 1.7), ((32.61, 4.6), (32.55, 5.5))),
    (False, DEEP): printed_table1(29.13, 28.99, (1.6, 1.4), ((29.08, 2.7), (29.13, 3.0))),
    (True, DEEP): printed_table1(32.45, 32.08, (1.7, 1.5), ((32.40, 3.0), (32.48, 3.3))),
}
# Tables 3 and 4 are of the development set, Table 3 with beta 3 and tau 1.
TABLE_3 = {
    10: Printed(6.05, 26.80, 3.99),
    15: Printed(6.93, 27.12, 4.54),
    20: Printed(7.41, 27.05, 4.72),
    25: Printed(7.89, 26.97, 5.04),
    30: Printed(7.67, 26.89, 4.82),
}
VANILLA_4 = Printed(6.41, 26.62, None)
TABLE_4 = {
    (3, 1.0): Printed(7.89, 26.97, 5.0),
    (3, 2.0): Printed(8.75, 26.84, None),
    (3, 3.0): Printed(9.51, 26.71, None),
    (3, 4.0): Printed(10.11, 26.60, None),
    (3, 5.0): Printed(10.46, 26.58, None),
    (5, 1.0): Printed(7.92, 26.88, None),
    (5, 2.0): Printed(8.83, 26.79, None),
    (5, 3.0): Printed(9.64, 26.68, None),
    (5, 4.0): Printed(10.63, 26.59, None),
    (5, 5.0): Printed(11.01, 26.58, 6.8),
}
# Table 6: BLEU against what the target writes greedily, beta 3 and tau 1.
RELATIVE_BLEU = 86.52

TOKENS = Column("tokens_a_call", "Tok.")
COLUMNS = [
    Column("way", "decoding"),
    TOKENS,
    Column("bleu", "BLEU", ".1f"),
    Column("relative_bleu", "BLEU against greedy", ".1f"),
    Column("draft_milliseconds", "t_d, ms"),
    Column("speed", "speed"),
    Column("of_beams", f"against {BEAMS} beams"),
]
PAPER_COLUMNS = [
    Column("paper_tokens", "paper: Tok."),
    Column("paper_bleu", "BLEU"),
    Column("paper_speed", "speed"),
]
NOTES = [
    *COUNTS,
    QUALITY,
    "*Tok.* counts the tokens that a target call emits, its own included, as the paper's does "
    "(plain decoding has 1). *t_d* is the time of drafting a round. *BLEU against greedy* scores a "
    "text against what the target writes greedily (the paper's Table 6, "
    f"{RELATIVE_BLEU} at beta 3 and tau 1).",
    "`vanilla` verifies by equality with the target's choice, and changes no text. The others are "
    "Spec-Verification: a draft token is kept if it is among the target's beta likeliest, within "
    "tau nats of the likeliest (equations 8 to 10), and the text may change.",
    "The paper's figures: WMT14 English to German, Transformer-base (in Table 1, German to English "
    f"beside a task that was prepared with --reverse, and its second target beside one of {DEEP} "
    "layers), fairseq on a P100; its speed is against 5 beams. Its non-autoregressive peers (GLAT, "
    "DAT, CMLM, RewriteNAT) and COMET are out of reach here.",
]


def drafters_of(bench: Bench) -> dict[str, SpecDrafter]:
    """Load all drafters that were trained for the task.

    Raises
    ------
    ValueError
        There are none.
    """
    folder = bench.options.task / KIND
    names = sorted(path.parent.name for path in folder.glob("*/training.json"))
    if not names:
        raise ValueError(
            f"no drafter is in {folder}: run `python benchmarks/pair/seq2seq drafter` first"
        )
    return {name: load_drafter(bench.options.task, name) for name in names}


def training_of(folder: Path) -> dict[str, Any]:
    """Return what a drafter or heads began with, and the steps of their training."""
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    start = facts["options"].get("start") or "random weights"
    return {"start": start, "steps": facts["steps"]}


def blockwise_heads(bench: Bench) -> dict[Path, BlockwiseHeads]:
    """Load the target's blockwise decoding heads that were trained, by their folder."""
    found = {
        folder: BlockwiseHeads.from_pretrained(folder).eval()
        for folder in trained_heads(bench.options.heads)
        if folder.name.startswith("blockwise-")
    }
    return dict(sorted(found.items(), key=lambda entry: entry[1].config.num_heads))


def first_drafter(bench: Bench) -> tuple[str, SpecDrafter]:
    """Return the drafter of the command's default name, else the first one."""
    every = drafters_of(bench)
    name = "spec-drafter" if "spec-drafter" in every else next(iter(every))
    return name, every[name]


def placed_drafter(bench: Bench) -> tuple[str, SpecDrafter]:
    """Return the first drafter, and move it and the target to a GPU where there is one."""
    name, model = first_drafter(bench)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench.target.to(device)
    return name, model.to(device)


def named_heads(number: int) -> str:
    """Return what rows of so many decoding heads are called."""
    return f"{number} blockwise heads"


def by_block(model: SpecDrafter | BlockwiseHeads, block: int) -> Drafting:
    """Draft blocks of so many tokens, of heads all that they have."""
    if isinstance(model, BlockwiseHeads):
        return lambda reading: HeadsDrafter(model)
    return lambda reading: BlockDrafter(model, reading.input_ids, block_size=block)


def vanilla(bench: Bench, model: SpecDrafter | BlockwiseHeads, block: int) -> Way:
    """Return drafting in blocks, verified by equality with the target's choice."""
    return way(bench, by_block(model, block), gamma=block, rule="greedy", temperature=0.0)


def relaxed(
    bench: Bench,
    model: SpecDrafter | BlockwiseHeads,
    block: int,
    beta: int = BETA,
    tau: float = TAU,
) -> Way:
    """Return drafting in blocks under Spec-Verification."""
    return way(
        bench, by_block(model, block), gamma=block, rule="top_beta", beta=beta, tau=tau,
        temperature=0.0,
    )  # fmt: skip


def chosen(bench: Bench, sizes: tuple[int, ...], model: SpecDrafter) -> list[int]:
    """Return the block sizes that a model can draft, at least its own."""
    own = model.config.block_size
    found = [size for size in sizes if size < own] + [own]
    return found[-1:] if bench.options.quick else found


def measured(bench: Bench, alike: Mapping[str, Way], others: Mapping[str, Way]) -> Measured:
    """Decode in all ways, and add to the records what these tables show beside the others'."""
    found = measure(bench, alike, 0.0, others=others)
    number = len(bench.sentences)
    greedy = texts(bench, [run.tokens[0] for run in found.runs[PLAIN][:number]])
    speeds = {record["way"]: record["speed"] for record in found.records}
    for record in found.records:
        runs = found.runs[record["way"]]
        score = bleu(texts(bench, [run.tokens[0] for run in runs[:number]]), greedy)
        record |= {"relative_bleu": score.value, "relative_bleu_se": score.error}
        if BEST_OF_BEAMS in speeds:
            record["of_beams"] = record["speed"] / speeds[BEST_OF_BEAMS]
        counts = [run.statistics for run in runs if run.statistics is not None]
        if counts and counts[0].drafted:
            drafting = sum(count.seconds["draft"] for count in counts)
            rounds = sum(count.rounds for count in counts)
            record["draft_milliseconds"] = 1000 * drafting / rounds
    return found


def beside(record: dict[str, Any], printed: Printed | None) -> None:
    """Put a row of the paper into a record."""
    if printed is not None:
        for name, value in printed._asdict().items():
            if value is not None:
                record[f"paper_{name}"] = value


def tokens_bar(found: Measured, strict: str, relaxed_: str) -> str:
    """Say whether Spec-Verification has at least as many tokens a call on all sentences together.

    Of a single sentence it may have fewer: it goes on from another text.
    """
    own = {record["way"]: record.get("tokens_a_call") for record in found.records}
    verdict = "PASS" if own[relaxed_] >= own[strict] else "FAIL"
    return (
        f"Tok. of {relaxed_}: {own[relaxed_]:.2f}, of {strict}: {own[strict]:.2f}; at least as "
        f"many wanted: {verdict}"
    )


# ---- Table 1, and Table 14's comparison with autoregressive drafts -------------------------------


def same_latency(bench: Bench, model: SpecDrafter, block: int) -> dict[str, int]:
    """Return for each smaller model how many tokens it drafts in the time of a block, at least 1.

    Measured on a few sentences of the validation split.
    """
    ways = {"block": vanilla(bench, model, block)} | {
        name: model_way(bench, draft, 5, 0.0) for name, draft in bench.drafts.items()
    }
    runs = decode(bench, ways, sentences=bench.some("valid", 5))
    counts = {name: total(own) for name, own in runs.items()}
    block_seconds = counts["block"].seconds["draft"] / counts["block"].rounds
    return {
        name: max(
            1, round(block_seconds * counts[name].draft_calls / counts[name].seconds["draft"])
        )
        for name in bench.drafts
    }


def table1(bench: Bench) -> Result:
    """Decode with blocks, smaller models of the same latency, greedily and with beams."""
    name, model = first_drafter(bench)
    blocks, new = chosen(bench, BLOCKS, model), bench.options.tokens
    named: dict[str, Any] = {BEST_OF_BEAMS: BEST_OF_BEAMS, PLAIN: PLAIN}
    alike = {PLAIN: plain_way(bench, 0.0), HOST: hosts.way(bench.target, new)}
    others = {BEST_OF_BEAMS: hosts.way(bench.target, new, num_beams=BEAMS)}
    for heads in blockwise_heads(bench).values():
        number = heads.config.num_heads
        key = named_heads(number)
        alike[key], named[key] = vanilla(bench, heads, number), (HEADS, number)
    for block in blocks:
        alike[f"block of {block}, vanilla"] = vanilla(bench, model, block)
        key = f"block of {block}, beta {BETA}, tau {TAU:g}"
        others[key], named[key] = relaxed(bench, model, block), block
    strict, loose = f"block of {blocks[-1]}, vanilla", key
    models = same_latency(bench, model, blocks[-1])
    for size, gamma in models.items():
        alike[f"{size}, {gamma} tokens"] = model_way(bench, bench.drafts[size], gamma, 0.0)
    found = measured(bench, alike, others)
    printed = TABLE_1[
        bench.task == "translation-reverse", DEEP if layers_of(bench.target) == DEEP else BASE
    ]
    for record in found.records:
        beside(record, printed.get(named.get(record["way"], "")))
    own = {record["way"]: record["tokens_a_call"] for record in found.records if "alpha" in record}
    bars = [*found.bars, tokens_bar(found, strict, loose)]
    for size, gamma in models.items():
        other = own[f"{size}, {gamma} tokens"]
        bars.append(
            f"Tok. of a block, vanilla: {own[strict]:.2f}; of {size}, which drafts {gamma} tokens "
            f"in that time: {other:.2f}; more wanted: {'PASS' if own[strict] > other else 'FAIL'}"
        )
    return Result(
        f"Blocks by a Spec-Drafter (Xia et al., Tables 1 and 14): {bench.task}, target "
        f"{bench.target_name} of {layers_of(bench.target)} layers, drafter {name}",
        [*COLUMNS, *PAPER_COLUMNS], found.records,
        [
            *NOTES,
            "Blockwise heads (Stern et al., of `benchmarks/pair/heads train TASK --kind blockwise "
            "--heads K`) draft K tokens beyond the target's own, verified by equality, as "
            "everywhere in the paper's Table 1.",
            "Smaller models draft one token a call, as many as fit into the time that drafting a "
            "block takes on this machine. The paper's Table 14, on T5-XXL: such drafts 2.8 times "
            "(T5-small) and 1.6 times (T5-large) greedy decoding, a block of 25 4.9 times.",
        ],
        bars, found.faults, lambda pyplot: draw(pyplot, found.records),
    )  # fmt: skip


def draw(pyplot: Any, records: list[dict[str, Any]], score: str = "bleu") -> Any:
    """Draw a score of quality over speed."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for record in records:
        axes.errorbar(
            record["speed"], record[score], record[f"{score}_se"], record["speed_se"], fmt="o",
            capsize=2, label=record["way"],
        )  # fmt: skip
    axes.set(xlabel="times plain decoding", ylabel="BLEU" if score == "bleu" else "ROUGE-L")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure


# ---- Table 2 -------------------------------------------------------------------------------------

# Tok., BLEU, t_d in milliseconds, speed; drafters here stand beside them by name.
TABLE_2 = {
    "spec-drafter": (8.23, 28.93, 5.21, 5.1),
    "small": (7.05, 28.56, 2.29, 4.4),
    "balanced": (8.21, 28.95, 10.87, 4.0),
    HEADS: (2.32, 28.02, 0.81, 1.7),
}


def printed_table2(name: str) -> dict[str, float]:
    """Return the paper's row of a kind of drafter, as entries of a record."""
    keys = ("paper_tokens", "paper_bleu", "paper_milliseconds", "paper_speed")
    return dict(zip(keys, TABLE_2[name], strict=True)) if name in TABLE_2 else {}


def table2(bench: Bench) -> Result:
    """Compare all drafters that were trained for the task."""
    every = drafters_of(bench)
    others = {BEST_OF_BEAMS: hosts.way(bench.target, bench.options.tokens, num_beams=BEAMS)}
    known: dict[str, dict[str, Any]] = {}
    for folder, heads in blockwise_heads(bench).items():
        number = heads.config.num_heads
        others[named_heads(number)] = relaxed(bench, heads, number)
        known[named_heads(number)] = {
            "parameters": heads.num_parameters(), **training_of(folder), **printed_table2(HEADS)
        }  # fmt: skip
    for name, model in every.items():
        others[name] = relaxed(bench, model, model.config.block_size)
        known[name] = {
            "parameters": model.num_parameters(), "layers": layers_of(model),
            **training_of(model_folder(bench.options.task, name, KIND)), **printed_table2(name),
        }  # fmt: skip
    found = measured(bench, {PLAIN: plain_way(bench, 0.0)}, others)
    for record in found.records:
        record |= known.get(record["way"], {})
    return Result(
        f"Drafters (Xia et al., Table 2): {bench.task}, target {bench.target_name}",
        [
            COLUMNS[0], Column("parameters", "parameters", ",d"), Column("layers", "layers"),
            Column("start", "began with"), Column("steps", "steps", ",d"),
            *COLUMNS[1:], *PAPER_COLUMNS[:2], Column("paper_milliseconds", "t_d, ms"),
            PAPER_COLUMNS[2],
        ],
        found.records,
        [
            *NOTES,
            f"All under Spec-Verification, beta {BETA} and tau {TAU:g}. In the paper `small` lacks "
            "Principle I (narrower), `balanced` Principle II (as many decoder layers as encoder "
            "layers). Drafters here stand beside them by their names: `drafter --name small "
            "--encoder-layers 2 --decoder-layers 1`, `--name balanced` with as many. The paper's "
            "head-based drafter is that of Blockwise Decoding; how many heads it has is not "
            "said. *began with* "
            "says what of the target, or which drafter, and *steps* how long the training was.",
        ],
        found.bars, found.faults, lambda pyplot: draw(pyplot, found.records),
    )  # fmt: skip


# ---- Tables 3, 4 and 6 ---------------------------------------------------------------------------


def table3(bench: Bench) -> Result:
    """Decode with blocks of several sizes, all by one drafter."""
    name, model = first_drafter(bench)
    blocks = chosen(bench, EVERY_BLOCK, model)
    others = {f"k = {block}": relaxed(bench, model, block) for block in blocks}
    others[BEST_OF_BEAMS] = hosts.way(bench.target, bench.options.tokens, num_beams=BEAMS)
    found = measured(bench, {PLAIN: plain_way(bench, 0.0)}, others)
    by_way = {f"k = {block}": TABLE_3.get(block) for block in blocks}
    for record in found.records:
        beside(record, by_way.get(record["way"]))
    return Result(
        f"Sizes of a block (Xia et al., Table 3): {bench.task}, target {bench.target_name}, "
        f"drafter {name}",
        [*COLUMNS, *PAPER_COLUMNS], found.records,
        [
            *NOTES,
            f"beta {BETA}, tau {TAU:g}. One drafter, trained for blocks of "
            f"{model.config.block_size}, of whose slots the first k are used; the paper does not "
            "say whether it trained one for each k.",
        ],
        found.bars, found.faults, lambda pyplot: draw(pyplot, found.records),
    )  # fmt: skip


def table4(bench: Bench) -> Result:
    """Decode under Spec-Verification with several betas and taus."""
    name, model = first_drafter(bench)
    block = model.config.block_size
    pairs = [(beta, tau) for beta in BETAS for tau in TAUS]
    pairs = pairs[:1] if bench.options.quick else pairs
    keys = {f"beta {beta}, tau {tau:g}": (beta, tau) for beta, tau in pairs}
    strict = "vanilla"
    alike = {PLAIN: plain_way(bench, 0.0), strict: vanilla(bench, model, block)}
    others = {key: relaxed(bench, model, block, *keys[key]) for key in keys}
    found = measured(bench, alike, others)
    for record in found.records:
        record |= dict(zip(("beta", "tau"), keys.get(record["way"], ()), strict=False))
        beside(
            record,
            VANILLA_4
            if record["way"] == strict
            else TABLE_4.get(keys.get(record["way"], (0, 0.0))),
        )
    return Result(
        f"beta and tau (Xia et al., Tables 4 and 6): {bench.task}, target {bench.target_name}, "
        f"drafter {name}, blocks of {block}",
        [*COLUMNS[:-1], *PAPER_COLUMNS], found.records, NOTES,
        [*found.bars, *(tokens_bar(found, strict, key) for key in keys)], found.faults,
        lambda pyplot: draw4(pyplot, found.records),
    )  # fmt: skip


def draw4(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw Tok. and BLEU over tau, a line for each beta; dashed: the paper's."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4))
    for axes, key in zip(panels, ("tokens_a_call", "bleu"), strict=True):
        for beta in BETAS:
            own = [record for record in records if record.get("beta") == beta]
            taus = [record["tau"] for record in own]
            line = axes.errorbar(
                taus, [record[key] for record in own], [record[f"{key}_se"] for record in own],
                marker="o", capsize=2, label=f"beta {beta}",
            )  # fmt: skip
            printed = "paper_tokens" if key == "tokens_a_call" else "paper_bleu"
            axes.plot(taus, [record[printed] for record in own], "--", color=line[0].get_color())
        axes.set(xlabel="tau, nats", ylabel="Tok." if key == "tokens_a_call" else "BLEU")
    panels[0].legend(fontsize=8)
    return figure


# ---- Table 5 -------------------------------------------------------------------------------------

# ROUGE-1, ROUGE-2, ROUGE-L, speed: CNN/DailyMail, BART-base; the last row blocks of 25.
TABLE_5 = {
    BEST_OF_BEAMS: (43.08, 20.41, 40.15, 1.0),
    HOST: (43.00, 20.28, 39.96, 1.1),
    "block": (43.11, 20.43, 40.19, 5.1),
}


def table5(bench: Bench) -> Result:
    """Decode English texts with beams, greedily and in blocks, and score them by ROUGE.

    Raises
    ------
    ValueError
        A task whose texts are not English, which ROUGE is made for.
    """
    if bench.task not in ENGLISH:
        raise ValueError(
            f"xia5 scores English texts by ROUGE: the task must be one of {', '.join(ENGLISH)} "
            f"(--task build/seq2seq/summarisation), got {bench.task}"
        )
    name, model = first_drafter(bench)
    block, new = model.config.block_size, bench.options.tokens
    strict, loose = f"block of {block}, vanilla", f"block of {block}, beta {BETA}, tau {TAU:g}"
    alike = {
        PLAIN: plain_way(bench, 0.0),
        HOST: hosts.way(bench.target, new),
        strict: vanilla(bench, model, block),
    }
    others = {
        BEST_OF_BEAMS: hosts.way(bench.target, new, num_beams=BEAMS),
        loose: relaxed(bench, model, block),
    }
    found = measured(bench, alike, others)
    keys = [*(f"paper_{kind}" for kind in ROUGE_KINDS), "paper_speed"]
    for record in found.records:
        printed = TABLE_5.get("block" if record["way"] == loose else record["way"])
        if printed is not None:
            record |= dict(zip(keys, printed, strict=True))
    return Result(
        f"Summaries and other English texts (Xia et al., Table 5): {bench.task}, target "
        f"{bench.target_name}, drafter {name}",
        [
            COLUMNS[0], *ROUGE_COLUMNS, TOKENS, Column("speed", "speed"), COLUMNS[-1],
            *(Column(f"paper_{kind}", f"paper: {kind}") for kind in ROUGE_KINDS), PAPER_COLUMNS[2],
        ],
        found.records,
        [
            *COUNTS,
            "ROUGE is rouge-score's, means of sentences' F-measures in percent, with its stemmer.",
            "The paper's figures: CNN/DailyMail, BART-base, whose encoder its drafter begins with "
            "(here `drafter --from-target`), blocks of 25, speed against 5 beams. Here the target "
            f"was trained for the task alone; blocks of {block}.",
        ],
        [*found.bars, tokens_bar(found, strict, loose)],
        found.faults,
        lambda pyplot: draw(pyplot, found.records, "rougeL"),
    )  # fmt: skip
