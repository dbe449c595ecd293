"""Figure 3 of Xia et al. (arXiv 2203.16487): where a block's slots look in the source.

The paper's reason for a block drafter of its own: each drafted token has an attention query of its
own, and looks where the autoregressive decoder looks for that token. Decoding heads share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from pair.seq2seq.distillation import write_targets
from torch import Tensor, nn

from tables.decode import PLAIN
from tables.quality import mean_of
from tables.shared import Bench, Column, Result
from tables.xia import first_drafter

BLOCK = "block"


class Maps(NamedTuple):
    """Cross attention for the first tokens of a text, ``[n, S]``; every row sums to 1."""

    decoder: Tensor
    block: Tensor


@contextmanager
def weights_of(attention: Any) -> Iterator[list[Tensor]]:
    """Collect an attention layer's weights, ``[B, heads, n, S]`` of each call.

    Only the plain implementation returns them.
    """
    found: list[Tensor] = []
    before = attention.config._attn_implementation
    handle = attention.register_forward_hook(lambda _, given, output: found.append(output[2]))
    attention.config._attn_implementation = "eager"
    try:
        yield found
    finally:
        attention.config._attn_implementation = before
        handle.remove()


def cross_attention(decoder: nn.Module, call: Callable[[], Any]) -> Tensor:
    """Return the last layer's cross attention in a call on one text, averaged over heads."""
    layers: Any = decoder.block
    with weights_of(layers[-1].layer[1].EncDecAttention) as found:
        call()
    return found[0][0].mean(0)


def maps_of(target: Any, drafter: Any, source: list[int], text: list[int]) -> Maps:
    """Read a text by the target, and draft its beginning as a block behind nothing."""
    ids = torch.tensor([source], device=target.device)
    start = torch.full_like(ids[:, :1], target.config.decoder_start_token_id)
    read = torch.cat([start, torch.tensor([text[:-1]], dtype=ids.dtype, device=ids.device)], 1)
    of_decoder = cross_attention(
        target.decoder, lambda: target(input_ids=ids, decoder_input_ids=read)
    )
    of_block = cross_attention(drafter.decoder, lambda: drafter(ids, prefix_ids=start))
    slots = of_block[-drafter.config.block_size :]  # before them stands the prefix
    length = min(len(of_decoder), len(slots))
    return Maps(of_decoder[:length], slots[:length])


def likeness(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the mean cosine of rows with their counterparts, and with all other rows (NaN: none).

    Parameters
    ----------
    one, other : Tensor
        ``[n, S]``.

    Returns
    -------
    same, others : float
    """
    cosines = nn.functional.normalize(one, dim=1) @ nn.functional.normalize(other, dim=1).T
    apart = ~torch.eye(len(cosines), dtype=torch.bool, device=cosines.device)
    return float(cosines.diagonal().mean()), float(cosines[apart].mean())


@torch.inference_mode()
def make(bench: Bench) -> Result:
    """Make the figure, and the same as numbers over all sentences."""
    name, drafter = first_drafter(bench)
    # Texts of at least two tokens: of a single one no two positions can be compared.
    pairs = bench.family.splits["test"].some(bench.options.sentences)
    written = write_targets(bench.target, pairs)
    texts = [(s, t) for s, t in zip(pairs.sources, written, strict=True) if len(t) > 1]
    if not texts:
        raise ValueError("xia_figure3: the target wrote no text of two tokens or more")
    every = [maps_of(bench.target, drafter, source, text) for source, text in texts]
    means = {
        "across": [likeness(maps.decoder, maps.block) for maps in every],
        PLAIN: [likeness(maps.decoder, maps.decoder) for maps in every],
        BLOCK: [likeness(maps.block, maps.block) for maps in every],
    }

    def scored(key: str, values: list[float]) -> dict[str, float]:
        score = mean_of(values)
        return {key: score.value, f"{key}_se": score.error}

    records: list[dict[str, Any]] = [
        {"way": way, "sentences": len(every)} | scored("among", [own for _, own in means[way]])
        for way in (PLAIN, BLOCK)
    ]
    records[1] |= scored("same", [own for own, _ in means["across"]])
    records[1] |= scored("other", [own for _, own in means["across"]])
    return Result(
        f"Cross attention (Xia et al., Figure 3): {bench.task}, target {bench.target_name}, "
        f"drafter {name}",
        [
            Column("way", "decoder"), Column("sentences", "texts", "d"),
            Column("same", "like the target's at the same place"),
            Column("other", "at other places"),
            Column("among", "rows among each other"),
        ],
        records,
        [
            "Means over texts of cosines between rows of cross attention (the last decoder layer, "
            "averaged over heads), standard errors in parentheses. A row says which source tokens "
            "a token looks at.",
            "The target reads its own greedy text; the block is the first one, drafted behind the "
            "start token, slot i beside token i. A drafter that looks where the target looks has "
            "more in the third column than in the fourth. Where all tokens shared one query, as "
            "with decoding heads, the last column would be 1.",
            "The picture is of the first text. The paper prints one of its own, and no numbers.",
        ],
        draw=lambda pyplot: draw(pyplot, bench, texts[0], every[0]),
    )  # fmt: skip


def draw(pyplot: Any, bench: Bench, text: tuple[list[int], list[int]], maps: Maps) -> Any:
    """Draw the two maps, one above the other, as the paper does."""
    columns, rows = ([bench.family.tokenizer.decode([t]) for t in ids] for ids in text)
    figure, panels = pyplot.subplots(2, 1, figsize=(8, 9))
    for axes, weights, title in zip(panels, maps, ("the target", "the block"), strict=True):
        axes.imshow(weights.float().numpy(), aspect="auto", cmap="viridis", vmin=0)
        axes.set_xticks(range(len(columns)), columns, rotation=60, fontsize=7)
        axes.set_yticks(range(len(weights)), rows[: len(weights)], fontsize=7)
        axes.set_title(title, fontsize=9)
    figure.tight_layout()
    return figure
