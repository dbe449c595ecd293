"""What a drafter draws from and what it passes on, as tables over all drafts of a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_ext
from specdec_ext import ops
from specdec_ext.decoding import Drafter, Requests
from specdec_ext.testing.exact import ExactLaw, exact_law, step_law

PROMPT = [1, 2]


@dataclass(frozen=True)
class Round:
    """A round behind `PROMPT`, of which everything that a drafter may do is enumerated.

    Parameters
    ----------
    drafter_of : callable
        Makes the drafter of so many rows.
    vocabulary : int
        The target's.
    gamma : int
        Draft tokens.
    features : Tensor, optional
        ``[1, P - 1, D]``, the target's hidden states at the prompt, for a `FeatureDrafter`.
    token_ids : Tensor, optional
        ``[Vd]`` of a reduced draft vocabulary.
    process : Process, optional
        Runs logits processors on the drafter's rows.
    temperature : float
        Of the draft and of the target.
    """

    drafter_of: Callable[[int], Drafter]
    vocabulary: int
    gamma: int = 2
    features: Tensor | None = None
    token_ids: Tensor | None = None
    process: Any = None
    temperature: float = 1.0

    def _propose(self, rows: int) -> Any:
        """Start a drafter of so many rows, and let it draft."""
        drafter = self.drafter_of(rows)
        zeros = torch.zeros(rows, dtype=torch.int64)
        ids = torch.tensor([PROMPT]).repeat(rows, 1)
        features = None if self.features is None else self.features.repeat(rows, 1, 1)
        filters = {"temperature": torch.full((rows,), self.temperature)}
        drafter.start(
            Requests(
                ids, None, zeros + 9, 0, zeros, filters, False, True, process=self.process,
                features=features,
            )
        )  # fmt: skip
        return drafter.propose(self.gamma, zeros + len(PROMPT))

    @torch.inference_mode()
    def tables(self, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the rows that the drafter passes on, and the laws that it draws from.

        `specdec_ext.sample` is given uniforms instead of seeds, row by row, and the steps of each
        token in its uniform are found by bisection. ``[V] * d + [Vd]`` of both, d = 0 .. gamma - 1:
        after every draft of d tokens.
        """
        forced: list[Tensor] = []  # a row's uniforms, of the call that is running
        sample = ops.sample

        def from_uniforms(logits, *, seeds, positions, draft_index, domain, stream, **filters):
            return sample(logits, uniforms=forced[0][:, draft_index], **filters)

        monkeypatch.setattr(ops, "sample", from_uniforms)

        def propose(uniforms: Tensor) -> Any:
            forced[:] = [uniforms]
            return self._propose(len(uniforms))

        passed, drawn = [], []
        contexts = torch.full((1, self.gamma), 0.5, dtype=torch.float64)  # uniforms of each draft
        for depth in range(self.gamma):
            before = [self.vocabulary] * depth
            passed.append(propose(contexts).logits[:, depth].reshape(*before, -1))

            def token(
                row: Tensor, u: Tensor, depth: int = depth, all_: Tensor = contexts
            ) -> Tensor:
                uniforms = all_[row].clone()
                uniforms[:, depth] = u
                tokens: Tensor = propose(uniforms).tokens[:, depth]
                return tokens

            law = torch.zeros(len(contexts), self.vocabulary, dtype=torch.float64)
            for (row, x), mass in step_law(token, len(contexts), bits=30).items():
                law[row, x] = mass
            entries = law if self.token_ids is None else law[:, self.token_ids]
            drawn.append(entries.reshape(*before, -1))
            middle = (law.cumsum(1) - law / 2).reshape(-1)
            contexts = contexts.repeat_interleave(self.vocabulary, 0)
            contexts[:, depth] = middle
        monkeypatch.undo()
        return passed, drawn

    def law(self, monkeypatch: pytest.MonkeyPatch, rule: str) -> ExactLaw:
        """Exact law of the round and `specdec_ext.verify`, over drafts, coins and final draws."""
        passed, drawn = self.tables(monkeypatch)
        generator = torch.Generator().manual_seed(2)
        target = [
            1.5 * torch.randn([self.vocabulary] * (depth + 1), generator=generator)
            for depth in range(self.gamma + 1)
        ]
        return exact_law(
            specdec_ext.verify, target, passed, drawn=drawn, rule=rule,
            draft_token_ids=self.token_ids, temperature=self.temperature,
        )  # fmt: skip


def check_lossless(law: ExactLaw) -> None:
    """What is emitted has the target's law, up to the bisection of uniforms to 2^-30."""
    assert law.tv < 1e-6 and law.status == 0
    assert law.mean_accepted > 0.3
