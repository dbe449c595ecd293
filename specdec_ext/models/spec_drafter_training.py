"""What a Spec-Drafter is trained with: masked blocks, glancing, the loss.

The objective is that of Xia et al. (arXiv 2203.16487), section 3.1.3. A random prefix of the target
text is kept, k [MASK] slots stand behind it, and their tokens are predicted at once
(`masked_block`, `spec_drafter_loss`). Training is eased by the glancing strategy of Qian et al.
(arXiv 2008.07905): some slots show their token, as many as the drafter still gets wrong, times a
ratio that falls on the way (`glance`, `glancing_ratio`).

The texts had best be the target's own: the paper trains on what the target writes with beam 5
(sequence-level distillation). ``python benchmarks/pair/seq2seq drafter`` is a training that uses
all of this; optimiser, schedule and averaging (appendix A) are its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ..decoding.checks import integer, number_in
from .reduced import entries_of_tokens
from .spec_drafter import MASKED, SpecDrafter

__all__ = [
    "IGNORED",
    "MaskedBlock",
    "glance",
    "glancing_ratio",
    "masked_block",
    "sample_prefix_lengths",
    "spec_drafter_loss",
]

#: In labels and targets: no token.
IGNORED = -100


class MaskedBlock(NamedTuple):
    """Prefixes of texts, and what comes behind them.

    Attributes
    ----------
    prefix_ids : Tensor
        ``[B, n]`` int64: the decoder's start token and y_1 .. y_p, then anything.
    prefix_lengths : Tensor
        ``[B]`` int64, p + 1.
    targets : Tensor
        ``[B, k]`` int64, y_(p+1) .. y_(p+k); `IGNORED` behind the text's end.
    """

    prefix_ids: Tensor
    prefix_lengths: Tensor
    targets: Tensor


def sample_prefix_lengths(lengths: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw the length of each text's prefix.

    Parameters
    ----------
    lengths : Tensor
        ``[B]`` int64, m: the texts' tokens, the end token included, at least 1.
    generator : torch.Generator, optional
        On the device of ``lengths``. None: torch's own.

    Returns
    -------
    Tensor
        ``[B]`` int64, p, uniform on 0 <= p < m.

    Examples
    --------
    >>> sample_prefix_lengths(torch.tensor([1, 1]))
    tensor([0, 0])
    """
    drawn = torch.rand(
        lengths.shape, dtype=torch.float64, device=lengths.device, generator=generator
    )
    return (drawn * lengths).long()


def masked_block(
    labels: Tensor, prefix_lengths: Tensor, block_size: int, start_token: int
) -> MaskedBlock:
    """Cut texts behind their prefixes: what stays, and what k [MASK] slots stand for (eq. 5-6).

    Parameters
    ----------
    labels : Tensor
        ``[B, L]`` int64, the texts with their end tokens, then `IGNORED`.
    prefix_lengths : Tensor
        ``[B]`` int64, p, each less than its text's length.
    block_size : int
        k. There are always k slots, as there are when drafts are made. Where p + k > m the sum of
        equation 5 ends at m: the slots behind the text's end have no target.
    start_token : int
        The decoder's.

    Returns
    -------
    MaskedBlock

    Examples
    --------
    >>> labels = torch.tensor([[5, 6, 7, 1], [8, 1, IGNORED, IGNORED]])
    >>> block = masked_block(labels, torch.tensor([2, 0]), block_size=3, start_token=0)
    >>> block.prefix_ids.tolist(), block.prefix_lengths.tolist()
    ([[0, 5, 6], [0, 8, 1]], [3, 1])
    >>> block.targets.tolist()
    [[7, 1, -100], [8, 1, -100]]
    """
    longest = int(prefix_lengths.max())
    start = labels.new_full((len(labels), 1), start_token)
    prefix_ids = torch.cat([start, labels[:, :longest].clamp(min=0)], 1)
    padded = torch.nn.functional.pad(labels, (0, block_size), value=IGNORED)
    columns = prefix_lengths[:, None] + torch.arange(block_size, device=labels.device)
    return MaskedBlock(prefix_ids, prefix_lengths + 1, padded.gather(1, columns))


def glancing_ratio(progress: float, first: float = 0.5, last: float = 0.3) -> float:
    """Return the share of wrong tokens that are shown, which falls linearly in a training.

    Parameters
    ----------
    progress : float
        How much of the training is done, in [0, 1].
    first, last : float
        At its two ends. The defaults are those of Qian et al. (section 4.1) and of the published
        code of Xia et al., who print none.

    Raises
    ------
    ValueError
        A progress outside [0, 1], or a ratio outside [0, 1).

    Examples
    --------
    >>> [round(glancing_ratio(progress), 3) for progress in (0.0, 0.25, 1.0)]
    [0.5, 0.45, 0.3]
    """
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"glancing_ratio: progress must be in [0, 1], got {progress}")
    for name, ratio in (("first", first), ("last", last)):
        if not 0.0 <= ratio < 1.0:
            raise ValueError(f"glancing_ratio: {name} must be in [0, 1), got {ratio}")
    return first + (last - first) * progress


def glance(
    targets: Tensor,
    predictions: Tensor,
    ratio: float,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose the slots that show their tokens: glancing sampling.

    The number is ratio * d, rounded down, where d is the Hamming distance of predictions and
    targets (Qian et al., eq. 5-6); which slots these are is drawn uniformly from those that have a
    target, right or wrong. With a ratio under 1 some slot of a text stays masked.

    Parameters
    ----------
    targets : Tensor
        ``[B, k]`` int64, `IGNORED` where there is none.
    predictions : Tensor
        ``[B, k]`` int64, the likeliest tokens where all slots are masked.
    ratio : float
        In [0, 1).
    generator : torch.Generator, optional
        On the tensors' device. None: torch's own.

    Returns
    -------
    Tensor
        ``[B, k]`` int64, ``block_ids`` of `SpecDrafter`: the target where the slot shows it,
        elsewhere `MASKED`.

    Examples
    --------
    Four of five are wrong, of which half are shown:

    >>> targets = torch.tensor([[4, 5, 6, 7, 1, IGNORED]])
    >>> predictions = torch.tensor([[4, 9, 9, 9, 9, 9]])
    >>> int((glance(targets, predictions, 0.5) != MASKED).sum())
    2
    """
    exists = targets != IGNORED
    distance = ((predictions != targets) & exists).sum(1, keepdim=True)
    number = (ratio * distance.double() + 1e-9).floor()  # .3 * 10 may come out under 3
    order = torch.rand(targets.shape, device=targets.device, generator=generator)
    rank = order.masked_fill(~exists, 2.0).argsort(1).argsort(1)
    return torch.where(rank < number, targets, MASKED)


def spec_drafter_loss(
    model: SpecDrafter,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    *,
    ratio: float = 0.0,
    label_smoothing: float = 0.0,
    prefixes: int = 1,
    slot_decay: float = 1.0,
    prefix_weight: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the loss of a batch: equation 5 behind a random prefix of each text, or several.

    It is the negative log-probability of the tokens behind the slots that are masked, as a mean
    over the tokens of the batch (the paper prints the sum of one text). Slots that show their token
    are not predicted, nor are tokens that are none of the drafter's, where its vocabulary is
    reduced; a batch without any other has a loss of 0.

    Equation 5 asks for all k tokens of a block alike, and a draft is accepted up to its first wrong
    token: the first slots decide what it is worth, and are a small part of the loss. Two options
    that the paper does not have ask for more of them, for trainings that are short.

    Parameters
    ----------
    model : SpecDrafter
        Its decoder runs twice if ``ratio`` is not 0, the first time without gradients; its encoder
        runs once.
    input_ids : Tensor
        ``[B, S]`` int64, the sources.
    attention_mask : Tensor or None
        ``[B, S]``, zeros at padding of the sources.
    labels : Tensor
        ``[B, L]`` int64, the texts with their end tokens, then `IGNORED`.
    ratio : float
        The glancing ratio, in [0, 1); 0: no glancing. See `glancing_ratio`.
    label_smoothing : float
        As of `torch.nn.functional.cross_entropy`; .1 in the paper.
    prefixes : int
        Prefixes drawn of each text, 1 in the paper. The encoder, the larger part of a Spec-Drafter,
        runs once for all of them, so that several learn more in the same time.
    slot_decay : float
        Slot i (from 1) counts ``slot_decay ** (i - 1)`` in the mean, in (0, 1]; 1, the paper's: all
        alike. (Cai et al., "Medusa", arXiv 2401.10774, section 2.2, weigh their heads so, by .8.)
    prefix_weight : float
        0, the paper's, or the weight of a second mean that is added: the negative log-probability
        of each of the prefix's tokens behind those before it, and of the one behind the prefix, as
        in the training of an autoregressive model. It costs no more than the output layer for
        these, and teaches the decoder to read the source at every token of the text. The outputs
        are not used for drafts.
    generator : torch.Generator, optional
        For prefixes and glancing, on the device of ``labels``. None: torch's own.

    Returns
    -------
    Tensor
        A float32 scalar.

    Raises
    ------
    ValueError
        No prefix; ``slot_decay`` outside (0, 1], or a negative ``prefix_weight``.

    Examples
    --------
    >>> from specdec_ext.models.spec_drafter import SpecDrafterConfig
    >>> config = SpecDrafterConfig(
    ...     vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=1, block_size=5
    ... )
    >>> model = SpecDrafter(config)
    >>> source, labels = torch.tensor([[7, 8, 9, 1]]), torch.tensor([[9, 8, 7, 1]])
    >>> loss = spec_drafter_loss(model, source, None, labels, ratio=0.5, label_smoothing=0.1)
    >>> loss.backward()
    """
    integer("spec_drafter_loss: prefixes", prefixes, low=1)
    if not 0.0 < slot_decay <= 1.0:
        raise ValueError(f"spec_drafter_loss: slot_decay must be in (0, 1], got {slot_decay}")
    number_in("spec_drafter_loss: prefix_weight", prefix_weight, 0)
    encoder = model.get_encoder()
    states = encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    if prefixes > 1:
        labels, states = (whole.repeat_interleave(prefixes, 0) for whole in (labels, states))
        if attention_mask is not None:
            attention_mask = attention_mask.repeat_interleave(prefixes, 0)
    block = masked_block(
        labels,
        sample_prefix_lengths((labels != IGNORED).sum(1), generator),
        model.config.block_size,
        model.config.decoder_start_token_id,
    )
    exists = block.targets != IGNORED

    def predict(block_ids: Tensor, slots: Tensor) -> Tensor:
        logits: Tensor = model(
            attention_mask=attention_mask,
            prefix_ids=block.prefix_ids,
            prefix_lengths=block.prefix_lengths,
            block_ids=block_ids,
            slots=slots,
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
        ).logits
        return logits

    block_ids = torch.full_like(block.targets, MASKED)
    ids, vocabulary = model.draft_token_ids, model.config.vocab_size
    if ratio > 0.0:
        with torch.no_grad():
            best = predict(block_ids, exists).argmax(-1)
        guessed = block.targets.masked_scatter(exists, best if ids is None else ids[best])
        block_ids = glance(block.targets, guessed, ratio, generator)
    wanted = entries_of_tokens(block.targets, ids, vocabulary, none=IGNORED)
    asked = (block_ids == MASKED) & (wanted != IGNORED)
    slots = torch.arange(wanted.shape[1], dtype=torch.float64, device=wanted.device)
    shares = _shares(slot_decay**slots * asked)
    if prefix_weight > 0.0:
        width = block.prefix_ids.shape[1]
        own = entries_of_tokens(labels[:, :width], ids, vocabulary, none=IGNORED)
        known = torch.arange(width, device=wanted.device) < block.prefix_lengths[:, None]
        known &= own != IGNORED
        wanted = torch.cat([own, wanted], 1)
        shares = torch.cat([prefix_weight * _shares(known.double()), shares], 1)
        asked = torch.cat([known, asked], 1)
    losses = torch.nn.functional.cross_entropy(
        predict(block_ids, asked).float(),
        wanted[asked],
        label_smoothing=label_smoothing,
        reduction="none",
    )
    return (losses * shares[asked]).sum()


def _shares(weights: Tensor) -> Tensor:
    """Return float64 weights as parts of their sum, in float32; zeros where all are 0."""
    return (weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)).float()
