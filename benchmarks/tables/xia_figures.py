"""Figures 5 and 6 of Xia et al. (arXiv 2203.16487): batches; the speed-up of sentences."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from pair.seq2seq.block_drafter import BETA, TAU
from pair.seq2seq.data import PAD_ID, padded

import specdec_ext
from specdec_ext.decoding import BlockDrafter
from specdec_ext.decoding.encoder_decoder import encoded
from tables.decode import PLAIN, decode, plain_way, start_ids
from tables.shared import Bench, Column, Result, Sentence
from tables.xia import first_drafter, relaxed, vanilla

BATCHES = (1, 2, 4, 8, 16)
VANILLA, RELAXED = "block, vanilla", f"block, beta {BETA}, tau {TAU:g}"
BINS = 12


def decoded_batch(bench: Bench, sentences: Sequence[Sentence], model: Any, rule: str) -> int:
    """Decode a batch, with the drafter ``model`` or plainly; return the number of tokens."""
    ids = padded([sentence.source for sentence in sentences], PAD_ID).to(bench.device)
    source = {"input_ids": ids, "attention_mask": ids.ne(PAD_ID).long()}
    found = specdec_ext.generate(
        encoded(bench.target, **source),
        None if model is None else BlockDrafter(model, **source),
        start_ids(bench.target, len(sentences)),
        gamma=1 if model is None else model.config.block_size,
        max_new_tokens=bench.options.tokens,
        rule=rule,
        **({"beta": BETA, "tau": TAU} if rule == "top_beta" else {}),
    )
    return found.statistics.emitted


def seconds_of(
    bench: Bench, sentences: Sequence[Sentence], model: Any, rule: str
) -> tuple[int, float]:
    """Decode a batch as `decoded_batch` does; return tokens and seconds."""
    begin = time.perf_counter()
    return decoded_batch(bench, sentences, model, rule), time.perf_counter() - begin


@torch.inference_mode()
def figure5(bench: Bench) -> Result:
    """Decode all sentences in batches of several sizes."""
    name, model = first_drafter(bench)
    ways = {PLAIN: (None, "greedy"), VANILLA: (model, "greedy"), RELAXED: (model, "top_beta")}
    # Of like length, so that a batch is not as slow as one long sentence in it.
    sentences = sorted(bench.sentences, key=lambda sentence: len(sentence.source))
    sizes = [size for size in BATCHES if size <= len(sentences)]
    sizes = sizes[-1:] if bench.options.quick else sizes
    records = []
    for size in sizes:
        batches = [sentences[k : k + size] for k in range(0, len(sentences), size)]
        for how in ways.values():
            seconds_of(bench, batches[0], *how)  # what happens once is not timed
        times: dict[str, list[tuple[int, float]]] = {way: [] for way in ways}
        for batch in batches:
            for way, how in ways.items():
                times[way].append(seconds_of(bench, batch, *how))
        for way, own in times.items():
            tokens, seconds = sum(n for n, _ in own), sum(s for _, s in own)
            records.append(
                {
                    "way": way,
                    "batch": size,
                    "latency": 1000 * statistics.median(s for _, s in own),
                    "throughput": tokens / seconds,
                }
            )
    return Result(
        f"Latency and throughput by batch (Xia et al., Figure 5): {bench.task}, target "
        f"{bench.target_name}, drafter {name}",
        [
            Column("way", "decoding"), Column("batch", "batch", "d"),
            Column("latency", "ms a batch, median", ".0f"),
            Column("throughput", "tokens a second", ".0f"),
        ],
        records,
        [
            "Batches of sentences of like length, encoders included. The paper's figure is of a "
            "GPU, where a larger batch costs little more time; on a CPU it costs nearly as much "
            "more as it brings.",
        ],
        draw=lambda pyplot: draw5(pyplot, records),
    )  # fmt: skip


def draw5(pyplot: Any, records: list[dict[str, Any]]) -> Any:
    """Draw throughput over latency, a line for each way, a point for each batch size."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for way in dict.fromkeys(record["way"] for record in records):
        own = [record for record in records if record["way"] == way]
        latencies, rates = ([record[key] for record in own] for key in ("latency", "throughput"))
        axes.plot(latencies, rates, marker="o", label=way)
        for record in own:
            axes.annotate(record["batch"], (record["latency"], record["throughput"]), fontsize=7)
    axes.set(xscale="log", xlabel="milliseconds a batch", ylabel="tokens a second")
    axes.legend(fontsize=8)
    return figure


def figure6(bench: Bench) -> Result:
    """Divide plain decoding's seconds by the block's, sentence by sentence."""
    name, model = first_drafter(bench)
    block = model.config.block_size
    ways = {
        PLAIN: plain_way(bench, 0.0),
        VANILLA: vanilla(bench, model, block),
        RELAXED: relaxed(bench, model, block),
    }
    runs = decode(bench, ways)
    number = len(bench.sentences)

    def rate(way: str, sentence: int) -> float:
        own = runs[way][sentence::number]
        return own[0].num_tokens / statistics.median(run.seconds for run in own)

    factors = {
        way: sorted(rate(way, k) / rate(PLAIN, k) for k in range(number))
        for way in (VANILLA, RELAXED)
    }
    records = [
        {
            "way": way,
            "least": own[0],
            "quarter": own[len(own) // 4],
            "median": statistics.median(own),
            "three_quarters": own[(3 * len(own)) // 4],
            "most": own[-1],
            "slower": sum(factor < 1 for factor in own),
            "sentences": number,
        }
        for way, own in factors.items()
    ]
    return Result(
        f"Speed-up of single sentences (Xia et al., Figure 6): {bench.task}, target "
        f"{bench.target_name}, drafter {name}",
        [
            Column("way", "decoding"), Column("least", "least"), Column("quarter", "a quarter"),
            Column("median", "median"), Column("three_quarters", "three quarters"),
            Column("most", "most"), Column("slower", "slower than plain", "d"),
            Column("sentences", "sentences", "d"),
        ],
        records,
        [
            "Tokens a second against plain decoding by the same loop, encoders included, one "
            "sentence at a time. The paper's figure is against 5 beams.",
        ],
        draw=lambda pyplot: draw6(pyplot, factors),
    )  # fmt: skip


def draw6(pyplot: Any, factors: dict[str, list[float]]) -> Any:
    """Draw histograms."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    most = max(max(own) for own in factors.values())
    for way, own in factors.items():
        axes.hist(own, bins=BINS, range=(0.0, most), alpha=0.6, label=way)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="times plain decoding", ylabel="sentences")
    axes.legend(fontsize=8)
    return figure
