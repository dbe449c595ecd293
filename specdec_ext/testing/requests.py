"""One request of a case of `specdec_ext.verify`, with the prescan done: what the rules may read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .cases import VerifyCase
from .laws import GREEDY_TEMPERATURE, Law, Params, candidate_laws, params_of
from .masks import forbid, of_tokens, unpack_mask
from .philox import BEFORE_ONE, philox_exponentials, philox_uniform

#: Rules that never read a draft law.
DRAFT_LAW_UNREAD = ("greedy", "top_beta", "typical", "coupled")


class Request:
    """One request of a case, with the prescan done: what the rules may read.

    `emitted` are its tokens in the outcome: where filters nearly tie, they tell laws apart.
    """

    def __init__(self, case: VerifyCase, b: int, tolerance: float, emitted: Sequence[int]) -> None:
        inputs = case.with_whole_rows().inputs
        self.tolerance = tolerance
        self.rule = inputs.get("rule", "block")
        self.full = bool(inputs.get("full_accept_probs", False))
        self.raw = bool(inputs.get("raw_logprobs", False)) or self.rule == "top_beta"
        self.lenience = inputs.get("lenience", 1.0)
        self.beta, self.tau = inputs.get("beta", 3), inputs.get("tau", 1.0)
        self.epsilon, self.delta = inputs.get("epsilon", 0.09), inputs.get("delta", 0.3)
        gamma = case.gamma
        logits, draft = inputs["target_logits"], inputs.get("draft_logits")
        probs = inputs.get("draft_probs")
        source = draft if draft is not None else probs
        vocab = logits.shape[-1]
        ids = max(vocab, source.shape[-1] if source is not None else vocab)
        self.bits = 0
        entries = inputs.get("draft_token_ids")
        has_draft_laws = True
        if entries is not None:
            ids = vocab
            named = entries.tolist()
            has_draft_laws = len(set(named) & set(range(vocab))) == len(named)
            if self.rule not in DRAFT_LAW_UNREAD and not has_draft_laws:
                self.bits |= 8

        length = gamma
        if inputs.get("draft_lengths") is not None:
            length = int(inputs["draft_lengths"][b])
            if not 0 <= length <= gamma:
                self.bits |= 8
            length = min(max(length, 0), gamma)
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        for i in range(length):
            token = int(inputs["draft_tokens"][b, i])
            kind = int(source is not None)
            if inputs.get("draft_kinds") is not None:
                kind = int(inputs["draft_kinds"][b, i])
            if token == -1:
                break
            if not 0 <= token < ids or kind not in (0, 1):
                self.bits |= 2
                break
            self.tokens.append(token)
            self.kinds.append(kind)

        params = params_of(inputs, "", b, Params())
        draft_params = params_of(inputs, "draft_", b, params)
        if self.rule == "greedy":
            params = Params(temperature=0.0)
        elif self.rule == "top_beta":
            params = Params()
        else:
            # NaN differs from itself, which is what is wanted: it is replaced, too.
            if params.cleaned() != params or (
                draft is not None and draft_params.cleaned() != draft_params
            ):
                self.bits |= 8
            params, draft_params = params.cleaned(), draft_params.cleaned()
        self.greedy = params.temperature < GREEDY_TEMPERATURE

        used = range(len(self.tokens) + 1)
        masks: list[Tensor | None] = [None for _ in used]
        if inputs.get("allowed_mask") is not None:
            masks = [unpack_mask(inputs["allowed_mask"][b, i], vocab) for i in used]
        target_rows = [
            self._row(logits, inputs.get("target_rows"), b, i, masks[i], None) for i in used
        ]
        seen = [
            [token for token in (*self.tokens[i : i + 1], *emitted[i : i + 1]) if token >= 0]
            for i in used
        ]
        self.target: list[list[Law | None]] = [
            self._laws(row, params, tolerance, seen[i]) for i, row in enumerate(target_rows)
        ]
        self.raw_laws = [self._laws(row, Params(), 0.0, ())[0] for row in target_rows]
        self.draft: list[list[Tensor | None]] = []
        reads_draft = not self.greedy and self.rule not in DRAFT_LAW_UNREAD
        for i in range(len(self.tokens)):
            row = None
            if source is not None and reads_draft and has_draft_laws:
                fill = -math.inf if probs is None else 0.0
                row = self._row(source, inputs.get("draft_rows"), b, i, masks[i], entries, fill)
            if row is not None and probs is not None:
                total = float(row.sum())
                legal = bool((row >= 0).all()) and 0 < total < math.inf
                found = [row / total if legal else None]
            else:
                places = [p for token in seen[i] for p in _entries_of(token, entries)]
                laws = self._laws(row, draft_params, tolerance, places)
                found = [None if law is None else law.probs for law in laws]
            self.draft.append([q if q is None else of_tokens(q, entries, vocab) for q in found])

        self.noise: list[Tensor] = []
        if self.rule == "coupled" and not self.greedy:
            seed, position = int(inputs["seeds"][b]), int(inputs["positions"][b])
            stream = inputs.get("stream", 0)
            self.noise = [
                torch.tensor(
                    philox_exponentials(seed, position + i, range(vocab), stream),
                    dtype=torch.float64,
                )
                for i in used
            ]

        self.coins = [0.5] * (gamma + 1)
        if not self.greedy and self.rule not in ("top_beta", "coupled"):
            for slot in [*range(len(self.tokens)), gamma]:
                u = self._uniform(inputs, b, slot, gamma)
                clamped = 0.0 if math.isnan(u) else min(max(u, 0.0), BEFORE_ONE)
                if u != clamped:
                    self.bits |= 8
                self.coins[slot] = clamped
        self.final = self.coins[gamma]

    @staticmethod
    def _row(
        table: Tensor,
        rows: Tensor | None,
        b: int,
        i: int,
        allowed: Tensor | None,
        entries: Tensor | None,
        fill: float = -math.inf,
    ) -> Tensor | None:
        if rows is None:
            row = table[b, i]
        else:
            r = int(rows[b, i])
            if not 0 <= r < len(table):
                return None
            row = table[r]
        return forbid(row.detach().cpu().double(), allowed, entries, fill)

    @staticmethod
    def _laws(
        row: Tensor | None, params: Params, tolerance: float, tokens: Sequence[int]
    ) -> list[Law | None]:
        if row is None:
            return [None]
        return [*candidate_laws(row, params, tolerance, tokens)] or [None]

    @staticmethod
    def _uniform(inputs: Mapping[str, Any], b: int, slot: int, gamma: int) -> float:
        if inputs.get("uniforms") is not None:
            return float(inputs["uniforms"][b, slot])
        seed, position = int(inputs["seeds"][b]), int(inputs["positions"][b])
        stream = inputs.get("stream", 0)
        if slot == gamma:
            return philox_uniform(seed, position, 0, 1, stream)
        return philox_uniform(seed, position, slot + 1, 0, stream)


def _entries_of(token: int, ids: Tensor | None) -> list[int]:
    """Draft entries that stand for a token."""
    return [token] if ids is None else (ids == token).nonzero().flatten().tolist()
