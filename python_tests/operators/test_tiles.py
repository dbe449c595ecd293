"""What a tile of a row can hide: laws of long rows where the sum's reference is hard to choose.

A kernel may sum exponentials against a logit that is not the row's maximum. Whatever it takes, NaN,
+inf and masks must be seen wherever they lie, and log z must be accurate at every temperature.
"""

from __future__ import annotations

import pytest
import torch
from test_threads import run_variant

VARIANTS = ["avx512", "avx2", "baseline"]

LAWLESS = """
import torch
import specdec_ext

# The bits of +inf and of all sorts of NaN, and where they go: a first group, between, an odd and an
# even place, the last (padded) tile.
bits = {
    torch.float32: (torch.int32, [0x7F800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF,
                                  0xFFFFFFFF, 0x7F8001FF, 0xFF800100]),
    torch.bfloat16: (torch.int16, [0x7F80, 0x7FC0, 0xFFC0, 0x7F81, 0x7FFF, 0xFF81]),
    torch.float16: (torch.int16, [0x7C00, 0x7E00, 0xFE00, 0x7C01, 0x7FFF, 0xFC01]),
}
places = [0, 1, 126, 127, 128, 1000, 4095, 4096, 6001, 8191, 8192, 9000]
generator = torch.Generator().manual_seed(0)
ops = torch.ops.specdec
for dtype, (words, patterns) in bits.items():
    row = (torch.randn(9001, generator=generator) * 3).to(dtype)
    for temperature in (1.0, 0.1):
        for pattern in patterns:
            rows = row.repeat(len(places) + 1, 1)
            signed = pattern - (pattern >> 8 * row.itemsize - 1 << 8 * row.itemsize)
            for r, place in enumerate(places):
                rows[r].view(words)[place] = signed
            law = ops.row_law(rows, temperature=torch.full((len(rows),), temperature))
            assert bool(law[3][:-1].isnan().all()) and law[4].tolist()[:-1] == [-1] * len(places), (
                dtype, temperature, hex(pattern), law[3])
            assert bool(law[3][-1].isfinite())
print("all seen")
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_nan_is_seen_everywhere(run_python, variant):
    run_variant(run_python, LAWLESS, variant, "all seen")


LOG_Z = """
import torch
import specdec_ext

inf = torch.inf
generator = torch.Generator().manual_seed(0)
usual = torch.randn(20, 9001, generator=generator) * 3
rows = {"usual": usual, "far from zero": usual + 1000.0, "wide": usual * 30}
for lead in (1.0, 10.0, 11.0, 11.1, 12.0, 60.0, 90.0, 3000.0):
    # One logit far above the first ones of its tile.
    rows[f"lead {lead}"] = usual.index_fill(1, torch.tensor([5000]), 9.0 + lead)
rows["a hole"] = usual.index_fill(1, torch.arange(4096, 8000), -inf)
rows["nothing at first"] = usual.index_fill(1, torch.arange(4300), -inf)
rows["only the last"] = usual.index_fill(1, torch.arange(9000), -inf)
rows["one a tile"] = torch.full_like(usual, -inf).index_fill(1, torch.tensor([7, 5000]), 2.0)
rows["lowest first"] = usual.index_fill(1, torch.arange(256), torch.finfo(torch.float32).min)
rows["extremes"] = rows["lowest first"].index_fill(
    1, torch.tensor([3, 8999]), torch.finfo(torch.float32).max)
worst = 0.0
for name, values in rows.items():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = values.to(dtype)
        if bool((logits == inf).any()):
            continue
        for t in (0.1, 0.3, 0.49, 0.5, 0.7, 1.0, 3.0, 1000.0, 1e30, 3e37):
            if name == "extremes" and t > 1e30:
                continue  # their difference over T: no float32
            temperature = torch.full((len(logits),), t)
            found = torch.ops.specdec.row_law(logits, temperature=temperature)
            exact = logits.double() / temperature.double()[:, None]
            top = exact.amax(1)
            log_z = (exact - top[:, None]).exp().sum(1).log()
            assert torch.equal(found[0], logits.float().amax(1)), (name, dtype, t)
            assert torch.equal(found[4], logits.float().argmax(1)), (name, dtype, t)
            error = float((found[3] - log_z).abs().max())
            assert error < 5e-6, (name, dtype, t, error)
            worst = max(worst, error)
print("accurate", worst)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("variant", VARIANTS)
def test_log_z_is_accurate_whatever_a_tile_starts_with(run_python, variant):
    run_variant(run_python, LOG_Z, variant, "accurate")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_draws_sweep_a_long_row_in_order(operator, dtype):
    # Tokens never decrease with u, never land on a mask, and reach every tile.
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(9001, generator=generator).to(dtype)
    row[::3] = -torch.inf
    row[4096:4300] = -torch.inf
    u = torch.linspace(0, 1 - 2.0**-53, 3001, dtype=torch.float64)
    tokens, logprobs = operator.sample(row.expand(len(u), -1), u)
    assert bool((tokens.diff() >= 0).all()) and bool(row[tokens].isfinite().all())
    assert set((tokens // 4096).tolist()) == {0, 1, 2}
    prefix = row.double().softmax(0).cumsum(0)
    assert bool((prefix[tokens] > u - 1e-6).all())
    assert bool((prefix[tokens - 1].where(tokens > 0, 0.0) <= u + 1e-6).all())


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual_draws_sweep_a_long_row_in_order(operator, dtype, draft_dtype):
    # The drafted token is rejected, its tile is read with it taken out: the law is [p - q]+.
    generator = torch.Generator().manual_seed(4)
    vocab, rejected = 9001, 4500
    target = torch.randn(vocab, generator=generator)
    draft = (target + torch.randn(vocab, generator=generator)).to(draft_dtype)
    draft[rejected] += 9
    target = target.to(dtype)
    u = torch.linspace(0, 1 - 2.0**-53, 501, dtype=torch.float64)
    n = len(u)
    outcome = operator.verify(
        target.expand(n, 2, vocab),
        torch.full((n, 1), rejected),
        draft.expand(n, 1, vocab),
        uniforms=torch.stack([torch.full_like(u, 1 - 2.0**-53), u], 1),
        rule="token",
    )
    tokens = outcome.tokens[:, 0]
    residual = (target.double().softmax(0) - draft.double().softmax(0)).clamp(min=0)
    prefix = (residual / residual.sum()).cumsum(0)
    assert outcome.num_accepted.tolist() == [0] * n and bool((tokens.diff() >= 0).all())
    assert bool((residual[tokens] > 0).all()) and set((tokens // 4096).tolist()) == {0, 1, 2}
    assert bool((prefix[tokens] > u - 1e-5).all())
    assert bool((prefix[tokens - 1].where(tokens > 0, 0.0) <= u + 1e-5).all())


@pytest.mark.parametrize("top_k", [None, 7000, 40])
@pytest.mark.parametrize("rule", ["block", "token", "typical"])
@pytest.mark.parametrize("lead", [-2.0, 3.0, 18.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_draws_without_a_draft_law_sweep_a_long_row(operator, dtype, lead, rule, top_k):
    # The deterministic draft token is rejected, and has little of its tile or nearly all of it: the
    # law is the target's without it. (Under `typical` it is the target's own.) A third of the row
    # is hidden by its logits; a top-k keeps all others, or a few. Rows begin anywhere.
    generator = torch.Generator().manual_seed(5)
    vocab, rejected = 9001, 4500
    table = torch.randn(vocab + 3, generator=generator).to(dtype)
    target = table[3:]
    target[::3] = -torch.inf
    target[rejected] = lead
    u = torch.linspace(0, 1 - 2.0**-53, 501, dtype=torch.float64)
    n = len(u)
    outcome = operator.verify(
        target.expand(n, 2, vocab),
        torch.full((n, 1), rejected),
        uniforms=torch.stack([torch.full_like(u, 1 - 2.0**-53), u], 1),
        rule=rule,
        temperature=torch.full((n,), 0.9),
        top_k=None if top_k is None else torch.full((n,), top_k),
        epsilon=1.0,
        delta=1e30,
    )
    tokens = outcome.tokens[:, 0]
    logits = target.double() / float(torch.tensor(0.9))
    if top_k is not None:
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    law = logits.softmax(0)
    if rule != "typical":
        law[rejected] = 0.0
    prefix = (law / law.sum()).cumsum(0)
    assert outcome.num_accepted.tolist() == [0] * n and bool((tokens.diff() >= 0).all())
    assert bool((law[tokens] > 0).all())
    if lead < 18 or rule != "typical":
        assert set((tokens // 4096).tolist()) == {0, 1, 2}
    assert bool((prefix[tokens] > u - 1e-5).all())
    assert bool((prefix[tokens - 1].where(tokens > 0, 0.0) <= u + 1e-5).all())


def top_k_law(logits, k):
    """Probabilities in float64 of what top-k keeps, ties with the k-th included."""
    logits = logits.double()
    return logits.masked_fill(logits < logits.topk(k).values[-1], -torch.inf).softmax(0)


@pytest.mark.parametrize("draws", ["token", "block", "tree", "sample"])
@pytest.mark.parametrize("kept", [2, 8, 20, 40, 150, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_of_filtered_rows_sweep_them_in_order(operator, dtype, kept, draws):
    # A draw takes another way where no more entries are kept than a block has threads. The law is
    # the residual of the filtered laws, all of whose draft tokens but one may be kept as well.
    generator = torch.Generator().manual_seed(6)
    vocab, rejected = 9001, 4500
    target = torch.randn(vocab, generator=generator)
    draft = target + torch.randn(vocab, generator=generator)
    draft[rejected] += 9
    target, draft = target.to(dtype), draft.to(dtype)
    u = torch.linspace(0, 1 - 2.0**-53, 301, dtype=torch.float64)
    n = len(u)
    last = torch.full_like(u, 1 - 2.0**-53)
    top_k = torch.full((n,), kept)
    filters = dict(top_k=top_k, draft_top_k=top_k + 1)
    rows = target.expand(n, 2, vocab), torch.full((n, 1), rejected), draft.expand(n, 1, vocab)
    law = top_k_law(target, kept)
    if draws == "sample":
        tokens = operator.sample(rows[0][:, 0], u, top_k=top_k).tokens
    elif draws == "tree":
        ids = torch.tensor([0, rejected]).expand(n, 2)
        parents, kinds = torch.tensor([-1, 0]).expand(n, 2), torch.tensor([0, 1]).expand(n, 2)
        tree = dict(tokens=ids, parents=parents, kinds=kinds.to(torch.int8))
        outcome = operator.verify_tree(
            rows[0],
            draft_logits=draft.expand(n, 2, vocab),
            uniforms=torch.stack([last, u], 1),
            **tree,
            **filters,
        )
        tokens = outcome.tokens[:, 0]
    else:
        outcome = operator.verify(*rows, uniforms=torch.stack([last, u], 1), rule=draws, **filters)
        tokens = outcome.tokens[:, 0]
    if draws != "sample":
        assert outcome.num_accepted.tolist() == [0] * n
        law = (law - top_k_law(draft, kept + 1)).clamp(min=0)
    prefix = (law / law.sum()).cumsum(0)
    assert bool((tokens.diff() >= 0).all()) and bool((law[tokens] > 0).all())
    assert bool((prefix[tokens] > u - 1e-5).all())
    assert bool((prefix[tokens - 1].where(tokens > 0, 0.0) <= u + 1e-5).all())
    assert len(set(tokens.tolist())) > min(kept, 100) / 4
