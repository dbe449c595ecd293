"""Spec-Drafters for a trained target: sizes, the objective, where they lie, tokens a call.

Xia et al. (arXiv 2203.16487): an encoder-decoder as wide as the target, with 12 encoder layers and
2 decoder layers, trained on what the target writes with beam 5, glancing, by the schedule of
appendix A. The objective is `specdec_ext.models.spec_drafter_training`; the rest of the training is
that of the other models here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import T5ForConditionalGeneration

import specdec_ext
from pair.seq2seq.data import BUCKETS, EOS_ID, Batch, Pairs, batch_of, in_order
from pair.seq2seq.models import model_folder
from pair.seq2seq.training import Options
from specdec_ext.decoding import BlockDrafter
from specdec_ext.decoding.encoder_decoder import encoded
from specdec_ext.models.spec_drafter import SpecDrafter, SpecDrafterConfig
from specdec_ext.models.spec_drafter_training import glancing_ratio, spec_drafter_loss

ROWS = 16
KIND = "drafters"  # the folder in which they lie beside other models
BETA, TAU = 3, 1.0  # Spec-Verification in the paper's Table 1

# Of the target; everything else is the drafter's own.
SHARED = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_heads",
    "feed_forward_proj",
    "pad_token_id",
    "eos_token_id",
    "decoder_start_token_id",
)


@dataclass(frozen=True)
class DrafterOptions(Options):
    """Options of a training, with those of a Spec-Drafter.

    ``first_ratio`` and ``last_ratio`` are those of glancing at the two ends of the training; a text
    is learned behind so many random ``prefixes`` in a step; ``slot_decay`` and ``prefix_weight``
    are those of `spec_drafter_loss`; so many of the texts' commonest tokens are the drafter's
    ``vocabulary`` (None: all tokens); ``written`` sources have the target's own texts, from a
    search with ``beams``.
    """

    first_ratio: float = 0.5
    last_ratio: float = 0.3
    prefixes: int = 1
    slot_decay: float = 1.0
    prefix_weight: float = 0.0
    vocabulary: int | None = None
    written: int = 0
    beams: int = 5


def build_drafter(
    target: T5ForConditionalGeneration,
    *,
    block: int,
    encoder_layers: int,
    decoder_layers: int,
    dropout: float,
    seed: int,
    from_target: bool,
) -> SpecDrafter:
    """Return a new drafter as wide as its target; ``from_target``: with the target's encoder."""
    torch.manual_seed(seed)
    own = {
        "block_size": block,
        "num_decoder_layers": decoder_layers,
        "dropout_rate": dropout,
    }
    if from_target:
        return SpecDrafter.from_target(target, num_layers=encoder_layers, **own)
    shared = {name: getattr(target.config, name) for name in SHARED}
    return SpecDrafter(SpecDrafterConfig(**shared, num_layers=encoder_layers, **own))


def frequent_tokens(pairs: Pairs, number: int) -> Tensor:
    """Return the tokens that come most often in the targets, as many as asked for, in order.

    Raises
    ------
    ValueError
        More than there are in them.
    """
    counts = torch.bincount(torch.tensor([token for text in pairs.targets for token in text]))
    there = int((counts > 0).sum())
    if not 1 <= number <= there:
        raise ValueError(f"--vocabulary must be in [1, {there}], the texts' tokens, got {number}")
    return counts.argsort(descending=True, stable=True)[:number].sort().values


def drafting_loss(
    model: SpecDrafter, batch: Batch, progress: float, options: DrafterOptions
) -> Tensor:
    """Return equation 5 on a batch, with the glancing of this part of the training."""
    with torch.autocast(batch.inputs.device.type, torch.bfloat16, enabled=options.bfloat16):
        return spec_drafter_loss(
            model,
            batch.inputs,
            batch.mask,
            batch.labels,
            ratio=glancing_ratio(progress, options.first_ratio, options.last_ratio),
            label_smoothing=options.label_smoothing,
            prefixes=options.prefixes,
            slot_decay=options.slot_decay,
            prefix_weight=options.prefix_weight,
        )


def load_drafter(work_folder: Path, name: str, **changes: Any) -> SpecDrafter:
    """Return a trained drafter in float32, in evaluation mode, on the CPU.

    ``changes`` of its configuration may be given.
    """
    folder = model_folder(work_folder, name, KIND)
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is missing: run `drafter --name {name}` first")
    return SpecDrafter.from_pretrained(folder, dtype=torch.float32, **changes).eval()


def tokens_per_call(
    target: T5ForConditionalGeneration, drafter: SpecDrafter, pairs: Pairs, rule: str
) -> float:
    """Return Tok., the paper's measure: tokens that a call of the target emits, over sentences.

    ``rule`` is "greedy" (vanilla verification) or "top_beta" (Spec-Verification, with beta 3 and
    tau 1).
    """
    tokens = calls = 0
    device = torch.device(target.device)
    relaxed = {"beta": BETA, "tau": TAU} if rule == "top_beta" else {}
    for rows in in_order(pairs, ROWS):
        batch = batch_of(pairs, rows, device)
        source = {"input_ids": batch.inputs, "attention_mask": batch.mask.long()}
        start = torch.full((len(rows), 1), target.config.decoder_start_token_id, device=device)
        _, statistics = specdec_ext.generate(
            encoded(target, **source),
            BlockDrafter(drafter, **source),
            start,
            gamma=drafter.config.block_size,
            max_new_tokens=BUCKETS[-1],
            eos_token_id=EOS_ID,
            rule=rule,
            **relaxed,
        )
        tokens += statistics.emitted
        calls += statistics.request_calls
    return tokens / calls
