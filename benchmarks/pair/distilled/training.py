"""The training of a draft on its target's own conversations and the laws that they came from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from pair.distilled.texts import Answers
from pair.models import multiplies_bfloat16
from specdec_ext.models.draft_llama import DraftLlama

SORTED = 16  # batches are filled from so many batches' texts, sorted by length


class Conversation(NamedTuple):
    """One conversation: all its tokens, and the laws of those that the target answered."""

    tokens: Tensor  # [n] int64
    answered: Tensor  # [n] bool
    entries: Tensor  # [m, k] int64
    probs: Tensor  # [m, k] float32, at temperature 1
    temperature: float  # of the answers


class Batch(NamedTuple):
    """Texts side by side, padded behind their ends.

    Attributes
    ----------
    tokens : Tensor
        ``[B, n]`` int64, the target's tokens.
    answered : Tensor
        ``[B, n - 1]`` bool, which columns predict a token whose law is known.
    entries, probs : Tensor
        ``[M, k]`` int64 and float32, these laws in the order of ``answered``.
    """

    tokens: Tensor
    answered: Tensor
    entries: Tensor
    probs: Tensor


def conversations(shards: Sequence[Answers]) -> list[Conversation]:
    """Take shards apart."""
    found = []
    for shard in shards:
        lengths = shard.lengths.tolist()
        answered = shard.answered.split(lengths)
        replies = [int(own.sum()) for own in answered]
        parts = zip(
            shard.tokens.long().split(lengths), answered,
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
    return Batch(
        pad_sequence([text.tokens for text in texts], batch_first=True),
        pad_sequence([text.answered[1:] for text in texts], batch_first=True),
        torch.cat([text.entries for text in texts]),
        torch.cat([text.probs for text in texts]),
    )


def orders(texts: Sequence[Conversation], size: int, seed: int) -> Callable[[int], list[int]]:
    """Return which texts are a step's batch: a function of the seed and its number alone.

    Texts of similar length come together, and all come once before any comes again.
    """
    lengths = torch.tensor([len(text.tokens) for text in texts])
    per_epoch = max(len(texts) // size, 1)

    def chosen(step: int) -> list[int]:
        epoch, place = divmod(step, per_epoch)
        chance = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(texts), generator=chance)
        order = torch.cat([some[lengths[some].argsort()] for some in order.split(SORTED * size)])
        place = int(torch.randperm(per_epoch, generator=chance)[place])
        found: list[int] = order[place * size : (place + 1) * size].tolist()
        return found

    return chosen


def batches(
    texts: Sequence[Conversation], size: int, seed: int, device: torch.device
) -> Callable[[int], Batch]:
    """Return the batch of a step, see `orders`."""
    chosen = orders(texts, size, seed)

    def batch(step: int) -> Batch:
        own = [texts[i] for i in chosen(step)]
        return Batch(*(part.to(device) for part in batch_of(own)))

    return batch


def optimizers(draft: nn.Module, muon_lr: float = 0.008, adam_lr: float = 2e-3) -> list:
    """Return Muon for the layers' matrices and AdamW for the embedding and norms."""
    matrices, others = [], []
    for name, parameter in draft.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.05),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def draft_laws(draft: DraftLlama, batch: Batch) -> Tensor:
    """Return the draft's log-probabilities where the target's law is known, ``[M, Vd]``.

    The head runs on these columns alone: it costs as much as all layers.
    """
    device = batch.tokens.device
    with torch.autocast(device.type, torch.bfloat16, enabled=multiplies_bfloat16(device)):
        hidden = draft.layers(input_ids=batch.tokens[:, :-1], use_cache=False).last_hidden_state
        logits = draft.head(hidden[batch.answered])
    return logits.float().log_softmax(-1)


def law_parts(draft: DraftLlama, batch: Batch, laws: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the draft with the target on the answers.

    Returns for each answered token, ``[M]``, the cross entropy of the draft relative to the target,
    and the mass that both laws have in common, ``sum_x min(p(x), q(x))``: the acceptance rate
    (Leviathan et al., arXiv 2211.17192, Corollary 3.6). Entries that the draft does not know add
    nothing to either; those that were not kept of the target's laws neither, so that the second is
    a lower bound.
    """
    entries = draft.entries[batch.entries]
    known = entries < laws.shape[-1]
    own = laws.gather(1, entries.clamp(max=laws.shape[-1] - 1))
    probs = batch.probs * known
    return -(probs * own).sum(-1), torch.minimum(probs, own.exp()).sum(-1)


def distillation_loss(draft: DraftLlama, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss, and its parts: cross entropy and acceptance.

    Half cross entropy to the target's law and half total variation, which is what speculative
    decoding pays for but whose gradient is flat where the draft is far off.
    """
    laws = draft_laws(draft, batch)
    entropy, acceptance = (part.mean() for part in law_parts(draft, batch, laws))
    loss = 0.5 * entropy + 0.5 * (1.0 - acceptance)
    return loss, torch.stack([entropy, acceptance]).detach()
