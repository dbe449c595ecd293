"""One law or two, row by row: `row_law`, `sample` and `acceptance`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import RowLaw, SampleResult
from .draws import (
    COUPLED,
    inverse_cdf,
    law_weights,
    philox_uniforms,
    race,
    race_noise,
)
from .laws import (
    INF,
    NAN,
    DraftVocabulary,
    allowed,
    both_filters,
    filters_of,
    make_law,
    masked,
    words_of,
)

__all__ = [
    "acceptance",
    "row_law",
    "sample",
]


@torch.no_grad()
def row_law(
    logits: Tensor,
    *,
    allowed_mask: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> RowLaw:
    """Compute the five scalars of every row; see `specdec_ext.row_law`."""
    filters = filters_of(temperature, top_k, top_p, min_p)
    rows: list[tuple[float, float, float, float, int]] = []
    for r, row in enumerate(logits.cpu().double()):
        parameters, bad = filters(r).checked()
        row = masked(row, words_of(allowed_mask, r), len(row))
        found = None if bad else make_law(row, parameters)
        if found is None:
            rows.append((NAN, NAN, NAN, NAN, -1))
        else:
            rows.append((found.max, found.scale, found.cutoff, found.log_z, found.argmax))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 5
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float64, torch.int64)
    made = (
        torch.tensor(c, dtype=d, device=logits.device) for c, d in zip(columns, dtypes, strict=True)
    )
    return RowLaw(*made)


@torch.no_grad()
def sample(
    logits: Tensor,
    uniforms: Tensor | None = None,
    *,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    draft_index: int = 0,
    domain: int = 2,
    stream: int = 0,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> SampleResult:
    """Draw one token per row; see `specdec_ext.sample`."""
    ids = torch.arange(logits.shape[-1])  # of the entries
    if draft_token_ids is not None:
        ids = draft_token_ids.cpu().long()
    legal = bool(((ids >= 0) & (ids < 2**31)).all())
    if uniforms is None:
        assert seeds is not None and positions is not None
        uniforms = philox_uniforms(seeds.cpu(), positions.cpu(), draft_index, domain, stream)
    filters = filters_of(temperature, top_k, top_p, min_p)
    tokens: list[int] = []
    logprobs: list[float] = []
    for r, (row, u) in enumerate(zip(logits.cpu().double(), uniforms.tolist(), strict=True)):
        parameters, bad = filters(r).checked()
        words = words_of(allowed_mask, r)
        if legal and words is not None:
            row = row.masked_fill(~allowed(words, ids), -INF)
        found = make_law(row, parameters) if legal and not bad else None
        if found is None or (found.scale < INF and not 0 <= u < 1):
            tokens.append(-1)
            logprobs.append(NAN)
            continue
        if found.scale == INF:
            entry = found.argmax
        elif domain == COUPLED:
            assert seeds is not None and positions is not None
            position = int(positions[r]) + draft_index
            entry = race(found.weights, race_noise(int(seeds[r]), position, ids, stream))
        else:
            entry = inverse_cdf(law_weights(found.weights), u)
        tokens.append(int(ids[entry]))
        logprobs.append(found.log_prob(entry))
    return SampleResult(
        torch.tensor(tokens, dtype=torch.int64, device=logits.device),
        torch.tensor(logprobs, dtype=torch.float32, device=logits.device),
    )


@torch.no_grad()
def acceptance(
    target_logits: Tensor,
    draft_logits: Tensor,
    *,
    allowed_mask: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
) -> Tensor:
    """Compute sum min(p, q) row by row, [R] float32; see `specdec_ext.acceptance`."""
    vocab = target_logits.shape[-1]
    entries = DraftVocabulary(draft_token_ids, vocab)
    target_filters, draft_filters = both_filters(
        (temperature, top_k, top_p, min_p),
        (draft_temperature, draft_top_k, draft_top_p, draft_min_p),
    )
    out: list[float] = []
    rows = zip(target_logits.cpu().double(), draft_logits.cpu().double(), strict=True)
    for r, (target_row, draft_row) in enumerate(rows):
        target_parameters, bad = target_filters(r).checked()
        draft_parameters, draft_bad = draft_filters(r).checked()
        words = words_of(allowed_mask, r)
        p = make_law(masked(target_row, words, vocab), target_parameters)
        q = None
        if entries.is_valid:
            q = make_law(entries.masked(draft_row, words), draft_parameters)
        if bad or draft_bad or p is None or q is None:
            out.append(NAN)
            continue
        q_probs = entries.law(q.probs)
        both = min(vocab, len(q_probs))  # beyond it, one of the laws is 0
        out.append(float(torch.minimum(p.probs[:both], q_probs[:both]).sum()))
    return torch.tensor(out, dtype=torch.float32, device=target_logits.device)
