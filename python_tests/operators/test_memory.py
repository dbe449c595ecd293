"""Memory: how little verify takes, what it does not read, offsets beyond 2^32."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from conftest import REFERENCE
from test_threads import run_variant

from specdec_ext.testing import assert_tokens_match, make_case

# ---- reads --------------------------------------------------------------------------------------

FENCED = """
import torch
import specdec_ext
from guard import fenced
from specdec_ext.contract import CHAIN_RULES, rule_names
from specdec_ext.testing import make_case

variants = [
    dict(vocab=4097), dict(vocab=1), dict(vocab=31, draft_vocab=17), dict(vocab=97, gamma=0),
    dict(vocab=777, kinds="mixed", draft_filters=True), dict(vocab=4099, dtype=torch.bfloat16),
    dict(vocab=4111, dtype=torch.float16, id_dtype=torch.int32), dict(vocab=63, packed=True),
    dict(vocab=9, philox=True, raw_logprobs=True), dict(vocab=5003, draft="probs", ragged=False),
    dict(vocab=4133, allowed_mask=True), dict(vocab=33, draft_vocab=9, draft_token_ids=True),
    dict(vocab=95, draft_vocab=77, allowed_mask=True, draft_token_ids=True, packed=True),
    dict(vocab=4099, rule="coupled", allowed_mask=True), dict(vocab=1, rule="coupled"),
    dict(vocab=4111, draft="none"), dict(vocab=9, draft="none", allowed_mask=True),
    dict(vocab=97, draft="none", wild=-1), dict(vocab=97, draft="none", wild=10**6),
    dict(vocab=97, draft_vocab=31, wild=-1),
]
ops = torch.ops.specdec
for seed, variant in enumerate(variants):
    wild = variant.pop("wild", None)  # a draft token that leads out of bounds, if it is followed
    case = make_case(seed, **{"batch": 3, "gamma": 3, **variant})
    if wild is not None:
        tokens = torch.full_like(case.inputs["draft_tokens"], wild)
        case = case.replace(draft_tokens=tokens)
    for side in ("end", "start"):
        beside = {
            k: fenced(v.contiguous(), side)
            for k, v in case.inputs.items() if isinstance(v, torch.Tensor)
        }
        race = "seeds" in case.inputs
        for rule in CHAIN_RULES if race else rule_names(chains=True, races=False):
            expected = ops.verify(**case.replace(rule=rule).inputs)
            got = ops.verify(**case.replace(rule=rule, **beside).inputs)
            for a, b in zip(got, expected):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        logits = beside["target_logits"]
        if logits.dim() == 3:
            row = fenced(logits[:, 0].contiguous(), side)
            params = {k: beside[k] for k in ("temperature", "top_k", "top_p", "min_p")}
            ops.row_law(row, **params)
            ops.sample(row, fenced(torch.rand(len(row), dtype=torch.float64), side), **params)
            ops.acceptance(row, row, **params)
            if "allowed_mask" in beside:
                words = fenced(beside["allowed_mask"][:, 0].contiguous(), side)
                seeds = fenced(torch.arange(len(row)), side)
                given = dict(allowed_mask=words, **params)
                ops.row_law(row, **given)
                ops.sample(row, seeds=seeds, positions=seeds, domain=3, **given)
                ids = fenced(torch.arange(row.shape[1]).flip(0).contiguous(), side)
                ops.sample(row, seeds=seeds, positions=seeds, **given, draft_token_ids=ids)
                ops.acceptance(row, row, **given, draft_token_ids=ids)
print("unharmed")
"""


@pytest.mark.parametrize("variant", ["avx512", "avx2", "baseline"])
def test_nothing_is_read_beside_the_tensors(run_python, variant):
    # Odd vocabularies, every tensor against an unreadable page at its end, then at its start.
    run_variant(run_python, FENCED, variant, "unharmed")


LAZY = """
import sys, torch
import specdec_ext
from guard import forbidden_rows
rule, target_rows, draft_rows = sys.argv[1], *(set(map(int, a.split(","))) for a in sys.argv[2:4])
vocab = 5003
target, draft = torch.zeros(4, vocab), torch.zeros(3, vocab)
draft[:, 7] = 1.0
target[:2, 9] = 1.0
# Token 7 has q > p: at u next to 1 it is rejected, at 0 accepted. The second coin rejects.
result = torch.ops.specdec.verify(
    forbidden_rows(target, target_rows)[None],
    torch.tensor([[7, 7, 7]]),
    forbidden_rows(draft, draft_rows)[None],
    uniforms=torch.tensor([[0.0, 1 - 2**-53, 0.0, 0.5]], dtype=torch.float64),
    rule=rule,
)
print("accepted", result[0].tolist(), result[1].tolist(), result[4].tolist())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["token", "lenient"])
def test_rows_after_the_first_rejection_are_never_read(run_python, rule):
    # Accepts x1, rejects x2: rows 0 and 1 decide, rows 2 and 3 cannot be read.
    done = run_python(LAZY, rule, "0,1", "0,1")
    assert done.returncode == 0, done.stderr
    assert "[1] [0]" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["greedy", "top_beta", "typical"])
def test_rules_without_a_draft_law_never_read_one(run_python, rule):
    # No draft row can be read; the first row's arg max is not token 7.
    done = run_python(LAZY, rule, "0,1,2,3" if rule != "greedy" else "0", "9")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rows", [("0", "0,1"), ("0,1", "0")])
def test_the_fence_works(run_python, rows):
    # The control: a row that must be read, made unreadable, kills the process.
    done = run_python(LAZY, "token", *rows)
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("rule", ["token", "lenient", "greedy"])
def test_rows_after_the_first_rejection_may_be_anything(operator, rule):
    # The same without page tables, for any backend: NaN rows would set a status bit.
    case = make_case(1, batch=24, gamma=3, vocab=33, rule=rule, filters=False, ragged=False)
    expected = operator.run(case)
    inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in case.inputs.items()}
    for b in range(24):
        n = int(expected.num_accepted[b])
        inputs["target_logits"][b, n + 1 :] = torch.nan
        inputs["draft_logits"][b, n + 1 :] = torch.nan
    got = operator.run(case.replace(**inputs))
    assert bool((expected.num_accepted < 3).any())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# ---- offsets ------------------------------------------------------------------------------------

FAR = """
import torch
import specdec_ext
from guard import allocate, at

# Requests and rows 2^31 + 64 elements apart: offsets pass 2^32 elements at request 2. Only the
# pages that are touched exist.
vocab, pitch = 1009, 2**31 + 64
u = torch.tensor([[0.1, 0.9]] * 4, dtype=torch.float64)
generator = torch.Generator().manual_seed(0)
for dtype in (torch.bfloat16, torch.float32):
    size = torch.empty(0, dtype=dtype).element_size()
    flat = at(allocate((4 * pitch + 2 * vocab) * size), 4 * pitch + 2 * vocab, dtype)
    far = flat.as_strided((4, 2, vocab), (pitch, vocab, 1))
    near = (torch.randn(4, 2, vocab, generator=generator) * 3).to(dtype)
    far.copy_(near)
    tokens = near[:, :1].float().argmax(2)
    tokens[3] = 5
    draft = near[:, :1].contiguous()
    ops = torch.ops.specdec
    # The control: what 32 bits of offset would find is something else.
    wrapped = flat[(3 * pitch) % 2**32 :][: 2 * vocab].view(2, vocab)
    assert not torch.equal(wrapped, near[3]) and 3 * pitch >= 2**32

    def same(got, expected):
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

    for rule in ("block", "token", "greedy", "top_beta"):
        options = dict(uniforms=u, rule=rule)
        expected = ops.verify(near, tokens, draft, **options)
        same(ops.verify(far, tokens, draft, **options), expected)
        same(ops.verify(near, tokens, far[:, :1], **options), expected)
    # Packed: rows of one table, far apart.
    table = flat.as_strided((4, vocab), (pitch, 1))
    rows = torch.tensor([[3, 2], [0, 3], [2, 1], [1, 0]])
    got = ops.verify(table, tokens, target_rows=rows, uniforms=u)
    same(got, ops.verify(near[:, 0][rows], tokens, uniforms=u))
    same(ops.row_law(table), ops.row_law(near[:, 0].contiguous()))
    same(ops.sample(table, u[:, 0].clone()), ops.sample(near[:, 0].contiguous(), u[:, 0].clone()))
print("unharmed")
"""


@pytest.mark.thorough
def test_offsets_beyond_32_bits(run_python):
    done = run_python(FAR)
    assert done.returncode == 0 and "unharmed" in done.stdout, done.stderr


# ---- how much -----------------------------------------------------------------------------------

PEAK = """
import ctypes, json, torch
import specdec_ext
from specdec_ext.contract import rule_names

torch.set_num_threads(2)
batch, gamma, vocab = 32, 5, 151_936
generator = torch.Generator().manual_seed(0)


def field(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024


def peak_growth(call):
    ctypes.CDLL(None).malloc_trim(0)  # free memory that is resident would hide what is allocated
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # VmHWM starts again from what is resident now
    before = field("VmRSS")
    result = call()
    return field("VmHWM") - before, result


found = {}
for dtype in (torch.bfloat16, torch.float32):
    target = torch.randn(batch, gamma + 1, vocab, generator=generator).to(dtype)
    draft = target[:, :gamma] + torch.randn(batch, gamma, vocab, generator=generator).to(dtype)
    tokens = draft.argmax(2)
    u = torch.rand(batch, gamma + 1, dtype=torch.float64, generator=generator)
    filters = dict(
        temperature=torch.full((batch,), 0.8), top_k=torch.full((batch,), 50),
        top_p=torch.full((batch,), 0.9), min_p=torch.full((batch,), 0.01),
    )
    for rule in rule_names(chains=True, races=False):
        for name, options in (("plain", {}), ("filters", filters)):
            def call():
                return torch.ops.specdec.verify(
                    target, tokens, draft, uniforms=u, rule=rule, raw_logprobs=rule == "token",
                    **options,
                )

            # Code pages and thread stacks are there after a first call of one request.
            one = {k: v[:1] for k, v in options.items()}
            torch.ops.specdec.verify(
                target[:1], tokens[:1], draft[:1], uniforms=u[:1], rule=rule,
                raw_logprobs=rule == "token", **one,
            )
            found[f"{rule} {name} {dtype}"] = peak_growth(call)[0]
    found[f"softmax {dtype}"] = peak_growth(lambda: torch.softmax(target, -1))[0]
    found[f"a megabyte {dtype}"] = peak_growth(lambda: torch.ones(2**20, dtype=torch.uint8))[0]
print(json.dumps(found))
"""


@pytest.mark.thorough
def test_extra_memory_is_small(run_python):
    # B = 32, gamma = 5, V = 151,936: logits of 58 (bfloat16) or 117 MB, at most 8 MB more.
    # Allocations of 64 KiB and more are fresh pages, given back when freed.
    done = run_python(PEAK, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # The controls: one probability tensor, and what little can be measured.
    controls = {k: found.pop(k) for k in list(found) if k.startswith(("softmax", "a megabyte"))}
    assert min(v for k, v in controls.items() if k.startswith("softmax")) > 50e6
    assert all(0.5e6 < v < 2e6 for k, v in controls.items() if k.startswith("a megabyte"))
    assert len(found) == 24 and max(found.values()) < 8e6, found


def test_full_size(operator):
    case = make_case(
        2, batch=2, gamma=5, vocab=151_936, dtype=torch.bfloat16, layout="padded", rule="block"
    )
    assert assert_tokens_match(operator.run(case), REFERENCE.run(case), case) <= 1
