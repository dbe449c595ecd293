"""The loss that decoding heads are trained with, over a target that stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from .heads import DecodingHeads
from .loss_inputs import check_places
from .reduced import logits_of_tokens

__all__ = ["heads_loss"]


def heads_loss(
    heads: DecodingHeads,
    features: Tensor,
    target_logits: Tensor,
    mask: Tensor | None = None,
    *,
    decay: float = 0.8,
) -> tuple[Tensor, Tensor]:
    """Return how far the heads' laws are from the target's, at the tokens that they predict.

    Head i (1-based) reads the state of token t and is compared with the target's own law of token
    t + 1 + i, which the target's row of token t + i holds: the cross entropy of the head's law
    relative to it. (The papers take the text's token in place of the target's law, which is a
    sample of it: the gradient has the same mean on the target's own text, and here less noise.)
    What verification accepts at temperature 1 depends on these two laws alone. Of heads that know
    a part of the vocabulary, both laws are taken over that part.

    Parameters
    ----------
    heads : DecodingHeads
        The heads.
    features : Tensor
        ``[B, n, D]``, the target's last hidden states of a text.
    target_logits : Tensor
        ``[B, n, V]``, its logits at the same tokens, or ``[B, n, Vd]``, those of the tokens
        ``heads.draft_token_ids`` alone, which is all that is read.
    mask : Tensor, optional
        ``[B, n]``, zeros at tokens that are padding. None: there is none.
    decay : float
        The weight of head i is ``decay ** i``: a token counts only if those before it are accepted
        (Cai et al., arXiv 2401.10774, section 2.2.1: "0.8").

    Returns
    -------
    loss : Tensor
        ``[]`` float32, the weighted sum, to be minimised.
    by_head : Tensor
        ``[K]`` float32, detached: each head's mean cross entropy in nats; NaN where no text is long
        enough for it.

    Raises
    ------
    ValueError
        Logits of another width; logits or a mask of other texts or tokens than the states.

    Examples
    --------
    Heads that are copies of the target's head are right where a text repeats one token:

    >>> import torch
    >>> from specdec_ext.models.heads import MedusaHeads, MedusaHeadsConfig
    >>> heads = MedusaHeads(MedusaHeadsConfig(hidden_size=4, vocab_size=6, num_heads=2))
    >>> features = torch.ones(1, 8, 4)
    >>> logits = heads(features)[:, :, 0].detach()
    >>> loss, by_head = heads_loss(heads, features, logits)
    >>> law = logits[0, 0].log_softmax(-1)
    >>> bool((by_head[0] + (law.exp() * law).sum()).abs() < 1e-5)  # the entropy, and no more
    True
    """
    check_places("heads_loss", features, target_logits=target_logits, mask=mask)
    ids, vocabulary = heads.draft_token_ids, heads.config.vocab_size
    known = logits_of_tokens("heads_loss", target_logits, ids, vocabulary)
    kept = torch.ones_like(features[..., 0]) if mask is None else mask
    kept = kept.bool()
    hidden = heads.hidden(features.to(heads.dtype))
    loss = 0.0 * hidden.float().sum()  # which has a gradient where no head has anything to learn
    by_head = []
    for head in range(heads.num_heads):
        ahead = head + 1
        # None where all texts are too short. Found once: on a GPU the host waits for it.
        here = (kept[:, :-ahead] & kept[:, ahead:]).nonzero(as_tuple=True)
        if not len(here[0]):
            by_head.append(loss.new_tensor(torch.nan))
            continue
        law = known[:, ahead:][here].float().softmax(-1)
        logits = heads.project(hidden[:, :-ahead, head][here], head).float()
        mean = -(law * logits.log_softmax(-1)).sum(-1).mean()
        loss = loss + decay**ahead * mean
        by_head.append(mean.detach())
    return loss, torch.stack(by_head)
