"""A smaller causal model as the drafter: it samples gamma tokens, one call each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec_ext import ops
from specdec_ext.decoding.cache import CachedModel
from specdec_ext.decoding.drafters import Draft, GoOn, Requests, last_tokens

__all__ = ["ModelDrafter"]


class ModelDrafter:
    """Draws draft tokens from a causal model under the target's own filters.

    The last draft token of a round is never run here: nothing would read its logits. So after full
    acceptance the model lacks two tokens, else one, and the next round's first call takes in
    whichever is missing; no call is spent on it alone. In a batch in which some row lacks two, the
    others run their last cached token again, and no hole is made.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model called as Hugging Face models are, over the target's tokens.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._cached: CachedModel | None = None
        self._requests: Requests
        self._missing: Tensor  # [B, n]: each row's last n tokens, which the cache lacks

    @property
    def calls(self) -> int:
        """Model calls so far, prefill excluded."""
        return 0 if self._cached is None else self._cached.calls

    def start(self, requests: Requests) -> None:
        """Run the prompts but their last tokens."""
        ids, mask = requests.input_ids, requests.attention_mask
        self._requests = requests
        self._cached = CachedModel(
            self.model, requests.ends, room=requests.room, static=requests.static_cache
        )
        self._cached.prefill(ids[:, :-1], None if mask is None else mask[:, :-1])
        self._missing = ids[:, -1:]

    def propose(self, gamma: int, positions: Tensor, go_on: GoOn | None = None) -> Draft:
        """Sample up to ``gamma`` tokens, each from the law after the ones before it."""
        assert self._cached is not None, "start() comes first"
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        feed = self._missing
        going: Tensor | None = None  # [B], requests that propose more; None: all
        for i in range(gamma):
            logits = self._cached.forward(feed, last_only=True)
            if self._requests.process is not None:
                logits = self._requests.process(
                    logits, torch.cat([self._missing[:, :0], *tokens], 1)
                )
            feed = self._draw(logits[:, 0], positions, i)
            tokens.append(feed if going is None else torch.where(going[:, None], feed, -1))
            laws.append(logits)
            if go_on is None or i == gamma - 1:
                continue
            wanted = go_on(tokens[-1][:, 0], logits[:, 0])
            going = wanted if going is None else going & wanted
            if not going.any():
                break
        if not tokens:
            return Draft(self._missing[:, :0])
        return Draft(torch.cat(tokens, 1), torch.cat(laws, 1) if self._requests.needs_law else None)

    def _draw(self, logits: Tensor, positions: Tensor, i: int) -> Tensor:
        """Draw draft token ``i`` (0-based) of each row, ``[B, 1]``; -1 where a row has no law."""
        if self._requests.greedy:
            return logits.argmax(-1, keepdim=True)
        return ops.sample(
            logits,
            seeds=self._requests.seeds,
            positions=positions,
            draft_index=i,
            domain=self._requests.domain,
            stream=self._requests.stream,
            **self._requests.filters,
        ).tokens[:, None]

    def commit(self, tokens: Tensor, accepted: Sequence[int], num_accepted: Tensor) -> None:
        """Roll back what was rejected and note which tokens the cache lacks."""
        assert self._cached is not None, "start() comes first"
        gamma, known = tokens.shape[1] - 1, self._missing.shape[1]
        lacks = 1 if gamma else known  # the last draft token was not run
        drop = [gamma - n for n in accepted]
        width = self._take_back(lacks, drop, gamma - num_accepted)
        history = torch.cat([self._missing, tokens], 1)
        last = [known + n for n in accepted]
        self._missing = last_tokens(history, last, known + num_accepted, width)

    def revise(self, text: Tensor, drop: Sequence[int], drop_tensor: Tensor) -> None:
        """Take tokens back that commits emitted, and take one in their place."""
        assert self._cached is not None, "start() comes first"
        lacks = self._missing.shape[1]
        fewest = min(drop)
        if any(cached < n - fewest for cached, n in zip(self._cached.lengths, drop, strict=True)):
            # Rounds without a draft: some text is now shorter than what the cache lacks of others.
            self._cached.forward(self._missing[:, :-1], last_only=True)
            lacks = 1
        width = self._take_back(lacks, drop, drop_tensor, across_holes=True)
        self._missing = text[:, text.shape[1] - width :]

    def _take_back(self, lacks: int, drop: Sequence[int], drop_tensor: Tensor, **how: bool) -> int:
        """Take back the last ``drop[b]`` tokens of each text, of which the cache lacks ``lacks``.

        Returns how many tokens it lacks when one more has come, of the row that it lacks most of;
        ``how`` is for its own rollback.
        """
        assert self._cached is not None, "start() comes first"
        lacks_still = max(lacks - min(drop), 0)
        taken = lacks - lacks_still
        self._cached.rollback([n - taken for n in drop], drop_tensor - taken, **how)
        return lacks_still + 1

    def select(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Keep only these requests."""
        assert self._cached is not None, "start() comes first"
        self._requests = self._requests.select(rows)
        self._cached.select(rows, indices)
        self._missing = self._missing[rows]
