"""The training of a draft on its target's own conversations and the laws that they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pair.distilled.texts import Answers
from specdec_ext.models.draft_llama import DraftLlama


class Conversation(NamedTuple):
    """One conversation: all its tokens, and the laws of those behind the prompt."""

    tokens: Tensor  # [n] int64
    prompt: int
    entries: Tensor  # [n - prompt, k] int64
    probs: Tensor  # [n - prompt, k] float32, at temperature 1
    temperature: float  # of the answer


class Batch(NamedTuple):
    """Conversations side by side, padded behind their ends.

    Attributes
    ----------
    tokens : Tensor
        ``[B, n]`` int64, the target's tokens.
    said : Tensor
        ``[B, n - 1]`` bool, which columns predict a token of the user's turn.
    answered : Tensor
        ``[B, n - 1]`` bool, which columns predict a token of the answer, whose law is known.
    entries, probs : Tensor
        ``[M, k]`` int64 and float32, these laws in the order of ``answered``.
    """

    tokens: Tensor
    said: Tensor
    answered: Tensor
    entries: Tensor
    probs: Tensor


def conversations(shards: Sequence[Answers]) -> list[Conversation]:
    """Take shards apart."""
    found = []
    for shard in shards:
        replies = (shard.lengths - shard.prompts).tolist()
        parts = zip(
            shard.tokens.long().split(shard.lengths.tolist()), shard.prompts.tolist(),
            shard.entries.long().split(replies), shard.log_probs.float().exp().split(replies),
            shard.temperatures.tolist(), strict=True,
        )  # fmt: skip
        found += [Conversation(*part) for part in parts]
    return found


def frequent_tokens(texts: Sequence[Conversation], number: int, vocabulary: int) -> Tensor:
    """Return the tokens that the target finds likeliest to come, summed over all its laws."""
    mass = torch.zeros(vocabulary, dtype=torch.float64)
    for text in texts:
        mass.index_add_(0, text.entries.flatten(), text.probs.flatten().double())
        mass.index_add_(0, text.tokens, torch.full(text.tokens.shape, 1e-3, dtype=mass.dtype))
    return mass.argsort(descending=True, stable=True)[:number].sort().values


def batch_of(texts: Sequence[Conversation]) -> Batch:
    """Put conversations side by side."""
    tokens = pad_sequence([text.tokens for text in texts], batch_first=True)
    column = torch.arange(1, tokens.shape[1])
    prompts = torch.tensor([[text.prompt] for text in texts])
    ends = torch.tensor([[len(text.tokens)] for text in texts])
    return Batch(
        tokens,
        column < prompts,
        (column >= prompts) & (column < ends),
        torch.cat([text.entries for text in texts]),
        torch.cat([text.probs for text in texts]),
    )


def batches(
    texts: Sequence[Conversation], size: int, seed: int, device: torch.device
) -> Callable[[int], Batch]:
    """Return the batch of a step: a function of the seed and its number alone."""

    def batch(step: int) -> Batch:
        per_epoch = max(len(texts) // size, 1)
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(texts), generator=generator)[place * size : (place + 1) * size]
        return Batch(*(part.to(device) for part in batch_of([texts[i] for i in order])))

    return batch


def optimizers(draft: nn.Module, muon_lr: float = 0.02, adam_lr: float = 2e-3) -> list:
    """Return Muon for the layers' matrices and AdamW for the embedding and norms."""
    matrices, others = [], []
    for name, parameter in draft.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.05),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def draft_laws(draft: DraftLlama, batch: Batch) -> Tensor:
    """Return the draft's log-probabilities behind every token but the last, ``[B, n - 1, Vd]``."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16):
        logits = draft(batch.tokens[:, :-1], use_cache=False).logits
    return logits.float().log_softmax(-1)


def law_parts(draft: DraftLlama, batch: Batch, laws: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the draft with the target on the answers.

    Returns the cross entropy of the draft relative to the target, and the mass that both laws have
    in common, ``sum_x min(p(x), q(x))``: the acceptance rate (Leviathan et al., arXiv 2211.17192,
    Corollary 3.6). Entries that the draft does not know add nothing to either; those that were not
    kept of the target's laws neither, so that the second is a lower bound.
    """
    entries = draft.entries[batch.entries]
    known = entries < laws.shape[-1]
    own = laws[batch.answered].gather(1, entries.clamp(max=laws.shape[-1] - 1))
    probs = batch.probs * known
    entropy = -(probs * own).sum(-1).mean()
    return entropy, torch.minimum(probs, own.exp()).sum(-1).mean()


def distillation_loss(draft: DraftLlama, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss, and its parts: cross entropy, acceptance, and nats on the users' turns.

    Half cross entropy to the target's law and half total variation, which is what speculative
    decoding pays for but whose gradient is flat where the draft is far off; and with a quarter of
    the weight, the text of the users' turns, which the target wrote as well.
    """
    laws = draft_laws(draft, batch)
    entropy, acceptance = law_parts(draft, batch, laws)
    labels = draft.entries[batch.tokens[:, 1:]]
    known = batch.said & (labels < laws.shape[-1])
    labels = torch.where(known, labels, -100).flatten()
    said = F.nll_loss(laws.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    said = said / known.sum().clamp(min=1)
    loss = 0.5 * entropy + 0.5 * (1.0 - acceptance) + 0.25 * said
    return loss, torch.stack([entropy, acceptance, said]).detach()
